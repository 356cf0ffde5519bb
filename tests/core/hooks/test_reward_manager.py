"""The reward manager as verl's agent loop calls it, one sample at a time."""

import asyncio
import builtins
import collections
import enum
import math
import pickle
import re
import sys
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from added_task import add_task
from omegaconf import OmegaConf
from reward_rows import GOLD, Tokenizer, row_of, scored
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.utils.reward_score import default_compute_score
from verl_batch import verl_config

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import ERROR_KEY, NOTES_KEY, RESPONSE_KEY
from verl_gdpo.hooks.before_training import may_have_gdpo_manager, runs_gdpo_manager
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.scoring import scorer_calls, threads
from verl_gdpo.scoring.response import ResponseReader, Tags
from verl_gdpo.scoring.scorer_calls import SlowScoring
from verl_gdpo.tasks import TASKS, sandbox
from verl_gdpo.tasks.tool_rl.score import CallNotes

pytestmark = pytest.mark.usefixtures("event_loop")


def manager(
    compute_score=None,
    *,
    on_v1=True,
    reward_kwargs=None,
    router=None,
    **algorithm_keys,
):
    config = OmegaConf.create(
        {
            "algorithm": algorithm_keys,
            "reward": {
                "custom_reward_function": {"path": compute_score and "scorer.py"},
                **({"reward_kwargs": reward_kwargs} if reward_kwargs else {}),
            },
            "trainer": {
                "experiment_name": "qwen-run",
                "use_v1": True,
                "rollout_data_dir": "rollouts",
            },
            "transfer_queue": {"enable": on_v1},
        }
    )
    return GdpoRewardManager(config, Tokenizer(), compute_score or verls_default, *(router or ()))


ALL_READ = {NOTES_KEY: CallNotes().numbers()}  # what the scorer of tool_rl notes


def verls_default(data_source, solution_str, ground_truth, extra_info):
    return {"score": 9.0, "found": float(len(solution_str)), "source": data_source}


def score(manager, response, ground_truth=GOLD, data_source="rlla", **fields):
    return scored(manager, response, ground_truth, data_source, **fields)


def test_our_scorer_is_chosen_by_data_source():
    result = score(manager(), GOLD)
    assert result == {
        "reward_score": 4.0,
        "reward_extra_info": {"format": 1.0, "correctness": 3.0, "score": 4.0, **ALL_READ},
    }


def test_why_calls_are_not_read_is_no_reward_either():
    hermes = manager(reward_kwargs={"call_format": "hermes"})
    for response, correctness, why in (
        (GOLD.replace("parameters", "arguments"), 3.0, ""),
        (GOLD, -3.0, "call_incomplete"),
        ("", -3.0, "no_call"),
    ):
        info = score(hermes, response)["reward_extra_info"]
        assert info["correctness"] == correctness
        assert info[NOTES_KEY] == CallNotes(why).numbers()


def test_what_a_scorer_notes_is_no_reward(monkeypatch):
    def run(program, tests, notes, **_):
        notes.stopped, notes.seconds_waited = True, 2.5
        return [sandbox.TestResult(True, "10\n") for _ in tests]

    monkeypatch.setattr(sandbox, "run", run)
    truth = '{"function": null, "tests": [{"input": "3", "output": "10"}]}'
    result = score(manager(), "```python\nx\n```", truth, "verl_gdpo/coding")
    notes = {"stopped": 1.0, "seconds_waited": 2.5}  # logged
    rewards = {"pass": 1.0, "length": 1.0, "bug": 1.0}
    assert result["reward_extra_info"] == {**rewards, NOTES_KEY: notes, "score": 3.0}
    rows = BatchRows.from_keys(["u_0_0"], [result["reward_extra_info"]], ["x"], [False])
    assert {*RewardMatrix.of(rows, GdpoSettings()).weights} == {*rewards}


@pytest.mark.parametrize("slow", ["ours", "verl's"])
def test_a_scorer_that_waits_holds_up_no_other(monkeypatch, slow):
    """40 rows of it, more than the threads of a pool: other rows are decoded and scored."""
    done = threading.Event()

    def wait(*_, **__):
        assert done.wait(60)
        return {"a": 1.0}

    add_task(monkeypatch, "slow", wait, programs=TASKS["coding"].programs)
    ours = manager()
    ours.compute_score = wait
    source = "slow" if slow == "ours" else "verl's own"

    async def score_all():
        rows = [row_of("x", "", source) for _ in range(40)]
        waiting = [asyncio.create_task(ours.run_single(row)) for row in rows]
        await asyncio.sleep(0.2)
        try:
            return await asyncio.wait_for(ours.run_single(row_of(GOLD)), 30)
        finally:
            done.set()
            await asyncio.gather(*waiting)

    assert ours.loop.run_until_complete(score_all())["reward_score"] == 4.0


