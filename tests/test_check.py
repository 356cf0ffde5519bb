"""`verl-gdpo check`: its answer and its reasons, without Ray or a GPU."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import oracle
import pandas as pd
import pytest
from test_e2e import tool_row

from verl_gdpo.cpu.tiny_model import make_tiny_model
from verl_gdpo.data_prep import coding_synthetic, local_files
from verl_gdpo.rewards import TASK_OF, sandbox_service
from verl_gdpo.tools.check import main
from verl_gdpo.tools.check.dry_run import made_up_responses

REPO = Path(__file__).resolve().parents[1]

REWARDS = """
import asyncio, time

def lengths(data_source, solution_str, ground_truth, extra_info):
    short = 1.0 if len(solution_str) < 20 else 0.0
    return {"short": short, "row": extra_info["index"], "flat": 2.0}

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)

def splits(data_source, solution_str, ground_truth, extra_info):
    return {"tools": solution_str.split("<tool_call>")[1].count("city") * 1.0}  # bad on ""

def nothing(**_):
    return None

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return {"a": 1.0, "b": float("nan") if solution_str == "" else 0.5}

def unlike(data_source, solution_str, ground_truth, extra_info):
    return {"a": 1.0, "b": 1.0} if solution_str else {"a": 0.0}

def leaves(**_):
    raise SystemExit(0)

def hangs(**_):
    time.sleep(2)

async def blocks(**_):
    time.sleep(2)

def sleeps(**_):
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    # what verl logs while it is imported must not be taken for a message
    importlib.import_module("verl.trainer.ppo.v1")
    folder = tmp_path_factory.mktemp("data")

    def write(name, rows):
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")

    rows = [tool_row(i, "train") for i in range(6)]
    write("good", rows)
    math = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}}
    write("mixed", [rows[0], {**rows[1], **math}, *rows[2:]])
    write("math", [{**row, **math} for row in rows])
    write("nowhere", [{**row, "data_source": "nowhere"} for row in rows])
    write("columns", [{"prompt": "x"}])
    write("text", [{**row, "reward_model": "gold"} for row in rows])
    rows[2] = json.loads(json.dumps(rows[2]))
    rows[2]["reward_model"]["ground_truth"] = "<tool_call>\nnot json\n</tool_call>"
    write("bad", rows)
    lines = [json.dumps(tool_row(i, "train")) for i in range(6)]
    (folder / "good.jsonl").write_text("\n".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("import no_such_module\n")
    return folder


@pytest.fixture
def check(data, monkeypatch, capsys):
    """(exit code, output, messages) of `verl-gdpo check` with more overrides."""
    monkeypatch.chdir(REPO)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)

    def run(*overrides, train="good", scorer=None, options=()):
        code = main(
            [
                *options,
                *("--elsewhere", "hardware=cpu", "trainer.device=cuda", "data.train_batch_size=6"),
                "actor_rollout_ref.model.path=org/model",
                f"data.train_files={data}/{train}{'' if '.' in train else '.parquet'}",
                f"data.val_files={data}/good.parquet",
                *custom(data, scorer),
                *(override.replace("{data}", str(data)) for override in overrides),
            ]
        )
        printed = capsys.readouterr()
        assert (code == 0) == (printed.err == "")
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

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


def test_yes(check, data, tmp_path):
    code, output, _ = check(f"run_dir={tmp_path}/run")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert "adv_estimator=gdpo" in output
    assert f"data.train_files: 6 rows in {data}/good.parquet" in output
    assert "trainer sync" in output
    assert max(map(len, output.splitlines())) <= 100 + len(str(data))
    # each of 6 rows with 7 responses: two right formats and a changed character keep `format`
    assert "6 rows scored with 42 made-up responses" in output
    assert cells(output, "format")[:3] == ["1", "0.000", "1.000"]
    assert cells(output, "correctness")[:3] == ["1", "-3.000", "3.000"]
    assert cells(output, "ground truth")[:2] == ["1.000", "3.000"]
    assert cells(output, "empty")[:2] == ["0.000", "-3.000"]


