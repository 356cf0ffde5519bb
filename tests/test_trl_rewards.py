"""Our tasks as TRL's reward functions, called as TRL calls them; `nox -s trl` has TRL itself."""

import inspect
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from added_task import add_task
from ground_truths import GROUND_TRUTHS
from repository import REPO

from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.tool_rl.call_formats import CALL_FORMATS
from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.trl_rewards import reward_funcs

GOOD = "<think>6 * 7</think>\n<answer>42</answer>"


def call(functions, completions, source="verl_gdpo/gsm8k", truth="42", step=0, **columns):
    """{reward: values}, by the calls of TRL's `_calculate_rewards`."""
    given = {
        "prompts": ["6 * 7?"] * len(completions),
        "completions": completions,
        "completion_ids": [[1] * 5 for _ in completions],
        "data_source": [source] * len(completions),
        "reward_model": [{"style": "rule", "ground_truth": truth}] * len(completions),
        "ability": ["math"] * len(completions),
        "trainer_state": SimpleNamespace(global_step=step),
        "log_extra": None,
        "log_metric": None,
    }
    return {f.__name__: f(**{**given, **columns}) for f in functions}


def counting(monkeypatch, value=1.0, **fields):
    """A task that notes its calls."""
    calls = []

    def score(response, ground_truth, *, response_tokens=None, step=None, limit=9):
        calls.append((response, ground_truth, response_tokens, step, limit))
        return {"a": float(len(response)), "b": value}

    def bounds(*, limit=9):
        return {"a": (0.0, 9.0), "b": (0.0, 1.0)}

    return add_task(monkeypatch, "mine", score, bounds, **fields), calls


def test_one_function_for_each_reward():
    functions = reward_funcs(TASKS["gsm8k"])
    assert call(functions, [GOOD, "<answer>42", "no"]) == {
        "correctness": [1.0, 1.0, 0.0],
        "format": [1.0, 0.0, 0.0],
        "integer": [1.0, 1.0, 0.0],
    }


@pytest.mark.parametrize("name", TASKS)
def test_each_task_scores_as_by_itself(name):
    """Good answers and the answers of the next row, several at a time."""
    task, truths = TASKS[name], GROUND_TRUTHS[name][:4]
    good = [task.good_response(truth) for truth in truths]
    answers, of = [*good, *good[1:], good[0]], [*truths, *truths]
    rewards = call(
        reward_funcs(task),
        answers,
        task.data_sources[0],
        reward_model=[{"style": "rule", "ground_truth": truth} for truth in of],
    )
    alone = [
        task.score(answer, truth, response_tokens=5, step=1)
        for answer, truth in zip(answers, of, strict=True)
    ]
    assert rewards == {reward: [s[reward] for s in alone] for reward in rewards}
    assert {*rewards} == {*alone[0]}
    assert len({*map(str, alone)}) > 1


def test_the_rewards_are_those_of_the_options():
    names = [f.__name__ for f in reward_funcs(TASKS["tool_rl"])]
    assert names == ["correctness", "format"]
    lenient = reward_funcs(TASKS["gsm8k"], normalize_numbers=True)
    assert call(lenient, ["<answer>1080</answer>"], truth="1,080")["correctness"] == [1.0]


def test_trl_logs_each_reward_under_its_name():
    """The metrics are called `rewards/NAME/mean`; those of two functions of one name are mixed."""
    functions = pickle.loads(pickle.dumps(reward_funcs(TASKS["gsm8k"])))
    assert [f.__name__ for f in functions] == ["correctness", "format", "integer"]
    # TRL asks both, and would await the result
    assert not any(map(inspect.iscoroutinefunction, functions))
    assert not any(inspect.iscoroutinefunction(function.__call__) for function in functions)


def test_a_conversation_is_its_text():
    messages = [[{"role": "assistant", "content": text}] for text in (GOOD, "42")]
    functions = reward_funcs(TASKS["gsm8k"])
    assert call(functions, messages) == call(reward_funcs(TASKS["gsm8k"]), [GOOD, "42"])


def test_a_completion_is_scored_once(monkeypatch):
    task, calls = counting(monkeypatch)
    functions = reward_funcs(task, limit=3)
    assert call(functions, ["x", "yy"], "mine", "g") == {"a": [1.0, 2.0], "b": [1.0, 1.0]}
    assert sorted(calls) == [("x", "g", 5, 1, 3), ("yy", "g", 5, 1, 3)]
    # in any order, and a batch that only starts alike is another one
    assert call(functions[::-1], ["x", "zzz"], "mine", "g")["a"] == [1.0, 3.0]
    assert len(calls) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"truth": "h"},
        {"step": 1},
        {"completion_ids": [[1] * 6] * 2},
        {"completions": ["x", "y"]},
    ],
)
def test_nothing_stale_is_returned(monkeypatch, change):
    task, calls = counting(monkeypatch)
    functions = reward_funcs(task)
    first = {"completions": ["x", "yy"], "source": "mine", "truth": "g", "step": 0}
    call(functions, **first)
    call(functions, **{**first, **change})
    assert len(calls) == 4