def test_as_many_programs_at_once_as_there_are_cores(monkeypatch):
    """More threads would wait."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    running, most, lock = [0], [], threading.Lock()

    def run(*_, **__):
        with lock:
            running[0] += 1
            most.append(running[0])
        threading.Event().wait(0.05)
        with lock:
            running[0] -= 1
        return {"a": 1.0}

    add_task(monkeypatch, "programs", run, programs=TASKS["coding"].programs)
    ours = manager()

    async def score_all():
        rows = [ours.run_single(row_of("x", "", "programs")) for _ in range(12)]
        await asyncio.gather(*rows)

    ours.loop.run_until_complete(score_all())
    assert max(most) == 2


def test_reward_score_obeys_conditions_and_the_raw_values_stay():
    condition = {"reward": "correctness", "at_least": 3}
    conditioned = manager(
        gdpo={"rewards": {"correctness": 1.0, "format": {"weight": 512.0, "when": condition}}},
    )
    right, wrong = score(conditioned, GOLD), score(conditioned, GOLD.replace('"f"', '"g"'))
    assert right["reward_score"] == 3.0 + 512.0
    assert wrong["reward_score"] == -3.0
    assert right["reward_extra_info"]["format"] == wrong["reward_extra_info"]["format"] == 1.0


def test_reward_score_has_the_weights_of_the_step():
    scheduled = manager(gdpo={"rewards": {"correctness": {"weight": {0: 1.0, 100: 0.0}}}})
    assert score(scheduled, GOLD, global_steps=0)["reward_score"] == 3.0
    assert score(scheduled, GOLD, global_steps=50)["reward_score"] == 1.5
    message = score(scheduled, GOLD)["reward_extra_info"][ERROR_KEY]
    assert "needs the training step" in message


def test_verls_names_of_the_same_rewards_stay_valid():
    verl_keys = {"gdpo_reward_keys": ["accuracy_reward", "format_reward"]}
    result = score(manager(**verl_keys, gdpo_reward_weights=[1.0, 2.0]), GOLD)
    assert result["reward_score"] == 3.0 + 2.0
    assert result["reward_extra_info"]["accuracy_reward"] == 3.0


def test_options_of_our_scorer():
    info = score(manager(reward_kwargs={"max_correctness": 1}), GOLD)["reward_extra_info"]
    assert info == {"format": 1, "correctness": 1, "score": 2, **ALL_READ}
    error = score(manager(reward_kwargs={"lenght": True}), GOLD)["reward_extra_info"][ERROR_KEY]
    assert "TypeError" in error and "lenght" in error


def test_what_our_scorers_are_given(monkeypatch):
    seen = []

    def scorer(response, ground_truth, *, response_tokens, step, strict=False):
        seen.append((response, ground_truth, response_tokens, step, strict))
        return {"a": 1.0}

    add_task(monkeypatch, "mine", scorer)
    ours = manager(reward_kwargs={"strict": True})
    score(ours, "hello", "truth", "mine", global_steps=3)
    score(ours, "hello", "truth", "mine", reward_model=None)
    assert seen == [("hello", "truth", 6, 3, True), ("hello", None, 6, None, True)]


def test_configured_rewards_of_other_data_sources_are_missing():
    mixed = manager(gdpo={"rewards": {"format": 1.0, "acc": 1.0}})
    assert score(mixed, GOLD)["reward_extra_info"] == {
        "format": 1.0,
        "correctness": 3.0,
        "acc": None,
        "score": 1.0,
        **ALL_READ,
    }
    math = manager(lambda **_: 0.5, gdpo={"rewards": {"format": 1.0, "acc": 1.0}})
    math.is_custom = False  # stands for verl's default, which gives this source a number
    assert score(math, "x", data_source="openai/gsm8k")["reward_extra_info"] == {
        "format": None,
        "acc": 0.5,
        "score": 0.5,
    }
    # these rows may have a `length` too, if it is switched on; in a mixture it is that of others
    unasked = manager(gdpo={"rewards": {"format": 1.0, "length": 1.0}})
    assert score(unasked, GOLD)["reward_extra_info"]["length"] is None
    nobodys = manager(gdpo={"rewards": {"format": 1.0, "lenght": 1.0}})
    assert "'lenght' is configured" in score(nobodys, GOLD)["reward_extra_info"][ERROR_KEY]


TOOLS = {"tool_extra_fields": {"tool": "t"}, "reward_scores": {"turn": [1]}, "__num_turns__": 3}


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        (TOOLS, {"index": 17, "tool": "t", "num_turns": 3, "rollout_reward_scores": {"turn": [1]}}),
        ({"extra_info": None}, {"num_turns": None, "rollout_reward_scores": {}}),
    ],
)
def test_a_custom_function_comes_first_and_gets_what_verl_gives_it(fields, given):
    seen = {}

    def scorer(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info, response=solution_str)
        return {"a": np.float32(2), "b": True, "c": np.False_, "score": 3.0}

    result = score(manager(scorer), "hello", **fields)
    assert result == {
        "reward_score": 3.0,
        "reward_extra_info": {"a": 2.0, "b": 1.0, "c": 0.0, "score": 3.0},
    }
    assert all(type(value) is float for value in result["reward_extra_info"].values())
    ours = {"response": "hello", "experiment_name": "qwen-run", "response_tokens": 6}
    ours |= {"generated_tokens": 6, "tool_seconds": 0.0, "is_validation": False}
    ours |= {"validate": False}
    assert seen == {**given, **ours}


def test_an_error_of_a_row_that_says_next_to_nothing():
    row = row_of("x")
    row.non_tensor_batch.clear()
    result = manager(failing(KeyError))
    message = result.loop.run_until_complete(result.run_single(row))["reward_extra_info"][ERROR_KEY]
    assert message.startswith(
        "reward manager gdpo, prompt uid ?, data_source '?', extra_info.index ?: KeyError"
    )


@pytest.mark.parametrize(
    ("returned", "ok"),
    [
        ({"a": 1.0, "b": None, "c": 0.0, "score": 1.0}, True),
        ({"a": 1.0, "b": None, "score": 2.0}, False),
        ({"a": 1.0, "b": -1.0, "score": 9e-6}, True),  # float32 may leave it
        ({"a": 1.0, "b": -1.0, "score": 2e-5}, False),
        ({"a": 3e6, "b": 1e6, "score": 4e6 + 30}, True),
        ({"a": 3e6, "b": 1e6, "score": 4e6 + 50}, False),
    ],
)
def test_a_score_may_miss_the_sum_by_what_float32_rounds(returned, ok):
    info = score(manager(failing(returned)), "x")["reward_extra_info"]
    assert ("not the sum of" in info.get(ERROR_KEY, "")) != ok


@pytest.mark.parametrize(
    "returned",
    [
        {"score": 0.0, "acc": None},
        {"score": 0.0, "right": None, "fmt": None},
        {"score": 1.0, "right": None, "fmt": 1.0},
    ],
)
def test_none_is_missing_beside_a_score(returned):
    assert score(manager(failing(returned)), "x")["reward_extra_info"] == returned


class Key(str, enum.Enum):
    A = "a"


class Kind(enum.IntEnum):
    GOOD = 1


def test_what_a_function_returns_reaches_other_processes():
    """No class of the user's file is in it, and a mapping of the user's stays as it was."""
    parts = collections.defaultdict(list, a=[Kind.GOOD])
    returned = {Key.A: 1.0, "b": Kind.GOOD, "text": Key.A, "parts": parts}
    info = score(manager(failing(returned)), "x")["reward_extra_info"]
    assert info == {"a": 1.0, "b": 1.0, "text": "a", "parts": {"a": [1]}, "score": 2.0}
    assert {type(key) for key in info} == {str} and type(info["text"]) is str
    assert type(info["parts"]["a"][0]) is int
    assert pickle.loads(pickle.dumps(info)) == info
    assert {**parts} == {"a": [Kind.GOOD]}


MANAGERS = """
from verl_gdpo.hooks.reward_manager import GdpoRewardManager