def test_the_example_is_what_the_formulas_give(check):
    _, output, _ = check(options=["--rows", "1"])
    said = " ".join(output.split())
    assert "made up, so only ranges count here (format 1, correctness 6). correctness has 6" in said
    lines = output.split("response  ", 1)[1].splitlines()[2:]
    numbers = [[float(cell) for cell in line.split()[-5:]] for line in lines if line]
    rewards, groups = [line[:2] for line in numbers], [0] * len(numbers)
    for column, settings in (
        (2, {"batch_norm": "none"}),
        (3, {}),
        (4, {"group_norm": "summed", "batch_norm": "none"}),
    ):
        expected = oracle.gdpo(rewards, groups, **settings)
        assert [line[column] for line in numbers] == pytest.approx(expected, abs=1e-3)


def test_weights_and_conditions_are_those_of_the_first_step(check):
    _, output, _ = check(
        "+reward.reward_kwargs.length=True",
        "+algorithm.gdpo.rewards.correctness={weight:{1:0.25,100:1.0}}",
        "+algorithm.gdpo.rewards.length={weight:2,when:{reward:correctness,at_least:1}}",
    )
    assert cells(output, "correctness")[0] == "0.25"
    assert cells(output, "length")[:5] == ["2", "correctness", ">=", "1,", "else"]
    assert output.count("not in the sum") == 1  # format
    assert "check: not used: format; algorithm.gdpo.rewards names correctness, length alone" in (
        output
    )


def test_rewards_that_tell_nothing_apart_are_marked(check):
    code, output, _ = check(scorer="lengths")
    assert code == 0
    assert "not used" not in output
    assert cells(output, "short") == ["1", "0.000", "1.000", "0.204"]
    assert cells(output, "row")[-4:] == ["VARIES", "ONLY", "BETWEEN", "PROMPTS"]
    assert cells(output, "flat") == ["1", "2.000", "2.000", "0.000", "NEVER", "VARIES"]


def test_a_model_that_is_not_there(check, tmp_path):
    folders = {"data_dir=here": "here/tiny", "data_dir=there": f"{tmp_path}/tiny"}
    for override, path in folders.items():
        code, _, errors = check(override, f"actor_rollout_ref.model.path={path}")
        assert code == 1
        assert f"check: actor_rollout_ref.model.path={path}: no model is there" in errors
        assert f"verl_gdpo.cpu.warm_start --out {path}\n" in errors
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert check(f"actor_rollout_ref.model.path={tmp_path}/tiny")[0] == 0


@pytest.fixture(scope="module")
def lengths(data):
    """(folder of a model, prompt lengths in tokens of the rows of long.parquet)."""
    from transformers import AutoTokenizer

    rows = [tool_row(i, "train") for i in range(6)]
    for k, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": "Weather? " * (k + 1)}]
    pd.DataFrame(rows).to_parquet(data / "long.parquet")
    model = make_tiny_model(data / "model", texts=["Weather?"])
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
        text = f"data.{key}: {said} tokens (longest: {tokens[5]}); verl leaves them out"
        assert " ".join(text.split()) in " ".join(output.split())
    code, output, _ = check(*given, f"data.max_prompt_length={tokens[5]}", train="long")
    assert "longer than" not in output and "not counted" not in output
    code, _, messages = check(*given, f"data.max_prompt_length={tokens[2]}", train="long")
    assert code == 1 and "3 rows are left, and 4 are needed" in messages
    code, _, messages = check(*given, "data.max_prompt_length=1", train="long")
    assert "0 rows are left, and 1 are needed" in messages
    cuts = "data.filter_overlong_prompts=False"
    code, output, _ = check(*given, "data.max_prompt_length=1", cuts, train="long")
    assert code == 0 and "cuts off their beginnings" in output


def test_prompts_are_not_counted_without_a_tokenizer(check):
    output = " ".join(check()[1].split())
    assert "data.train_files: lengths not counted, because the tokenizer is not on" in output


def test_of_many_prompts_a_part_is_counted(check, lengths, monkeypatch):
    model, tokens = lengths
    monkeypatch.setattr("verl_gdpo.tools.check.prompts.MOST_ROWS", 3)  # rows 0, 2 and 5
    given = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=4"]
    output = check(*given, f"data.max_prompt_length={tokens[3]}", train="long")[1]
    assert "about 2 of 6 prompts" in " ".join(output.split())


