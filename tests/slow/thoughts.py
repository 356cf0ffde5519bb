"""A template that opens the thought in the prompt, on verl's default trainer, without a GPU.

A start takes more than a minute, so the same training has rewards of training and validation alone,
and dynamic sampling by the mean of a reward.
"""

import shutil
from statistics import mean

import oracle
import pytest
from rollout_check import BATCH, SAMPLES, SIZES
from start_verl import run_verl

from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tools import data
from verl_gdpo.tools.run.resume import quoted
from workshop.tiny_policy.train import SHIPPED

HEADER = "<|im_start|>assistant\\n"
OPENING = "<think> "
STEPS = 2
LOW, HIGH = 0.2, 0.8
FUNCTIONS = """\
def short(extra_info, **_):
    return 1.0 if extra_info["generated_tokens"] < 30 else 0.0

def names_a_tool(answer_str, **_):
    return float('"name"' in answer_str)
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "policy"
    shutil.copytree(SHIPPED, folder)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    assert text.count(HEADER) == 1
    template.write_text(text.replace(HEADER, HEADER + OPENING))
    return folder


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thoughts")
    rows = ["--synthetic", "200", "--synthetic-test", "8"]
    assert data.main(["tool_rl", *rows, "--out", str(folder / "data")]) == 0
    functions = folder / "rewards.py"
    functions.write_text(FUNCTIONS)
    of_list = "+reward.reward_functions"
    made = run_verl(
        folder / "run",
        [
            f"data.train_files={quoted(str(folder / 'data/train.parquet'))}",
            f"data.val_files={quoted(str(folder / 'data/test.parquet'))}",
            "data.max_prompt_length=80",
            "data.max_response_length=56",
            f"actor_rollout_ref.model.path={quoted(str(policy))}",
            *SIZES,
            f"{of_list}.form.task=tool_rl",
            f"{of_list}.short.path={quoted(str(functions))}",
            f"{of_list}.short.name=short",
            f"{of_list}.short.validation=never",
            f"{of_list}.names_a_tool.path={quoted(str(functions))}",
            f"{of_list}.names_a_tool.name=names_a_tool",
            f"{of_list}.names_a_tool.validation=only",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=reward",
            f"++algorithm.gdpo.keep_groups={{form__format: [{LOW}, {HIGH}]}}",
            "trainer.total_epochs=10",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.test_freq={STEPS}",
            "trainer.val_before_train=False",
            "trainer.save_freq=-1",
        ],
    )
    assert made.exit_code == 0, made.last_lines()
    return made


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_thought_in_the_prompt_belongs_to_the_response(run, step):
    rows = run.samples(step)
    assert len(rows) == BATCH * SAMPLES
    for row in rows:
        assert row["input"].endswith(OPENING) and "<think>" not in row["output"]
        again = tool_rl.score(OPENING + row["output"], row["gts"])
        assert row["rewards"]["form__format"] == again["format"]
        assert row["rewards"]["form__correctness"] == pytest.approx(again["correctness"])
    # As plain text, no response would have the form, and no group would be kept.
    assert max(row["rewards"]["form__format"] for row in rows) == 1.0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_groups_are_kept_by_the_mean_of_a_reward(run, step):
    groups = {}
    for row in run.samples(step):
        groups.setdefault(row["group"], []).append(row["rewards"]["form__format"])
    assert len(groups) == BATCH
    for formats in groups.values():
        assert LOW <= mean(formats) <= HIGH


def test_some_groups_are_dropped_for_their_mean(run):
    steps = [run.steps()[step] for step in range(1, STEPS + 1)]
    # A step may have none by chance.
    assert max(metrics["gdpo/form__format/groups_outside"] for metrics in steps) > 0
    assert min(metrics["gdpo/filter_kept"] for metrics in steps) < 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_training_and_validation_have_their_own_rewards(run, step):
    rows = run.samples(step)
    names = ["form__format", "form__correctness", "short"]
    for row in rows:
        assert sorted(row["rewards"]) == sorted(names)
    rewards = [[row["rewards"][name] for name in names] for row in rows]
    expected = oracle.gdpo(rewards, [row["group"] for row in rows])
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-5)
    found = run.steps()[STEPS]
    assert found["val-aux/rlla/names_a_tool/mean@1"] > 0.5
    assert not [name for name in found if "short" in name and name.startswith("val")]