class Mine(GdpoRewardManager):
    pass

class Other:
    pass
"""


def test_whose_manager_verl_would_make(monkeypatch, tmp_path):
    (tmp_path / "managers.py").write_text(MANAGERS)

    def runs(name, source="register"):
        config = verl_config(f"reward.reward_manager.name={name}")
        config.reward.reward_manager.source = source
        config.reward.reward_manager.module.path = f"{tmp_path}/managers.py"
        return runs_gdpo_manager(config)

    assert runs("gdpo") and not runs("naive")

    class Mine(GdpoRewardManager):
        pass

    monkeypatch.setitem(REWARD_MANAGER, "mine", Mine)
    assert runs("mine")
    assert not runs("nobody")  # verl says so when it makes them
    assert runs("Mine", source="importlib") and not runs("Other", source="importlib")


def test_a_file_of_a_manager_is_run_only_if_it_names_us(tmp_path):
    """An agent loop worker asks; verl itself runs the file in its reward workers alone."""
    config = verl_config("reward.reward_manager.source=importlib")
    path = tmp_path / "managers.py"
    config.reward.reward_manager.module.path = str(path)
    assert not may_have_gdpo_manager(config)  # verl says that there is no file
    path.write_text("raise RuntimeError\n")
    assert not may_have_gdpo_manager(config)
    path.write_text(MANAGERS)
    assert may_have_gdpo_manager(config)
    config.reward.reward_manager.module.path = f"file://{path}"
    assert may_have_gdpo_manager(config)
    assert may_have_gdpo_manager(verl_config("reward.reward_manager.name=mine"))


@pytest.fixture(params=["plain", "async"])
def as_scorer(request):
    """The function, or one that is awaited and then calls it."""

    def either(function):
        async def in_the_loop(*args, **kwargs):
            await asyncio.sleep(0)
            return function(*args, **kwargs)

        return in_the_loop if request.param == "async" else function

    return either


class Callable:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return {"a": float(len(solution_str))}


@pytest.mark.parametrize(
    "scorer", [Callable().__call__, Callable(), lambda **given: Callable()(**given)]
)
def test_an_async_function_is_awaited(scorer):
    assert score(manager(scorer), "xyz")["reward_extra_info"] == {"a": 3.0, "score": 3.0}


def test_a_scorer_that_asks_a_reward_model_knows_where(as_scorer):
    seen = []

    def scorer(data_source, solution_str, ground_truth, extra_info, **router):
        seen.append(router)
        return 1.0

    score(manager(as_scorer(scorer), router=("10.0.0.1:8000", "tokenizer")), "x")
    # verl names them together, and neither where there is no reward model
    score(manager(as_scorer(scorer), router=(None, "tokenizer")), "x")
    both = {"reward_router_address": "10.0.0.1:8000", "reward_model_tokenizer": "tokenizer"}
    assert seen == [both, {}]


def test_an_error_names_the_last_row_of_a_session():
    rows = DataProto.concat([row_of("first"), row_of("final", data_source="b", uid="u-2")])
    failed = manager(failing(KeyError))
    message = failed.loop.run_until_complete(failed.run_single(rows))["reward_extra_info"]
    assert "uid u-2, data_source 'b'" in message[ERROR_KEY]


def failing(value):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        if isinstance(value, type):
            raise value(*(("city",) if value is KeyError else ()))
        return value

    return scorer


def error_of(scorer, **fields):
    """What the row's error says."""
    return score(manager(scorer), "x", **fields)["reward_extra_info"][ERROR_KEY]