def test_a_temporary_folder_in_which_ray_starts_no_worker(check, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", f"{sys.prefix}/tmp")
    assert "is inside the virtual environment" in check()[2]


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
    # verl's scorer wants the answer after "####", which the bare ground truth lacks
    assert cells(verls, "acc")[-2:] == ["NEVER", "VARIES"]


def test_sources_that_only_validation_has_are_tried(check):
    _, output, _ = check(train="math")
    assert "data_source 'openai/gsm8k'" in output and "data_source 'rlla'" in output


def test_what_needs_a_reward_models_server_is_left_open(check):
    code, output, _ = check(
        "reward.reward_model.enable=True",
        "reward.reward_model.enable_resource_pool=True",
        scorer="waits",
    )
    assert code == 0
    assert "without the reward model's server, no reward could be tried" in output
    assert "reward_router_address" in output


def test_made_up_responses_are_distinct_and_the_truth_is_first():
    responses = made_up_responses("<a>12</a>", "<a>34</a>")
    assert responses == {
        "ground truth": "<a>12</a>",
        "another row's": "<a>34</a>",
        "one character off": "<a>1#</a>",
        "cut in half": "<a>1",
        "without tags": "12",
        "garbage": "????????",
        "empty": "",
    }
    assert list(made_up_responses("7", "")) == ["ground truth", "one character off", *LAST]
    assert list(made_up_responses("", "")) == LAST


LAST = ["garbage", "empty"]


# --- no ------------------------------------------------------------------------------------------

SCHEDULE = "+algorithm.gdpo.rewards.format={weight:{0:1,9:0}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_files={data}/none.parquet"], r"data.train_files: .*none.parquet does not"),
        (["data.train_files={data}/rewards.py"], r"verl reads files that end in .parquet"),
        (["data.train_files={data}/columns.parquet"], r"lacks the columns \['data_source'"),
        (["data.train_files={data}/text.parquet"], "reward_model is .*string; expected"),
        (["data.train_files={data}/bad.parquet"], r"row 2 .* tool_call line 1 of 1"),
        (["data.train_batch_size=7"], "6 rows are less than one batch of data.train_batch_size=7"),
        (
            ["+algorithm.gdpo.rewards.mine=1.0", "+algorithm.gdpo.combine=sa_mrpo"],
            r"needs the bounds of reward 'mine'",
        ),
        (["data.train_batch_sise=4"], "train_batch_sise"),
        (["estimator=gdpa"], "gdpa"),
        (["algorithm.adv_estimator=gdppo"], r"gdppo: unknown to verl; did you mean 'gdpo'\?"),
        (["run_dir=${nowhere}"], "nowhere"),
        (["+algorithm.gdpo.batchnorm=none"], "algorithm.gdpo.batchnorm: unknown setting"),
        (["+algorithm.gdpo.rewards.format=0"], "all weights are 0"),
        (["+algorithm.gdpo.rewards.corectness=1"], "'corectness' is configured.*did you mean"),
        (
            ["+algorithm.gdpo.rewards.format={weight:1,when:{reward:length,at_least:1}}"],
            "'length' is configured, but the scorer returned",
        ),
        (["+reward.reward_kwargs.matching=best"], "tool_rl matching: got 'best'"),
        (["algorithm.use_kl_in_reward=True"], "use_kl_loss=True"),
        (["actor_rollout_ref.rollout.n=1"], "Set it to 2 or more"),
        (["trainer.v1.trainer_mode=asink"], "trainer_mode=asink: Unknown trainer 'asink'"),
        (
            ["trainer.v1.trainer_mode=separate_async"],
            "train_batch_size must equal parameter_sync_step",
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=null"],
            "Set algorithm.filter_groups.metric=score",
        ),
        (
            ["algorithm.filter_groups.enable=True", "trainer.use_v1=False"],
            "legacy trainer does not filter",
        ),
        (
            [SCHEDULE, "trainer.use_v1=False"],
            "rewards.format: weight",
        ),
        (["reward.reward_manager.name=gdop"], "reward_manager.name=gdop, .*gdop"),
        (["reward.custom_reward_function.path={data}/none.py"], "none.py"),
        (
            ["reward.custom_reward_function.path={data}/broken.py"],
            r"no_such_module.* \[.*broken.py:1\]",
        ),
    ],
)
def test_no_and_why(check, overrides, message):
    code, _, messages = check(*overrides)
    assert code == 1
    assert re.search(message, messages), messages
    assert messages.count("check: ") == 1


