"""`verl-gdpo check`: its answer and its reasons, without Ray or a GPU."""

import json
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from byte_tokenizer import make_tokenizer
from judge_stub import judge_stub
from processes import completed
from repository import REPO
from rows_for_check import COMMAND, MODEL_CONFIG, arguments_of, messages_of
from saved_checkpoint import save_checkpoint
from tool_rows import tool_row
from transformers import PreTrainedTokenizerFast

from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS
from verl_gdpo.tools.check import main
from verl_gdpo.tools.check.made_up_responses import make_responses
from verl_gdpo.tools.data import main as prepare
from workshop.tiny_policy.model import make_tiny_model

RECIPES = ("--config-dir", str(REPO / "recipes"), "--config-name", "train")


@pytest.fixture
def check(data, monkeypatch, checks):
    """The same of our recipes, with more overrides."""
    monkeypatch.chdir(REPO)

    def run(*overrides, train="good", scorer=None, options=()):
        return checks(
            *(
                *options,
                *("--elsewhere", *RECIPES, "hardware=cpu", "trainer.device=cuda"),
                *("actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=6"),
                "actor_rollout_ref.model.path=org/model",
                f"data.train_files={data}/{train}{'' if '.' in train else '.parquet'}",
                f"data.val_files={data}/good.parquet",
                *custom(data, scorer),
                *(override.replace("{data}", str(data)) for override in overrides),
            )
        )

    return run


def custom(data, scorer):
    if scorer is None:
        return []
    keys = {"path": f"{data}/rewards.py", "name": scorer}
    return [f"reward.custom_reward_function.{key}={value}" for key, value in keys.items()]


def cells(output, first):
    """The other cells of the table's line that begins so."""
    return re.search(rf"^{re.escape(first)} {{2,}}(.*)$", output, re.M)[1].split()


# --- yes -----------------------------------------------------------------------------------------