@pytest.mark.parametrize(
    ("scorer", "settings", "reason"),
    [
        (failing(KeyError), {}, r"KeyError: 'city' \[.*test_reward_manager.py:\d+\]"),
        (failing({"a": float("nan")}), {}, "reward 'a' is nan; expected a finite number"),
        (failing({"a": "high"}), {}, "the scorer returned no number: {'a': 'high'}"),
        (failing({"a": "high"}), {"gdpo": {"rewards": {"a": 1}}}, "reward 'a' is 'high'"),
        (failing({}), {}, "the scorer returned no number: {}"),
        (failing({"a": 10**400}), {}, "reward 'a' is inf; expected a finite number"),
        (failing({"a": torch.tensor(math.inf)}), {}, "'a' is inf; expected a finite number"),
        (failing({"a": 0.7, "b": 1.0, "score": 1.0}), {}, r"score=1, .* not the sum of \{'a': 0.7"),
        (failing(StopIteration), {}, r"StopIteration \[.*test_reward_manager.py:\d+\]"),
        (failing({"a": 1.0}), {"gdpo": {"rewards": {"b": 1}}}, r"'b' is configured.*\['a'\]"),
        (failing("1.0"), {}, r"the scorer returned '1.0' \(str\); expected a number or {name: r"),
        (failing([1.0]), {}, r"the scorer returned \[1.0\] \(list\); expected a number"),
        (failing(None), {}, r"17: the scorer returned None; expected .*}$"),
        (failing({"a": 1.0}), {"gdpo": {"rewards": {"acc": 1}}}, r"'acc' is configured.*\['a'\]"),
        (failing({"score": 1.0, "acc": None}), {}, r"score=1, .* not the sum of \{'acc': None\}"),
        (failing({"a": 1e39}), {}, r"'a' is 1e\+39; expected a number from -1e\+38 to 1e\+38"),
        (failing({"a": 9e37, "b": 9e37}), {}, r"sum of the rewards is 1.8e\+38; expected a num"),
        *(
            (failing({"a": 1.0, name: 1.0}), {}, f"name '{name}': .* verl-gdpo's own; rename it")
            for name in ("gdpo_error", "gdpo_notes", "gdpo_own_score", "gdpo_rubric_a")
        ),
    ],
)
def test_what_cannot_be_scored_is_carried_as_an_error(scorer, settings, reason):
    result = score(manager(scorer, **settings), "x")
    assert result["reward_score"] == 0.0
    message = result["reward_extra_info"][ERROR_KEY]
    assert "uid u-1" in message and "extra_info.index 17" in message
    assert re.search(reason, message)
    with pytest.raises(RuntimeError, match="uid u-1"):  # the legacy trainer stops by itself
        score(manager(scorer, on_v1=False, **settings), "x")