def test_a_batch_that_is_changed_in_place_is_scored_again(monkeypatch):
    task, _ = counting(monkeypatch)
    functions, batch = reward_funcs(task), ["x", "yy"]
    call(functions, batch, "mine")
    batch[0] = "xxx"
    assert call(functions, batch, "mine")["a"] == [3.0, 2.0]


def test_completions_are_scored_at_the_same_time(monkeypatch):
    """Two that wait for each other: one after the other, they would wait in vain."""
    both = threading.Barrier(2, timeout=60)

    def score(response, ground_truth, *, response_tokens=None, step=None):
        both.wait()
        return {"a": 1.0}

    task = add_task(monkeypatch, "mine", score, lambda: {"a": (0.0, 1.0)})
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert call(reward_funcs(task), ["x", "y"], "mine") == {"a": [1.0, 1.0]}


def test_a_reward_of_another_task_is_missing(monkeypatch):
    task, _ = counting(monkeypatch, value=None)
    functions = reward_funcs(TASKS["gsm8k"], task)
    sources = ["mine", "verl_gdpo/gsm8k"]
    assert call(functions, ["x", GOOD], data_source=sources) == {
        "a": [1.0, None],
        "b": [None, None],
        "correctness": [None, 1.0],
        "format": [None, 1.0],
        "integer": [None, 1.0],
    }


def test_functions_are_pickled_together(monkeypatch):
    functions = pickle.loads(pickle.dumps(reward_funcs(*TASKS.values())))
    (scoring,) = {f._scoring for f in functions}
    batches = []
    monkeypatch.setattr(scoring, "_score", lambda number, sample: batches.append(number) or {})
    call(functions, [GOOD, "42"])
    assert sorted(batches) == [0, 1]


def test_bad_use_is_explained(monkeypatch):
    with pytest.raises(ValueError, match=r"got no task; expected some of verl_gdpo"):
        reward_funcs()
    with pytest.raises(ValueError, match=r"\['gsm8k'\].*\['limit'\].*\['normalize_numbers'\]"):
        reward_funcs(TASKS["gsm8k"], limit=3)
    functions = reward_funcs(TASKS["gsm8k"])
    with pytest.raises(ValueError, match=r"no column 'reward_model'.*got \['answer', 'completion"):
        functions[0](completions=["x"], completion_ids=[[1]], answer=["42"], data_source=["y"])
    with pytest.raises(ValueError, match=r"completion 0 \(data_source 'aime'\).*'verl_gdpo/gsm8k'"):
        call(functions, ["x"], "aime")
    with pytest.raises(ValueError, match=r"completion 1 .*gsm8k ground truth: got ' 42'"):
        call(functions, ["x", "y"], reward_model=[{"ground_truth": t} for t in ("42", " 42")])
    with pytest.raises(ValueError, match=r"completion 0 .*gsm8k ground truth: got None"):
        call(functions, ["x"], reward_model=[None])
    task, _ = counting(monkeypatch, value=float("nan"))
    with pytest.raises(ValueError, match=r"completion 0 .*reward 'b' is nan; expected a finite"):
        call(reward_funcs(task), ["x"], "mine")