def test_yes(check, data, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_gdpo.terminal.WIDTH", 100)
    code, output, _ = check(f"run_dir={tmp_path}/run")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert "adv_estimator=gdpo" in output
    assert f"data.train_files: 6 rows in {data}/good.parquet" in " ".join(output.split())
    assert "trainer sync" in output
    words = "prompts are not counted in tokens, because the tokenizer is not on this machine"
    assert " ".join(output.split()).count(words) == 1
    assert not re.search("GDPO (helps|changes|hardly)|Train with", output)
    assert max(map(len, output.splitlines())) <= 100 + len(str(data))
    assert "6 rows scored with 42 made-up responses" in output
    assert cells(output, "format") == ["1", "0.000", "1.000"]
    assert cells(output, "correctness") == ["1", "-3.000", "3.000"]


def test_weights_are_those_of_the_first_step(check, data, plain):
    _, output, _ = check(
        "+algorithm.gdpo.rewards.correctness={weight:{1:0.25,100:1.0}}",
        "+algorithm.gdpo.rewards.format=null",
    )
    assert cells(output, "correctness")[0] == "0.25"
    assert cells(output, "format")[-4:] == ["not", "in", "the", "sum"]
    code, output, messages = plain(*GRPO, *custom(data, "scored"))
    assert code == 1 and "data_source 'rlla': score is 1 for each of 7 made-up" in messages
    assert cells(output, "score")[-2:] == ["NEVER", "VARIES"]
    assert cells(output, "length")[-3:] == ["not", "trained", "on"]


@pytest.mark.parametrize("weights", ["", pytest.param(",weight:2", marks=pytest.mark.slow)])
def test_a_judge_is_not_called_unless_asked(check, data, tmp_path, weights):
    (tmp_path / "judge.txt").write_text("Rate {response}")
    functions = "+reward.reward_functions"
    with judge_stub() as stub:
        judge = f"judge:'{stub.address}',template:'{tmp_path}/judge.txt',model:m"
        alone = f"{functions}={{q:{{{judge},rewards:{{clear:[0,10]}}{weights}}}}}"
        timeout = "+reward.timeout=60"
        code, output, _ = check(alone, timeout)
        assert code == 0 and "not called: ['q'], which may ask a service (--ask-judge)" in output
        own = weights and ",weight:{short:1}"
        beside = f"+{functions}.short={{path:'{data}/rewards.py',name:lengths{own}}}"
        code, output, _ = check(alone, beside, timeout)
        assert code == 0 and "not called: ['q']" in output and "q__clear' is None" not in output
        assert cells(output, "short__short")[1:] == ["0.000", "1.000"]
        assert not stub.asked
        code, output, _ = check(alone, timeout, options=["--ask-judge"])
        assert code == 0 and stub.asked and "not called" not in output
        assert cells(output, "q__clear")[1] != cells(output, "q__clear")[2]


LISTED = """
def short(solution_str):
    return float(len(solution_str) < 20)

def fails(solution_str):
    if not solution_str:
        raise KeyError("a bug")
    return {"a": float(len(solution_str) < 20), "b": 1.0}
"""


def test_a_list_whose_functions_fail_or_are_never_called(check, tmp_path):
    """`short.er` has a dot, and is silent."""
    path = tmp_path / "listed.py"
    path.write_text(LISTED)
    key = "+reward.reward_functions"
    functions = f"{key}={{x:{{path:'{path}',name:fails%s}},y:{{path:'{path}',name:short%s}}}}"
    code, output, _ = check(functions % (",on_error:missing,rewards:[a,b]", ""))
    assert code == 0 and "gdpo_notes" not in output
    assert "x failed for 6 of 42 made-up responses (-v shows why)" in " ".join(output.split())
    assert cells(output, "x__a")[1:] == ["0.000", "1.000"]
    code, _, errors = check(functions % (",on_error:missing", ""))
    assert code == 1 and "+reward.reward_functions.x.rewards=[KEY,KEY]" in errors
    code, _, errors = check(functions % ("", ",sources:[RLLA]"))
    assert code == 1 and "data_source; did you mean 'rlla'?. The function would never" in errors
    code, output, _ = check(
        functions % (",on_error:missing,rewards:[a,b]", ",sources:[rlla,rlala]")
    )
    assert code == 0 and "no row has data_source 'rlala'; did you mean 'rlla'?" in output
    limited = f"{key}={{y:{{path:'{path}',name:short}},short.er:{{path:'{path}',limited:true"
    code, output, _ = check(limited + ",name:fails}}", "+reward.max_concurrent=1")
    assert code == 0 and "not called: ['short.er']" in output and "failed for" not in output
    assert "'short.er' is None" not in output


@pytest.mark.slow
def test_functions_of_a_validation_are_tried_on_its_rows(check, tmp_path):
    path = tmp_path / "listed.py"
    path.write_text(LISTED)
    key = "+reward.reward_functions"
    entry = f"path:'{path}',name:short"
    both = f"{key}={{x:{{{entry}%s}},y:{{{entry}%s}}}}"
    code, output, _ = check(both % (",validation:never", ",validation:only"))
    assert code == 0
    _, shown = output.split("\nvalidation, data_source")
    validation, training = shown.split("\ndata_source")
    assert cells(training, "x") == ["1", "0.000", "1.000"]
    assert cells(validation, "y") == ["1", "0.000", "1.000"]
    assert "\ny " not in training and "\nx " not in validation
    # A failure in a validation would end the run as late as its first one.
    fails = f"{key}={{x:{{{entry}}},y:{{path:'{path}',name:fails,validation:only}}}}"
    code, _, errors = check(fails)
    assert code == 1 and "KeyError: 'a bug'" in errors
    code, _, errors = check(both % ("", ",validation:Only"))
    assert code == 1 and "y.validation=Only: expected only or never" in errors


def test_rewards_that_tell_nothing_apart_are_marked(check):
    code, output, _ = check(scorer="lengths")
    assert code == 0
    assert cells(output, "short") == ["1", "0.000", "1.000"]
    assert cells(output, "row")[-4:] == ["VARIES", "ONLY", "BETWEEN", "PROMPTS"]
    assert cells(output, "flat") == ["1", "2.000", "2.000", "NEVER", "VARIES"]


def test_a_model_that_is_not_there(check, tmp_path):
    folders = {"data_dir=here": "here/tiny", "data_dir=there": f"{tmp_path}/tiny"}
    for override, path in folders.items():
        code, _, errors = check(override, f"actor_rollout_ref.model.path={path}")
        assert code == 1
        assert f"check: problem: actor_rollout_ref.model.path={path}: no model is there" in errors
        assert "a tiny policy is in cpu/tool_rl_policy" in errors
    make_tokenizer(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(
        json.dumps(MODEL_CONFIG | {"max_position_embeddings": 32768})
    )
    assert check(f"actor_rollout_ref.model.path={tmp_path}/tiny")[2] == ""


@pytest.fixture(scope="module")
def lengths(data):
    """(folder of a model, prompt lengths in tokens of the rows of long.parquet)."""
    from transformers import AutoTokenizer

    rows = [tool_row(i, "train") for i in range(6)]
    for k, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": "Weather? " * (k + 1)}]
    pd.DataFrame(rows).to_parquet(data / "long.parquet")
    model = make_tiny_model(data / "tiny_model", texts=["Weather?"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    return model, [len(tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]


def test_prompts_that_verl_leaves_out(check, data, lengths):
    model, tokens = lengths
    assert len({*tokens}) == 6
    given = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=4"]
    given += [f"data.val_files={data}/long.parquet", "data.val_batch_size=4"]
    code, output, messages = check(*given, f"data.max_prompt_length={tokens[3]}", train="long")
    assert not messages, messages
    said = (
        f"2 of 6 prompts in {data}/long.parquet are longer than data.max_prompt_length={tokens[3]}"
    )
    for key in ("train_files", "val_files"):
        assert f"data.{key}: {said} tokens (longest: {tokens[5]}); verl leaves them out" in output
    code, output, _ = check(*given, f"data.max_prompt_length={tokens[5]}", train="long")
    assert "longer than" not in output and "not counted" not in output
    code, _, messages = check(*given, f"data.max_prompt_length={tokens[2]}", train="long")
    assert code == 1 and "3 rows are left, and 4 are needed" in messages
    code, _, messages = check(*given, "data.max_prompt_length=1", train="long")
    assert "0 rows are left, and 1 are needed" in messages
    cuts = "data.filter_overlong_prompts=False"
    code, _, messages = check(*given, "data.max_prompt_length=1", cuts, train="long")
    assert code == 1 and "6 of 6" in messages and "cuts off their beginnings. No" in messages
    some = [f"data.max_prompt_length={tokens[0]}", cuts]
    code, output, _ = check(*given, *some, train="long")
    assert code == 0 and "cuts off their beginnings" in output


@pytest.mark.slow
def test_the_chat_template_of_the_configuration_counts(check, data):
    given = [f"actor_rollout_ref.model.path={data}/base_model"]
    code, _, messages = check(*given)
    assert code == 1 and "base_model: every prompt would fail" in messages
    assert "its tokenizer has no chat template: put chat_template.jinja beside it" in messages
    template = "{% if messages %}hello{% endif %}"
    one = f"actor_rollout_ref.model.custom_chat_template='{template}'"
    assert check(*given, one, f"data.max_prompt_length={len('hello')}")[0] == 0


def test_a_reward_of_a_task_may_be_missing_in_all_rows_that_are_tried(check, tmp_path, capfd):
    assert prepare(["constraints", "--synthetic", "3", "--out", str(tmp_path)]) == 0
    capfd.readouterr()
    files = [
        f"data.{k}_files={tmp_path}/{v}.parquet" for k, v in (("train", "train"), ("val", "test"))
    ]
    _code, output, _ = check(*files, "data.train_batch_size=3", "--rows=1")
    assert "is None, and no number" not in output and "keyword" in output, output


@pytest.mark.slow
def test_a_tokenizer_that_verl_cannot_pad_with(check, data, tmp_path):
    """Either token will do: verl takes the other in its place."""
    shutil.copytree(data / "model", tmp_path / "m")
    file = tmp_path / "m" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for gone, expected in ((["pad_token"], 0), (["pad_token", "eos_token"], 1)):
        file.write_text(json.dumps(settings | dict.fromkeys(gone)))
        code, _, messages = check(f"actor_rollout_ref.model.path={tmp_path}/m")
        assert code == expected, messages
    assert "neither an eos_token nor a pad_token: name the token that ends an answer" in messages


@pytest.mark.slow
def test_validation_rows_that_training_rows_ask(check, data, tmp_path):
    """Over all files of both sides, with other case, spacing and marks, and with other words."""
    words = " ".join(f"{a}{b}" for a in ("ba", "de", "fo") for b in "klmnprst")

    def file(name, *texts):
        prompts = [[{"role": "user", "content": text}] for text in texts]
        rows = [{**tool_row(i, "train"), "prompt": prompt} for i, prompt in enumerate(prompts)]
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    train = file("a", "One more?"), file("b", words)
    test = file("c", "?"), file("d", f"  {words.title()}!", f"{words} x")
    files = {"train": train, "val": test}
    given = [f"data.{key}_files=[{one},{other}]" for key, (one, other) in files.items()]
    _, output, _ = check(*given)
    said = " ".join(output.split())
    of_training = f"has that of row 0 of {tmp_path / 'b.parquet'}"
    equal = (
        "check: warning: 1 of 3 validation rows have the prompt of a training row: row 0 of "
        f"{tmp_path / 'd.parquet'} {of_training}. A score on them does not show generalisation"
    )
    near = (
        "check: note: 1 of 3 validation rows have nearly the prompt of a training row: row 1 of "
        f"{tmp_path / 'd.parquet'} {of_training}. Read a few of them"
    )
    assert equal in said and near in said
    # Most pairs that are nearly equal are none, so they are no warning.
    sizes = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    code, output, _ = check("--brief", *given, *sizes)
    assert code == 0
    said = " ".join(output.split())
    assert equal in said and near not in said


PENALTY = """
def right_and_cost(solution_str, ground_truth, **_):
    return {"right": float(solution_str == ground_truth), "cost": -len(solution_str) / 100}
"""


@pytest.mark.parametrize(
    ("term", "code", "words"),
    [
        ("bounds: [-99, 0]", 1, "better than -99, which is within its bounds [-99, 0], so that"),
        # no bounds: only the values tell it
        ("weight: 1", 1, r"which row 0 of"),
        pytest.param(
            *("otherwise: zero", 0, "gets 0 (otherwise=zero), which is better than"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                "bounds: [-99, 0], otherwise: zero",
                0,
                "better than -99, which is within its bounds",
            ),
            marks=pytest.mark.slow,
        ),
        ("otherwise: missing", 0, None),
        pytest.param("otherwise: -99", 0, None, marks=pytest.mark.slow),
    ],
)
def test_a_condition_that_failing_pays_for_is_found_before_the_training(
    check, tmp_path, term, code, words
):
    (tmp_path / "penalty.py").write_text(PENALTY)
    cost = f"{{when: {{reward: right, at_least: 1}}, {term}}}"
    exit_code, output, messages = check(
        f"reward.custom_reward_function.path={tmp_path}/penalty.py",
        "reward.custom_reward_function.name=right_and_cost",
        f"++algorithm.gdpo.rewards={{right: 1, cost: {cost}}}",
    )
    told = " ".join((messages if code else output).split())
    assert exit_code == code
    assert told.count("rewards.cost: a sample") == (words is not None)
    assert words is None or words in told


RUBRICS = """
import json

def one_for_all(solution_str, extra_info):
    return {**dict.fromkeys(json.loads(extra_info["criteria"]), 1.0), "long": len(solution_str)}

def other_if_empty(solution_str, **_):
    return {"long": len(solution_str)} if solution_str else {"short": 1.0}
"""


def test_samples_of_one_row_are_one_prompt_in_check_too(check, tmp_path):
    """A rubric that changes within a prompt would end the first step of the training."""
    (tmp_path / "rubrics.py").write_text(RUBRICS)
    entry = f"path: {tmp_path}/rubrics.py, name: other_if_empty, rubric: true"
    code, _, messages = check(f"+reward.reward_functions.judge={{{entry}}}")
    assert code == 1
    (told,) = messages_of(messages)
    label = r"row 0 of \S+/good.parquet, response"
    assert re.match(
        rf"{label} 'empty': rubric 'judge' has the weights {{'short': 1.0}}, expected "
        rf"{{'long': 1.0}}, those of {label} 'ground truth' of the same prompt",
        told,
    )


def test_rows_of_two_files_are_two_prompts_whatever_their_paths(check, tmp_path):
    (tmp_path / "rubrics.py").write_text(RUBRICS)
    files = []
    for number in (1, 2):
        row = tool_row(number, "train")
        row["extra_info"] = {"criteria": json.dumps({"long": 1, f"of file {number}": number})}
        files.append(tmp_path / f"my_train_{number}.parquet")
        pd.DataFrame([row] * 3).to_parquet(files[-1])
    entry = f"path: {tmp_path}/rubrics.py, name: one_for_all, rubric: criteria"
    given = f"data.train_files=[{files[0]},{files[1]}]", f"data.val_files={files[0]}"
    code, output, messages = check(f"+reward.reward_functions.judge={{{entry}}}", *given)
    assert (code, messages) == (0, "") and "judge" in output


@pytest.mark.slow
def test_of_many_prompts_a_part_is_counted(check, lengths, monkeypatch):
    model, tokens = lengths
    monkeypatch.setattr("verl_gdpo.tools.check.prompts.MOST_ROWS", 3)  # rows 0, 2 and 5
    given = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=4"]
    output = check(*given, f"data.max_prompt_length={tokens[3]}", train="long")[1]
    assert "about 2 of 6 prompts" in " ".join(output.split())


def test_the_recipes_of_the_package_from_any_folder(check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check()[0] == 0


def test_an_async_function_and_another_kind_of_file(check):
    code, output, _ = check(scorer="waits", train="good.jsonl")
    assert code == 0
    assert cells(output, "acc")[:3] == ["1", "0.000", "1.000"]


def test_every_data_source_has_its_table(check):
    code, output, _ = check(train="mixed", options=["--rows", "2"])
    assert code == 0
    # rows 0 and 5 are both of one source; the other's row comes on top
    assert "3 rows scored" in output
    ours, verls = output.split("data_source 'openai/gsm8k'")
    assert cells(ours, "format")[:3] == ["1", "0.000", "1.000"]
    # verl's scorer wants the answer after "####", which only the usual forms have
    assert cells(verls, "acc")[:3] == ["1", "0.000", "1.000"]


def test_sources_that_only_validation_has_are_tried(check):
    _, output, _ = check(train="math")
    assert "data_source 'openai/gsm8k'" in output and "data_source 'rlla'" in output


def test_what_needs_a_reward_models_server_is_left_open(check):
    with_model = (
        "reward.reward_model.enable=True",
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.model_path=org/reward",
        "reward.reward_model.rollout.name=vllm",
    )
    code, output, _ = check(*with_model, scorer="asks_a_reward_model")
    assert code == 0
    assert "without the reward model's server, no reward could be tried" in output
    assert "ConnectionError" in output
    code, _, messages = check(*with_model, scorer="waits")
    assert code == 1 and "unexpected keyword argument 'reward_router_address'" in messages


def test_made_up_responses_are_distinct_and_the_truth_is_first():
    texts = [*make_responses("<a>12</a>", "it is 12", 3).values()]
    assert texts == ["<a>12</a>", "it is 12", "<a>1#</a>", "<a>1", "12", "????????", ""]
    last = ["garbage", "empty"]
    assert list(make_responses("7", "7", 1)) == ["ground truth", "one character off", *last]
    assert list(make_responses("", "", 1)) == last


# --- no ------------------------------------------------------------------------------------------


def test_the_plain_command(plain):
    assert plain()[0] == 0


# --- any verl command ----------------------------------------------------------------------------

GRPO = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")


def test_a_run_without_any_of_our_parts(plain, data):
    code, output, _ = plain(*GRPO, *custom(data, "waits"))
    assert code == 0
    told = " ".join(output.split())
    assert "adv_estimator=grpo, reward_manager=naive: both are verl's own, so verl-gdpo has" in told
    assert cells(output, "score") == ["1", "0.000", "1.000"]
    assert "not trained on" not in output  # the bare number, which verl's manager repeats


def test_a_score_that_verl_cannot_train_on(plain, data):
    for scorer, reason in (("nothing", "is None; expected a number"), ("bare_nan", "is nan; exp")):
        code, _, messages = plain(*GRPO, *custom(data, scorer))
        assert code == 1
        assert f"response 'ground truth': the score {reason}" in messages


@pytest.mark.slow
def test_a_reward_that_is_always_the_same_is_allowed_by_name(plain, check, data):
    flat = custom(data, "never_right")
    assert plain(*flat)[0] == 1
    code, output, _ = plain("--allow-flat", *flat)
    assert code == 0
    assert "check: warning: data_source 'rlla': acc is the same for all made-up responses" in output
    assert plain(*flat, "trainer.val_only=True")[0] == 0  # nothing is trained on it
    # without a right response, a reward function may well give nothing
    assert plain(*flat, f"data.train_files={data}/no_truth.parquet")[0] == 0
    assert check(scorer="lengths")[0] == 0  # one of three rewards is
    weights = "++algorithm.gdpo.rewards={short: 0, row: 0, flat: 1}"
    assert "flat is 2 for each of 42 made-up" in check(weights, scorer="lengths")[2]


def test_a_slow_reward_function_is_asked_for_many_responses_at_once(plain, data):
    assert plain(*custom(data, "slow_judge"))[0] == 0  # 7 responses


def test_each_response_is_scored_once_and_each_prompt_is_counted_once(check, data, monkeypatch):
    """So the check takes no longer than this, however many files and questions there are."""
    asked = Counter()

    def counted(name, function):
        def call(*given, **options):
            asked[name] += 1
            return function(*given, **options)

        return call

    tokens = counted("prompts", PreTrainedTokenizerFast.apply_chat_template)
    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", tokens)
    score = counted("responses", TASK_BY_SOURCE["rlla"].score)
    monkeypatch.setitem(TASK_BY_SOURCE, "rlla", replace(TASK_BY_SOURCE["rlla"], score=score))
    train = f"data.train_files=[{data}/good.parquet,{data}/good.parquet]"
    assert check(train, f"actor_rollout_ref.model.path={data}/model")[2] == ""
    # 8 of 12 rows with 7 responses; before that, all three files have 6 ground truths. The 8 rows
    # are written once more, and two plain messages show which marks the template writes
    assert asked == {"prompts": 6 + 8 + 1, "responses": 8 * 7 + 3 * 6}


def test_the_critic_is_checked_without_a_hub(plain):
    gae = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=1")
    assert plain(*gae, "critic.ppo_mini_batch_size=6", "critic.model.path=org/critic")[0] == 0
    code, _, messages = plain(*gae, "critic.ppo_mini_batch_size=7", "critic.model.path=./critic")
    assert code == 1
    first, second = messages_of(messages)
    assert second.startswith("critic.model.path=./critic: no model is there")
    assert first == "train_batch_size (6) must be >= critic.ppo_mini_batch_size (7)"


def test_what_is_allowed_but_hardly_meant(plain, data):
    added = [*custom(data, "waits"), "trainer.default_local_dir=begun", "trainer.val_only=True"]
    added += ["trainer.total_epochs=30", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    added += ["algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.rollout.top_k=5"]
    save_checkpoint(Path("begun"), 29)
    code, output, _ = plain(*GRPO, *added, "actor_rollout_ref.rollout.n=1")
    assert code == 0
    told = " ".join(output.split())
    assert "trainer.resume_mode=auto: the run goes on after step 29, from begun" in told
    assert "trainer.val_only=True: the run validates once, and trains nothing" in told
    assert "actor_rollout_ref.rollout.n=1 with adv_estimator=grpo: there is nothing to comp" in told
    assert "actor_rollout_ref.rollout.top_k=5 with bypass_mode=True: the old probabilit" in told
    assert "data.train_batch_size=6 with actor_rollout_ref.actor.ppo_mini_batch_size=4: ver" in told
    assert plain(*GRPO, *added, "actor_rollout_ref.actor.optim.lr=0")[0] == 0  # it only validates
    added += ["trainer.val_before_train=False", "trainer.resume_mode=disable"]  # verl then trains
    code, _, messages = plain(*GRPO, *added, "actor_rollout_ref.actor.optim.lr=0")
    assert code == 1 and "the policy would stay as it is" in messages


def test_rewards_of_length_are_alive(plain, data):
    """Of words, characters and tokens, with limits near both ends."""
    code, output, _ = plain(*custom(data, "long_and_short"), "data.max_response_length=2048")
    assert code == 0
    for name in ("words_500", "characters_30", "characters_5000", "tokens_20", "tokens_2000"):
        assert cells(output, name)[1:3] == ["0.000", "1.000"], name
    # as the manager counts them, with the end of the turn
    assert cells(output, "tokens")[2] == "2048.000"


def test_what_others_print_is_hidden(plain, data):
    code, output, _ = plain(*custom(data, "prints"))
    assert code == 0 and "noise" not in output
    code, output, messages = plain(*custom(data, "prints"), "trainer.total_epochs=0")
    assert "noise" not in output + messages
    assert messages.endswith(" (-v shows what verl and others printed meanwhile)\n")


@pytest.mark.slow
def test_what_others_print_is_shown_on_request(data, capfd, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert main(["-v", *arguments_of(COMMAND, data), *custom(data, "prints")]) == 0
    printed = capfd.readouterr()
    assert "noise of Python" in printed.out and "noise of the system" in printed.err


# --- no, in our recipes --------------------------------------------------------------------------


@pytest.mark.parametrize("override", ["estimator=gdpa", "run_dir=${nowhere}"])
def test_no_and_why(check, override):
    code, _, messages = check(override)
    assert (code, messages.count("check: problem: ")) == (1, 1)
    assert override.partition("=")[2].strip("${}") in messages


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("splits", r"'without tags'.*IndexError: .*rewards.py:13\] \(18 of 42 responses failed\)"),
        ("leaves", "SystemExit: 0"),
        ("hangs", r"'ground truth': the reward function gave no answer within 0.5 s \(42 of 42 "),
        ("blocks", "'ground truth': the reward function gave no answer within 0.5 s"),
        pytest.param(
            *(
                "hangs_on_empty",
                r"'empty': .* 5 s \(6 of 42 answers are missing\)[^-]*--seconds 10\n",
            ),
            marks=pytest.mark.slow,
        ),
        (None, "Reward function is not implemented for data_source='nowhere'"),
    ],
)
def test_a_reward_function_that_cannot_score(check, scorer, message):
    waits = {"hangs": "0.5", "blocks": "0.5", "hangs_on_empty": "5"}.get(scorer, "60")
    rows = "good" if scorer else "nowhere"
    code, _, messages = check(scorer=scorer, train=rows, options=["--seconds", waits])
    assert code == 1
    assert re.search(message, messages), messages


def test_a_reward_file_is_a_module(check, tmp_path):
    (tmp_path / "its_helper.py").write_text("MOST = 20\n")
    (tmp_path / "module_rewards.py").write_text(
        """
from __future__ import annotations

from dataclasses import asdict, dataclass

from its_helper import MOST

@dataclass
class Reward:
    brief: float

def compute_score(solution_str, **_):
    return asdict(Reward(float(len(solution_str) < MOST)))
"""
    )
    code, output, messages = check(
        f"reward.custom_reward_function.path={tmp_path}/module_rewards.py"
    )
    assert code == 0, messages
    assert cells(output, "brief")


def test_what_verl_needs_from_the_environment(check, monkeypatch):
    from verl_gdpo import plugin

    with monkeypatch.context() as changed:
        changed.setattr(plugin, "refusals", ["this version of verl is not supported"])
        assert "refuses to run: this version of verl is not supported" in check()[2]
    with monkeypatch.context() as changed:
        changed.delitem(sys.modules, "verl_gdpo.plugin")
        changed.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
        assert "did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS=none" in check()[2]
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "verl.trainer.ppo.v1", None)
        assert "ModuleNotFoundError: import of verl.trainer.ppo.v1 halted" in check()[2]


@pytest.mark.slow
def test_in_a_run_only_warnings_and_all_after_a_problem(check):
    _, output, _ = check(
        "data.filter_overlong_prompts=False", scorer="lengths", options=["--brief"]
    )
    told = remarks_of(output)
    assert re.fullmatch(r"verl-gdpo check: no problem found, \d warnings", told[-1])
    assert not any("files: 6 rows" in text for text in told)
    flat = "warning: data_source 'rlla': flat is the same for all made-up responses"
    assert f"verl-gdpo check: {flat}" in told
    assert any("data.filter_overlong_prompts=False: if a prompt" in text for text in told)
    _, output, _ = check("trainer.total_epochs=0", options=["--brief"])
    assert {*remarks_of(output)} == {*remarks_of(check("trainer.total_epochs=0")[1])}


def remarks_of(output):
    """The remarks, each in one line."""
    told = re.findall(r"^verl-gdpo check: (?:.*\n(?: {7}.*\n)*)", output, re.M)
    return [" ".join(text.split()) for text in told]


@pytest.mark.slow
def test_the_process_ends_although_a_reward_function_does_not(data):
    given = ["hardware=cpu", "data.train_batch_size=6", "actor_rollout_ref.model.path=org/model"]
    given += [f"data.{key}_files={data}/good.parquet" for key in ("train", "val")]
    command = ("-m", "verl_gdpo", "check", "--seconds", "1", *RECIPES, *given)
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = completed(*command, *custom(data, "sleeps"), cwd=REPO, env=environment)
    assert done.returncode == 1
    assert "gave no answer within 1 s" in done.stderr
    # verl is imported there, with its warnings
    assert all(line.startswith("verl-gdpo check: ") for line in done.stderr.splitlines())
    assert all(line.startswith(("verl-gdpo check: ", " " * 7)) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_what_the_machine_cannot_give_to_a_scorer(check, monkeypatch):
    def found(missing):
        monkeypatch.setitem(
            TASK_BY_SOURCE, "rlla", replace(TASK_BY_SOURCE["rlla"], missing=missing)
        )

    found(lambda **options: [f"there is no moon {options}"])
    code, said, _ = check("+reward.reward_kwargs.max_correctness=1")
    assert code == 0
    assert "check: warning: task tool_rl: there is no moon {'max_correctness': 1}" in said
    assert "moon" not in check(scorer="lengths")[1]  # not by our scorer

    def nothing_works(**_):
        raise OSError("no sandbox works here")

    found(nothing_works)
    code, _, messages = check()
    assert code == 1 and messages_of(messages) == ["no sandbox works here"]


@pytest.mark.slow
def test_what_the_machine_cannot_give_to_a_task_of_the_list(check, monkeypatch):
    def found(missing):
        monkeypatch.setitem(TASKS, "tool_rl", replace(TASKS["tool_rl"], missing=missing))

    found(lambda **options: [f"there is no moon {options}"])
    entries = "+reward.reward_functions={form: {task: tool_rl, %s, weight: 1.0}}"
    code, said, _ = check(entries % "max_correctness: 1")
    assert code == 0
    assert "reward.reward_functions.form: there is no moon {'max_correctness': 1}" in said
    code, said, messages = check(entries % "max_corectness: 1")
    assert code == 1 and "moon" not in said
    assert [text for text in messages_of(messages) if "max_corectness" in text] == [
        "reward.reward_functions.form.max_corectness: task tool_rl does not take it; did you mean "
        "'max_correctness'?"
    ]

    def nothing_works(**_):
        raise OSError("no sandbox works here")

    found(nothing_works)
    code, _, messages = check(entries % "max_correctness: 1")
    assert code == 1 and messages_of(messages) == ["no sandbox works here"]