class Escape(BaseException):
    pass


class Unreadable(Exception):
    def __str__(self):
        raise Escape


async def group_of_errors():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        raise KeyError("city")


def cancel_yourself():
    asyncio.current_task().cancel()
    return asyncio.sleep(0)


CAUSED = KeyError("a")
CAUSED.__cause__ = OSError("disk")
RAISED = [
    (ValueError("no such city"), "no such city"),
    (ValueError(), "ValueError"),
    (KeyError(), "KeyError"),
    (CAUSED, "KeyError: 'a'"),
    (CancelledError("x"), "CancelledError: x"),
    (asyncio.CancelledError("x"), "CancelledError: x"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (SystemExit(3), "SystemExit: 3"),
    (GeneratorExit(), "GeneratorExit"),
    (Escape("x"), "Escape: x"),
    (Unreadable(), "Unreadable: its text cannot be read"),
    (StopAsyncIteration(), "StopAsyncIteration"),
]
AWAITED = [(cancel_yourself, "CancelledError")]
if sys.version_info >= (3, 11):
    RAISED += [
        (vars(builtins)["ExceptionGroup"]("two", [KeyError("a"), KeyError("b")]), "KeyError: 'a'"),
        (vars(builtins)["BaseExceptionGroup"]("one", [Escape("x")]), "Escape: x"),
    ]
    AWAITED += [(group_of_errors, "KeyError: 'city'")]


@pytest.mark.parametrize(("error", "reason"), RAISED)
def test_whatever_a_scorer_raises_is_an_error_of_its_sample(error, reason, as_scorer):
    def scorer(*args, **kwargs):
        raise error

    message = error_of(as_scorer(scorer))
    assert "uid u-1" in message and f"17: {reason} [" in message
    assert re.search(r"test_reward_manager.py:\d+\]$", message)


@pytest.mark.parametrize(("scoring", "reason"), AWAITED)
def test_a_scorer_that_cancels_its_own_task_is_an_error(scoring, reason):
    async def scorer(*args, **kwargs):
        await scoring()

    assert f"17: {reason}" in error_of(scorer)


def test_what_a_scorer_returns_may_raise_anything_when_it_is_read():
    class Odd:
        def __float__(self):
            raise KeyboardInterrupt

    assert "17: KeyboardInterrupt [" in error_of(failing({"a": Odd()}))


def test_an_error_of_a_row_with_other_extra_info():
    message = error_of(failing(KeyError), extra_info='{"index": 3}')
    assert "uid u-1" in message and "extra_info.index ?: TypeError" in message


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cancellation_by_verl_stays_one(is_async):
    started, ended = threading.Event(), threading.Event()

    def scorer(*_, **__):
        started.set()
        assert ended.wait(60)

    async def in_the_loop(*_, **__):
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def cancel():
        session = asyncio.ensure_future(cancelled.run_single(row_of("x")))
        while not started.is_set():
            await asyncio.sleep(0.001)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        assert ended.is_set() == is_async  # a thread cannot be cancelled
        ended.set()

    cancelled = manager(in_the_loop if is_async else scorer)
    cancelled.loop.run_until_complete(cancel())


def test_who_waits_for_a_scorer_is_cancelled_with_it():
    async def cancel():
        scoring = scorer_calls.in_own_task(lambda: asyncio.sleep(60))
        waiting = asyncio.ensure_future(scorer_calls.answer_of(scoring))
        await asyncio.sleep(0.01)  # the scorer has begun
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(asyncio.wait({scoring}), 10)

    asyncio.run(cancel())


def test_a_missing_ground_truth_is_an_error_not_a_low_score():
    message = score(manager(), GOLD, ground_truth=None)["reward_extra_info"][ERROR_KEY]
    assert "ground" in message and "uid u-1" in message


# --- verl's own assembly of a session ------------------------------------------------------------


# What a tool of these tests writes.
TOOL = "TOL"


def score_session(manager, outputs):
    """verl's agent loop worker hands a session of [(prompt, response), ...] to `manager`."""
    worker = object.__new__(AgentLoopWorker)
    worker.processor = worker.mm_processor_kwargs = None
    worker.config = OmegaConf.create({"algorithm": {"adv_estimator": "gdpo"}})
    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=manager.run_single))
    worker.reward_loop_worker_handles = [handle]
    session = [
        AgentLoopOutput(
            prompt_ids=[ord(c) for c in prompt],
            response_ids=[ord(c) for c in response],
            response_mask=[float(c not in TOOL) for c in response],
            metrics=AgentLoopMetrics(tool_calls=1.5),
        )
        for prompt, response in outputs
    ]
    row = {"uid": "u-1", "data_source": "d", "reward_model": {"ground_truth": "done"}}
    manager.loop.run_until_complete(worker._compute_score(session, row))
    assert [*session[-1].extra_fields] == ["reward_extra_info"]  # each is a column of the batch
    return session[-1].extra_fields["reward_extra_info"]