@pytest.mark.parametrize(
    "completion",
    [
        [],
        [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}],
        [{"role": "assistant", "content": "a", "audio": "b"}],
        [{"role": "assistant", "tool_calls": []}],
        [{"content": "a"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
    ],
)
def test_what_is_not_the_generated_text_is_refused(completion):
    with pytest.raises(ValueError, match=r"completion 1: got .*; expected a text, or one message"):
        call(reward_funcs(TASKS["gsm8k"]), [[{"role": "assistant", "content": "a"}], completion])


def message(content="", **read):
    return [{"role": "assistant", "content": content, **read}]


def called(*functions):
    """As TRL hands on the calls that it read."""
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_a_thought_that_trl_has_read(key):
    """The same scores as those of the text, in which white space of TRL's choice is lost."""
    functions = reward_funcs(TASKS["gsm8k"])
    read = message("<answer>42</answer>", **{key: "6 * 7"})
    none = message(GOOD, **{key: None})
    assert call(functions, [read, none]) == call(functions, [GOOD, GOOD])
    # one that is not closed has no answer below it
    cut = message(**{key: "<answer>42</answer>"})
    assert call(functions, [cut]) == call(functions, ["<think><answer>42</answer>"])
    assert call(functions, [cut])["format"] == [0.0]


F, G = {"a": 1, "b": "x"}, {"on": [True, None]}
TRUTH = render_answer("x", [{"name": "f", "parameters": F}, {"name": "g", "parameters": G}])


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_calls_that_trl_has_read(call_format):
    """Full marks for the right calls, also beside a thought, and fewer for one of the two."""
    functions = reward_funcs(TASKS["tool_rl"], call_format=call_format)
    # of JSON in tags, TRL keeps the key that the model wrote
    key = "parameters" if call_format == "toolrl" else "arguments"
    both = called({"name": "f", key: F}, {"name": "g", key: G})
    right = message(reasoning_content="x", tool_calls=both)
    half = message(reasoning_content="x", tool_calls=both[1:])
    other = message(reasoning_content="x", tool_calls=called({"name": "h", "x": 1}))
    rewards = call(functions, [right, half, other], "rlla", TRUTH)
    if call_format == "toolrl":  # whose calls share a block, which TRL cannot read
        assert rewards["correctness"][0] < 3 and rewards["format"] == [0, 1, 1]
    else:
        assert rewards["correctness"][0] == 3.0
        assert rewards["format"][:2] == [1, 1]
    assert -3 < rewards["correctness"][1] < 3 and rewards["correctness"][2] == -3.0


def test_the_text_that_is_scored_again(monkeypatch):
    task, calls = counting(monkeypatch)
    f = {"name": "f", "arguments": {"a": 1}}
    completions = [
        message("So:", reasoning_content="x", tool_calls=called(f)),
        message("So:", tool_calls=[f]),  # not in an object of their own
        message("So:", reasoning_content=None, tool_calls=None),
        message("So:", reasoning_content="x"),
        message(),
    ]
    call(reward_funcs(task), completions, "mine", "g")
    block = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    texts = [f"<think>x</think>\nSo:\n{block}", f"So:\n{block}", "So:", "<think>x</think>\nSo:", ""]
    assert sorted(scored[0] for scored in calls) == sorted(texts)


def test_calls_that_cannot_be_written_again_are_no_calls():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    functions = reward_funcs(TASKS["tool_rl"], call_format="hermes")
    of_deep = message(tool_calls=called({"name": "f", "arguments": {"a": deep}}))
    of_nan = message(tool_calls=called({"name": "f", "arguments": {"a": float("nan")}}))
    assert call(functions, [of_deep], "rlla", TRUTH)["correctness"] == [-3.0]
    assert -3.0 < call(functions, [of_nan], "rlla", TRUTH)["correctness"][0] < 0


def test_scoring_needs_neither_verl_nor_torch():
    """A fresh process, in which the imports of these fail."""
    program = """
import sys
sys.modules.update(dict.fromkeys(["verl", "ray", "torch", "tensordict", "transformers", "trl"]))
from verl_gdpo.tasks import TASKS
from verl_gdpo.trl_rewards import reward_funcs
columns = {"data_source": ["verl_gdpo/gsm8k"], "reward_model": [{"ground_truth": "42"}]}
for function in reward_funcs(*TASKS.values()):
    print(function.__name__, *function(completions=["42"], completion_ids=[[1]], **columns))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    scored = [line for line in done.stdout.splitlines() if not line.endswith(" None")]
    assert scored == ["correctness 1.0", "format 0.0", "integer 1.0"]
    assert {"bug None", "length None", "pass None"} < {*done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("completion", "prompt", "scored"),
    [
        ("an old man", "Q", "an old man"),
        ("<think>an old man</think>\n a man", "Q", "a man"),
        ("an old man</think> a man", "Q", "a man"),
        ("an old man", "Q\n<think>\n", ""),
        ("an old man", "Q\n<think>\n\n</think>\n\n", "an old man"),
        ([{"role": "assistant", "content": "a man", "reasoning_content": "old"}], "Q", "a man"),
        ([{"role": "assistant", "content": "an old man"}], [{"role": "user"}], "an old man"),
    ],
)
def test_a_task_scores_the_answer_as_in_verl(monkeypatch, completion, prompt, scored):
    mine, calls = counting(monkeypatch, scores="answer")
    call(reward_funcs(mine), [completion], "mine", "gold", prompts=[prompt])
    assert [text for text, *_ in calls] == [scored]


def test_a_task_that_scores_the_response_gets_the_tag_that_the_prompt_opens(monkeypatch):
    mine, calls = counting(monkeypatch)
    call(reward_funcs(mine), ["a</think> b"], "mine", "gold", prompts=["Q<think>"])
    assert [text for text, *_ in calls] == ["<think>a</think> b"]
    good = GOOD.removeprefix("<think>")
    found = call(reward_funcs(TASKS["gsm8k"]), [good, good], prompts=["Q<think>", "Q"])
    assert found["format"] == [1.0, 0.0]
    # of a conversation, TRL does not tell what the chat template adds
    functions = reward_funcs(TASKS["gsm8k"], prompt_end="<|im_start|>assistant\n<think>\n")
    messages = [{"role": "user", "content": "6 * 7?"}]
    said = [{"role": "assistant", "content": good}]
    assert call(functions, [said], prompts=[messages])["format"] == [1.0]
    assert call(reward_funcs(TASKS["gsm8k"]), [said], prompts=[messages])["format"] == [0.0]
    closed = "<answer>42</answer>"
    found = call(reward_funcs(TASKS["gsm8k"]), [closed] * 2, prompts=["Q<think></think>", "Q"])
    assert found["format"] == [1.0, 0.0]