def test_everything_that_is_wrong_is_listed(check):
    code, _, messages = check("algorithm.use_kl_in_reward=True", "data.val_files=none.parquet")
    assert code == 1
    assert messages.count("check: ") == 2
    assert "use_kl_in_reward" in messages and "data.val_files: none.parquet" in messages


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("splits", r"'without tags'.*IndexError: .*rewards.py:13\] \(18 of 42 responses failed\)"),
        ("nothing", r"row 0 of .*the scorer returned None; expected a number"),
        ("not_a_number", r"'empty'.*reward 'b' is nan.*\(6 of 42 responses failed\)"),
        ("unlike", r"'empty' has the rewards \['a'\], but row 0 of .* has \['a', 'b'\]"),
        ("leaves", "SystemExit: 0"),
        ("hangs", "'ground truth': the reward function gave no answer within 0.5 s"),
        ("blocks", "'ground truth': the reward function gave no answer within 0.5 s"),
        ("misspelt", "misspelt"),
    ],
)
def test_a_reward_function_that_cannot_score(check, scorer, message):
    code, _, messages = check(scorer=scorer, options=["--seconds", "0.5"])
    assert code == 1
    assert re.search(message, messages), messages


def test_a_data_source_that_nobody_scores(check):
    code, _, messages = check(train="nowhere")
    assert code == 1
    assert "Reward function is not implemented for data_source='nowhere'" in messages


def test_what_verl_needs_from_the_environment(check, monkeypatch):
    from verl_gdpo import plugin

    assert "Start with VERL_PLATFORM=cpu" in check("trainer.device=cpu")[2]
    with monkeypatch.context() as changed:
        changed.setattr(plugin, "refusals", ["this version of verl is not supported"])
        assert "refuses to run: this version of verl is not supported" in check()[2]
    with monkeypatch.context() as changed:
        changed.delitem(sys.modules, "verl_gdpo.plugin")
        changed.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
        assert "did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS=none" in check()[2]
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "verl.trainer.ppo.v1", None)
        assert "verl.trainer.ppo.v1 cannot be imported" in check()[2]


def test_the_process_ends_although_a_reward_function_does_not(data):
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "verl_gdpo", "check", "--seconds", "1"),
            *("hardware=cpu", "data.train_batch_size=6", "actor_rollout_ref.model.path=org/model"),
            *(f"data.train_files={data}/good.parquet", f"data.val_files={data}/good.parquet"),
            *custom(data, "sleeps"),
        ],
        cwd=REPO,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "gave no answer within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_machine_cannot_give_to_a_scorer(check, monkeypatch):
    def found(missing):
        monkeypatch.setitem(TASK_OF, "rlla", replace(TASK_OF["rlla"], missing=missing))

    found(lambda: ["there is no moon"])
    code, said, _ = check()
    assert code == 0 and "check: task tool_rl: there is no moon" in said
    assert "moon" not in check(scorer="lengths")[1]  # not by our scorer

    def nothing_works():
        raise OSError("no sandbox works here")

    found(nothing_works)
    assert check()[::2] == (1, "check: no sandbox works here\n")


def test_a_service_that_is_not_there_is_one_message(check, data, monkeypatch):
    """And no response is tried, of which each would wait for it."""
    monkeypatch.setattr(sandbox_service, "RETRY_SECONDS", 0.0)
    rows = coding_synthetic.make_rows(6, split="train", seed=0)
    pd.DataFrame(local_files.numbered(rows, "train")).to_parquet(data / "coding.parquet")
    url = "http://127.0.0.1:9/run_code"
    code, said, problems = check(f"reward.sandbox_fusion.url={url}", train="coding")
    assert code == 1
    assert re.fullmatch(rf"check: reward\.sandbox_fusion\.url={url}: .* refused.*\n", problems)
    assert "another row's" not in said