def test_the_last_output_of_a_session_is_scored_without_the_padding_of_the_others():
    seen = []

    def scorer(data_source, solution_str, ground_truth, extra_info):
        seen.append((solution_str, extra_info["response_tokens"], extra_info["tool_seconds"]))
        return {"right": float(solution_str == ground_truth)}

    longer = ("a prompt of many tokens", "an answer of many tokens")
    for outputs in ([longer, ("short", "done")], [("p", "x"), ("a longer prompt", "done")]):
        assert score_session(manager(scorer), outputs)["right"] == 1.0
    assert score_session(manager(scorer), [("done", "no"), longer])["right"] == 0.0
    # the seconds are those of all outputs
    assert seen == [("done", 4, 3.0), ("done", 4, 3.0), (longer[1], len(longer[1]), 3.0)]


def test_a_tools_text_is_neither_thought_nor_answer_and_its_tokens_are_not_the_policys():
    seen = []

    def scorer(solution_str, answer_str, reasoning_str, extra_info, **_):
        counts = extra_info["response_tokens"], extra_info["generated_tokens"]
        seen.append((solution_str, reasoning_str, answer_str, *counts))
        assert not [name for name in extra_info if name.startswith("gdpo")]
        return 1.0

    info = score_session(manager(scorer), [("p", "<think>aTOOLb</think>done")])
    seen_by_verl = "<think>aTOOLb</think>done"
    assert seen == [(seen_by_verl, "ab", "done", 25, 21)]
    turns = [["", "<think>ab</think>done"]]
    assert info[RESPONSE_KEY] == {"turns": turns, "generated_tokens": 21}
    # An ordinary response is dumped by verl as it was scored.
    assert RESPONSE_KEY not in score_session(manager(scorer), [("p", "<think>a</think>done")])


# --- where the thought begins or ends in the prompt ----------------------------------------------

OPENED, CLOSED = "Q: <think>\n", "Q: <think>\n\n</think>\n\n"
THOUGHT, _, CALL = GOLD.removeprefix("<think>").partition("</think>\n")


def test_the_format_of_a_thought_that_the_prompt_opens_or_closes():
    after_tag = GOLD.removeprefix("<think>")
    cases = [
        ("Q:", GOLD, 1.0),
        ("Q:", after_tag, 0.0),
        (OPENED, after_tag, 1.0),
        (OPENED, CALL, 0.0),  # the thought never ends
        (CLOSED, CALL, 1.0),
        (CLOSED, GOLD, 0.0),
        (CLOSED, f"so\n{CALL}", 0.0),
        ("Q:", CALL, 0.0),
    ]
    for prompt, response, form in cases:
        info = score(manager(), response, prompt=prompt)["reward_extra_info"]
        assert (info["format"], info["correctness"]) == (form, 3.0), (prompt, response)


