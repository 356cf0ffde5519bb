"""The training with tools of docs/thinking_models.md, on verl's default trainer without a GPU."""

import json
import math
import re
import shlex

import agent_policy
import oracle
import pandas as pd
import pytest
from repository import REPO
from rollout_check import BATCH, SAMPLES, SIZES
from start_verl import run_verl

PAGE = (REPO / "docs" / "thinking_models.md").read_text()
TOOLS, REWARDS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[SETTINGS] = re.findall(
    r"<!-- read by tests/slow/agents.py -->\n```bash\n(.*?)```", PAGE, re.DOTALL
)
WEIGHTS = {"right": 1.0, "form": 0.5, "short": 0.5, "quick": 0.0}
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "rewards.py").write_text(REWARDS)
    for split, count in (("train", 16), ("test", 4)):
        rows = [agent_policy.row(number, split) for number in range(count)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    policy = agent_policy.make_agent_policy(folder / "policy")
    settings = []
    for setting in shlex.split(SETTINGS):
        for name in ("tools.py", "rewards.py"):
            setting = setting.replace(name, str(folder / name))
        settings.append(setting)
    made = run_verl(
        folder / "run",
        [
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/test.parquet",
            "data.max_prompt_length=48",
            "data.max_response_length=120",
            f"actor_rollout_ref.model.path={policy}",
            *SIZES,
            *settings,
            "trainer.total_epochs=10",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.test_freq={STEPS}",
            "trainer.save_freq=-1",
        ],
    )
    assert made.exit_code == 0, made.last_lines()
    return made


def turns_of(output):
    """What the policy wrote in each of its turns, and what tools answered, in verl's text."""
    own, *more = re.split(r"\n?tool\n", output)
    turns = [own]
    answers = []
    for each in more:
        answer, _, turn = each.partition("\nassistant\n")
        answers.append(answer)
        turns.append(turn)
    return turns, answers


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_each_row_has_its_own_rewards(run, step):
    rows = run.samples(step)
    assert len(rows) == BATCH * SAMPLES
    calls = []
    for row in rows:
        turns, answers = turns_of(row["output"])
        calls.append(len(answers))
        answer = turns[-1]
        numbers = re.findall(r"\d+", answer)
        expected = {
            "right": float(numbers[:1] == [row["gts"]]),
            "form": float(re.fullmatch(r"<answer>\d+</answer>", answer) is not None),
            "short": 1 / (1 + math.exp((row["generated_tokens"] - 40) / 50)),
            "quick": float(row["tool_seconds"] <= 0.04),
        }
        assert row["rewards"] == pytest.approx(expected)
        if answers:
            # A call of `multiply` takes 0.05 seconds, one of `add` 0.02.
            assert row["tool_seconds"] > 0.02 * len(answers)
            assert row["generated_tokens"] < row["response_tokens"]
        else:
            assert row["tool_seconds"] == 0
            assert row["generated_tokens"] == row["response_tokens"]
        # Nothing was rejected.
        assert row["trained_tokens"] == row["generated_tokens"]
    assert {0, 1} <= set(calls)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_advantages_are_those_of_a_loop(run, step):
    rows = run.samples(step)
    rewards = [[row["rewards"][name] for name in WEIGHTS] for row in rows]
    groups = [row["group"] for row in rows]
    expected = oracle.gdpo(rewards, groups, weights=list(WEIGHTS.values()))
    actual = [row["advantage"] for row in rows]
    assert actual == pytest.approx(expected, abs=1e-5)
    largest = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    print(f"step {step}: largest difference {largest:.2g}")
    assert sum(abs(a) > 0.01 for a in actual) > len(actual) / 2
    for name in ("right", "form", "short"):
        assert len({row["rewards"][name] for row in rows}) > 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_metrics_are_means_of_the_dump(run, step):
    metrics = run.steps()[step]
    rows = run.samples(step)
    seconds = [row["tool_seconds"] for row in rows]
    tokens = [row["generated_tokens"] for row in rows]
    expected = {
        "gdpo/rollout/generated_tokens/mean": sum(tokens) / len(tokens),
        "gdpo/rollout/tool_seconds/mean": sum(seconds) / len(seconds),
        "gdpo/rollout/tool_seconds/max": max(seconds),
    }
    for name in WEIGHTS:
        values = [row["rewards"][name] for row in rows]
        expected[f"gdpo/{name}/mean"] = sum(values) / len(values)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    for name in ("right", "form"):
        assert any(f"/{name}/mean" in key for key in run.steps()[STEPS] if key.startswith("val-"))


def test_what_the_page_shows(run):
    """Printed for the page, which shows a row of such a dump."""
    row = next(row for row in run.samples(1) if row["tool_seconds"] > 0 and row["advantage"] > 0)
    print(json.dumps(row, indent=1))
    print({name: value for name, value in run.steps()[1].items() if name.startswith("gdpo/")})
    [shown] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert set(json.loads(shown)) == set(row) - {"uid", "group"}
    assert json.loads(shown)["rewards"].keys() == row["rewards"].keys()