def test_the_dump_knows_how_a_response_was_scored():
    info = score(manager(), "x</think>", prompt=OPENED)["reward_extra_info"]
    # verl dumps the text itself.
    turns = [["<think>\n", None]]
    assert info[RESPONSE_KEY] == {"turns": turns, "generated_tokens": 10}
    made = manager()
    made._dumps = False
    assert RESPONSE_KEY not in score(made, "x</think>", prompt=OPENED)["reward_extra_info"]
    of_validation = {"tool_extra_fields": {"is_validation": True}}
    info = score(manager(), "x</think>", prompt=OPENED, **of_validation)["reward_extra_info"]
    assert RESPONSE_KEY not in info


def test_validation_has_the_name_that_verl_gives_it_too():
    """A column of the rows that is called so stays."""

    def scorer(extra_info, **_):
        seen.append(extra_info["validate"])
        return {"a": 1.0}

    seen = []
    of_validation = {"tool_extra_fields": {"is_validation": True}}
    score(manager(scorer), "x", **of_validation)
    score(manager(scorer), "x")
    score(manager(scorer), "x", extra_info={"validate": "mine"}, **of_validation)
    assert seen == [True, False, "mine"]


def test_a_task_scores_the_answer_and_another_the_response(monkeypatch):
    seen = []

    def scorer(response, ground_truth, *, response_tokens, step):
        seen.append(response)
        return {"a": 1.0}

    add_task(monkeypatch, "of_answer", scorer, scores="answer")
    add_task(monkeypatch, "of_response", scorer)
    for source in ("of_answer", "of_response"):
        score(manager(), "a </think> 4", data_source=source, prompt=OPENED)
    assert seen == ["4", "<think>\na </think> 4"]


def test_special_tokens_of_the_thought_and_of_the_task_stay(monkeypatch):
    """Here `{` stands for <think>, `}` for </think>, and `[` for <call>."""
    texts = {"{": "<think>", "}": "</think>", "[": "<call>", "\0": "<end>"}

    class WithSpecialTokens:
        def __init__(self):
            self.added_tokens_decoder = {}
            for char, text in texts.items():
                self.added_tokens_decoder[ord(char)] = SimpleNamespace(content=text, special=True)

        def decode(self, ids, skip_special_tokens):
            if skip_special_tokens:
                ids = [number for number in ids if chr(number) not in texts]
            return "".join(texts.get(chr(number), chr(number)) for number in ids)

    seen = []

    def scorer(response, ground_truth, *, response_tokens, step):
        seen.append(response)
        return {"a": 1.0}

    add_task(monkeypatch, "mine", scorer, scores="answer", kept_tokens=("<call>",))
    for custom in (None, lambda solution_str, answer_str, **_: seen.append(answer_str) or 1.0):
        made = manager(custom)
        made.tokenizer = WithSpecialTokens()
        made._reader = ResponseReader(made.tokenizer)
        result = score(made, "a } [f", data_source="mine", prompt="{")
        assert result["reward_score"] == 1.0
    assert seen == ["<call>f", "f"]


def test_tags_of_the_users_own():
    seen = []

    def scorer(solution_str, answer_str, **_):
        seen.append(answer_str)
        return 1.0

    made = manager(scorer)
    made._reader = ResponseReader(Tokenizer(), [Tags("<plan>", "</plan>")])
    score(made, "a</plan>4", prompt="<plan>")
    assert seen == ["4"]


# --- what counts when no reward is named ---------------------------------------------------------


def test_what_verl_counts_is_no_reward():
    result = score(manager(failing({"a": 1.0, "num_turns": 3})), "x")
    assert result["reward_score"] == 1.0
    assert result["reward_extra_info"] == {"a": 1.0, "num_turns": 3, "score": 1.0}
    named = manager(failing({"a": 1.0, "num_turns": 3}), gdpo={"rewards": {"num_turns": -0.5}})
    assert score(named, "x")["reward_score"] == -1.5


@pytest.mark.parametrize("name", ["reward", "uid", "input", "a/b", "", 7, (1, 2), None])
def test_names_that_verl_uses_itself_are_refused(name):
    message = error_of(failing({"a": 1.0, name: "only logged"}))
    assert f"uid u-1, data_source 'rlla', extra_info.index 17: name {name!r}: " in message


def test_what_is_no_number_is_no_reward_and_stays():
    returned = {"a": 2, "why": "short", "parts": [1, 2], "gone": None}
    odd = {"raw": b"1", "lock": threading.Lock(), "rest": (i for i in "x")}
    result = score(manager(failing({**returned, **odd})), "x")
    info = result["reward_extra_info"]
    assert result["reward_score"] == 2.0
    assert {name: info.pop(name) for name in [*returned, "score"]} == {**returned, "score": 2.0}
    assert info == {name: repr(value) for name, value in odd.items()}  # what Ray can send


def test_a_score_alone_is_the_reward_acc(caplog):
    plain = manager(failing({"score": 0.5, "pred": "7"}))
    result = [score(plain, "x") for _ in range(2)][1]
    assert caplog.text.count("returned 'pred' as '7', which is no number, so it is no reward") == 1
    assert result["reward_score"] == 0.5
    assert result["reward_extra_info"] == {"score": 0.5, "pred": "7", "acc": 0.5}


CODE = "```python\nprint(int(input()) + 1)\n```"
TESTS = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'
# a data source of each scorer that verl has offline: a right response and its ground truth
VERLS_SOURCES = {
    "openai/gsm8k": ("#### 7", "7"),
    "lighteval/MATH": (r"\boxed{7}", "7"),
    "math_dapo": ("Answer: 7", "7"),
    "numina_aops_forum": (r"\boxed{7}", "7"),
    "codecontests": (CODE, TESTS),
    "searchR1_nq": ("<answer>Oslo</answer>", {"target": ["Oslo"]}),
}


@pytest.mark.parametrize("source", VERLS_SOURCES)
def test_rows_that_verl_scores_need_no_settings(source):
    right, truth = VERLS_SOURCES[source]
    plain = manager(default_compute_score)
    plain.is_custom = False  # as when no custom function is configured
    results = [score(plain, text, truth, source) for text in (right, "nothing")]
    infos = [result["reward_extra_info"] for result in results]
    assert [info.get(ERROR_KEY) for info in infos] == [None, None]
    rows = BatchRows.from_keys(["u_0_0", "u_1_0"], infos, [source] * 2, [False] * 2)
    rewards = RewardMatrix.of(rows, GdpoSettings())
    assert rewards.weights == {"acc": 1.0}
    assert rewards.values_BK[:, 0].tolist() == [1.0, 0.0]
    assert [result["reward_score"] for result in results] == [1.0, 0.0]


# --- a scorer that does not end ------------------------------------------------------------------


def test_the_sample_that_takes_longest_is_named_ever_more_rarely():
    slow = SlowScoring()
    with slow.of("first", now=0.0):
        with slow.of("second", now=10.0):
            lines = {now: slow.overdue(now) for now in (59, 61, 100, 122, 200, 244)}
        assert [now for now, line in lines.items() if line] == [61, 122, 244]
        assert "after 61 s: first; it also runs for 1 other samples" in lines[61]
    with slow.of("third", now=250.0):
        assert slow.overdue(309) is None
        assert "after 60 s: third; it also runs for 0 other" in slow.overdue(310)
    assert slow.overdue(1000) is None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_sample_that_waits_for_its_turn_is_not_named(is_async, monkeypatch):
    def scorer(*_, **__):
        seen.append(scoring.slow_scoring.overdue(time.monotonic() + 1e3))
        return 1.0

    async def in_the_loop(*_, **__):
        return scorer()

    async def score_two():
        await asyncio.gather(*(scoring.run_single(row_of("x", uid=uid)) for uid in "ab"))

    seen = []
    monkeypatch.setattr(threads, "usual_threads", lambda: 1)
    scoring = manager(in_the_loop if is_async else scorer)
    scoring.loop.run_until_complete(score_two())
    assert len(seen) == 2
    for uid, line in zip("ab", seen, strict=True):
        assert f"prompt uid {uid}" in line and "it also runs for 0 other samples" in line


def test_a_scorer_that_hangs_is_named(monkeypatch, as_scorer):
    for name in ("FIRST_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(scorer_calls, name, 0.01)
    named = threading.Event()
    warnings = []

    def warn(*args):
        warnings.append(args[0] % args[1:])
        named.set()

    monkeypatch.setattr(scorer_calls.logger, "warning", warn)

    def wait(*_, **__):
        assert named.wait(60)
        return 1.0

    assert score(manager(as_scorer(wait)), "x")["reward_score"] == 1.0
    assert "prompt uid u-1, data_source 'rlla', extra_info.index 17" in warnings[0]


def test_a_row_without_its_prompt_is_scored():
    """verl's own managers read no prompt, so an agent loop worker of the user's may send none."""
    row = row_of("a </think> 4")
    row.batch.pop("prompts")
    scoring = manager(lambda answer_str, **_: float(answer_str))
    result = scoring.loop.run_until_complete(scoring.run_single(row))
    assert result["reward_score"] == 4.0
