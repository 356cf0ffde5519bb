"""verl's own trainer, started as a user starts it, without a GPU: minutes, not seconds.

A tiny untrained model gets ToolRL's rewards, which it never earns, and two on which it varies.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import oracle
import pandas as pd
import pytest
import varied_reward
from varied_reward import PATTERNS
from verl_run import run_verl

from verl_gdpo.cpu.tiny_model import make_tiny_model
from verl_gdpo.rewards import tool_rl

pytestmark = pytest.mark.e2e

# 6 prompts x 4 samples in mini-batches of 4 x 4: verl pads 24 rows to 32
BATCH, MINI_BATCH, SAMPLES = 6, 4, 4
PADDING = 8
REWARD_FILE = Path(varied_reward.__file__)


def tool_row(index, split, *, data_source="rlla"):
    city = ["Oslo", "Lima", "Kyiv", "Bern"][index % 4]
    call = json.dumps({"name": "weather", "parameters": {"city": city}})
    return {
        "data_source": data_source,
        "prompt": [
            {"role": "system", "content": "Call a tool."},
            {"role": "user", "content": f"Weather in {city}?"},
        ],
        "ability": "tool",
        "reward_model": {
            "style": "rule",
            "ground_truth": f"<think> look </think>\n<tool_call>\n{call}\n</tool_call>",
        },
        "extra_info": {"index": index, "split": split},
    }


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    train = [tool_row(i, "train") for i in range(32)]
    pd.DataFrame(train).to_parquet(folder / "train.parquet")
    pd.DataFrame([tool_row(i, "test") for i in range(8)]).to_parquet(folder / "test.parquet")
    mixed = [tool_row(i, "train", data_source=["rlla", "other"][i // 4 % 2]) for i in range(32)]
    pd.DataFrame(mixed).to_parquet(folder / "mixed.parquet")
    broken = json.loads(json.dumps(train))
    broken[11]["reward_model"]["ground_truth"] = None
    pd.DataFrame(broken).to_parquet(folder / "no_ground_truth.parquet")
    texts = [row["reward_model"]["ground_truth"] for row in train]
    make_tiny_model(folder / "model", texts=texts, initializer_range=0.1, seed=1)
    return folder


def overrides(assets, *more, scorer="compute_score"):
    return [
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/test.parquet",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.model.path={assets}/model",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(
            [
                f"reward.custom_reward_function.path={REWARD_FILE}",
                f"reward.custom_reward_function.name={scorer}",
            ]
            if scorer
            else []
        ),
        "trainer.total_epochs=10",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        "trainer.save_freq=-1",
        *more,
    ]


# --- runs that train -----------------------------------------------------------------------------

GDPO_REWARDS = {
    "correctness": 1.0,
    "format": 1.0,
    "letters": 1.0,
    "brevity": "{weight:{1:0.5,3:1.5},when:{reward:letters,at_least:0.4}}",
}


def weights_at(step):
    """`brevity` weighs .5, 1 and 1.5 in steps 1, 2 and 3, and stays there."""
    return {**GDPO_REWARDS, "brevity": min(0.5 * step, 1.5)}


def conditioned(rewards):
    """`brevity` counts where enough of the response is letters."""
    return rewards if rewards["letters"] >= 0.4 else {**rewards, "brevity": 0.0}


@pytest.fixture(scope="module")
def gdpo_run(assets, tmp_path_factory):
    """Three steps, validation before and after, a checkpoint."""
    return run_verl(
        tmp_path_factory.mktemp("gdpo"),
        overrides(
            assets,
            *(f"+algorithm.gdpo.rewards.{name}={w}" for name, w in GDPO_REWARDS.items()),
            "trainer.save_freq=3",
        ),
    )


def check_rollouts(rows, advantages_of, weights, trained_on=dict, tolerance=1e-5):
    """The dump says of each row what the scorer and the oracle say.

    `trained_on` makes the values in the sum from the raw rewards.
    """
    real = [row for row in rows if not row["is_padding"]]
    assert len(real) == BATCH * SAMPLES
    assert [row["advantage"] for row in rows if row["is_padding"]] == [0.0] * PADDING
    assert len({row["group"] for row in real}) == BATCH
    assert {row["session"] for row in real} == set(range(SAMPLES))
    for row in real:
        again = tool_rl.score(row["output"], row["gts"])
        again["letters"] = varied_reward.letters(row["output"])
        again["brevity"] = varied_reward.brevity(row["response_tokens"])
        assert row["rewards"] == pytest.approx(again, abs=1e-6)
        total = sum(weights[name] * trained_on(row["rewards"])[name] for name in weights)
        assert row["score"] == pytest.approx(total, abs=1e-5)
    rewards = [[trained_on(row["rewards"])[name] for name in weights] for row in real]
    expected = advantages_of(rewards, [row["group"] for row in real])
    actual = [row["advantage"] for row in real]
    assert actual == pytest.approx(expected, abs=tolerance)
    assert sum(abs(a) > 0.01 for a in actual) > len(actual) / 2


def share_without_advantage(rows):
    """Of the groups in a dump."""
    peaks = {}
    for row in rows:
        if not row["is_padding"]:
            peaks[row["group"]] = max(peaks.get(row["group"], 0.0), abs(row["advantage"]))
    return sum(peak < 1e-6 for peak in peaks.values()) / len(peaks)


def test_gdpo_trains(gdpo_run):
    assert gdpo_run.exit_code == 0, gdpo_run.last_lines()
    assert gdpo_run.output.count("replaces the gdpo of verl 0.9.1") == 1
    steps = gdpo_run.steps()
    assert sorted(steps) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        metrics = steps[step]
        rows = gdpo_run.dump(step)
        weights = weights_at(step)
        advantages_of = partial(oracle.gdpo, weights=list(weights.values()))
        check_rollouts(rows, advantages_of, weights, conditioned)
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
        for name in GDPO_REWARDS:
            values = [conditioned(row["rewards"])[name] for row in rows if not row["is_padding"]]
            logged = [metrics[f"gdpo/{name}/{s}"] for s in ("mean", "min", "max")]
            expected = [sum(values) / len(values), min(values), max(values)]
            assert logged == pytest.approx(expected, abs=1e-6)
        assert metrics["gdpo/no_signal"] == pytest.approx(share_without_advantage(rows))
        assert metrics["gdpo/batch_norm_mean"] == pytest.approx(0, abs=1e-9)
    for step in (0, 3):
        for name in GDPO_REWARDS:
            assert f"val-aux/rlla/{name}/mean@1" in steps[step]


def test_a_checkpoint_is_resumed(gdpo_run, assets):
    assert gdpo_run.exit_code == 0, gdpo_run.last_lines()
    resumed = run_verl(
        gdpo_run.folder,
        overrides(
            assets,
            *(f"+algorithm.gdpo.rewards.{name}={w}" for name, w in GDPO_REWARDS.items()),
            "trainer.total_training_steps=4",
            "trainer.val_before_train=False",
        ),
    )
    assert resumed.exit_code == 0, resumed.last_lines()
    assert "global_step_3, setting global step to 3" in resumed.output
    weights = weights_at(4)
    advantages_of = partial(oracle.gdpo, weights=list(weights.values()))
    check_rollouts(resumed.dump(4), advantages_of, weights, conditioned)
    assert not (gdpo_run.folder / "rollouts" / "5.jsonl").exists()


def test_grpo_arm_differs_in_the_estimator_alone(assets, tmp_path):
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "estimator=grpo",
            "trainer.total_training_steps=1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
        ),
    )
    assert run.exit_code == 0, run.last_lines()
    weights = dict.fromkeys(GDPO_REWARDS, 1.0)
    check_rollouts(
        run.dump(1),
        lambda r, g: oracle.gdpo(r, g, group_norm="summed", batch_norm="none", eps=1e-6),
        weights,
        tolerance=1e-4,  # verl's own grpo works in float32
    )
    metrics = run.steps()[1]
    assert "gdpo/letters/mean" in metrics
    assert metrics["gdpo/no_signal"] == pytest.approx(share_without_advantage(run.dump(1)))
    assert metrics["gdpo/distinct_grpo"] >= 2


def test_colocate_async_trains(assets, tmp_path):
    """Prompts are sent out ahead of time, so that rollouts come from older weights."""
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "trainer.v1.trainer_mode=colocate_async",
            "data.max_response_length=300",
            "trainer.test_freq=-1",
            "trainer.val_before_train=False",
        ),
    )
    assert run.exit_code == 0, run.last_lines()
    staleness = {}
    for step, metrics in run.steps().items():
        check_rollouts(run.dump(step), oracle.gdpo, dict.fromkeys(GDPO_REWARDS, 1.0))
        staleness[step] = metrics["training/off_policy/trajectory_staleness_worst/max"]
        if staleness[step] == 0:
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert sorted(staleness) == [1, 2, 3]
    assert staleness[1] == 0 < max(staleness.values())


@pytest.fixture(scope="session")
def verl_folders(tmp_path_factory):
    """{version: a folder for PYTHONPATH}; 0.9.0 without dependencies, which are those of 0.9.1."""
    folder = tmp_path_factory.mktemp("verl_0.9.0")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*pip, "verl==0.9.0"], check=True, timeout=300)
    return {"0.9.0": str(folder), "0.9.1": ""}


@pytest.mark.parametrize(
    ("estimator", "kept", "version"),
    [("gdpo", {"tied", "ordinary"}, "0.9.0"), ("grpo", {"ordinary"}, "0.9.1")],
)
def test_group_filtering_and_missing_rewards(
    assets, tmp_path, verl_folders, estimator, kept, version
):
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            f"estimator={estimator}",
            f"data.train_files={assets}/mixed.parquet",
            f"data.val_files={assets}/mixed.parquet",
            "data.shuffle=False",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=score",
            "trainer.total_training_steps=1",
            "trainer.test_freq=-1",
            scorer="patterned",
        ),
        PYTHONPATH=os.pathsep.join([verl_folders[version], os.environ.get("PYTHONPATH", "")]),
    )
    assert run.exit_code == 0, run.last_lines()
    assert f"replaces the gdpo of verl {version};" in run.output
    groups = {}
    rows = [row for row in run.dump(1) if not row["is_padding"]]
    for row in rows:
        groups.setdefault(row["group"], []).append(tuple(row["rewards"][n] for n in "abc"))
    assert len(groups) == BATCH
    name_of = {tuple(sorted(pattern)): name for name, pattern in PATTERNS.items()}
    assert {name_of[tuple(sorted(rewards))] for rewards in groups.values()} == kept
    assert run.steps()[1]["training/filter_groups/evicted_samples"] > 0
    if estimator == "gdpo":  # `rare` is missing here and there, and else constant: it adds nothing
        rewards = [[row["rewards"][name] for name in "abc"] for row in rows]
        expected = oracle.gdpo(rewards, [row["group"] for row in rows])
        assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert {row["rewards"].get("rare", "no such reward") for row in rows} >= {
        None,
        "no such reward",
    }
    assert run.steps()[0]["val-aux/rlla/rare/mean@1"] == 0.0


def test_without_the_plugin_verls_own_gdpo_fails(assets, tmp_path):
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "+algorithm.gdpo_reward_keys=[letters,brevity]",
            "trainer.val_before_train=False",
            scorer="with_score",
        ),
        VERL_USE_EXTERNAL_PLUGINS="verl_gdpo_cpu",
    )
    assert run.exit_code != 0
    assert 'key "prompts" not found in TensorDict' in run.output, run.last_lines()


# --- bad input: one readable message, exit code not 0, before or at the first step ---------------


@pytest.mark.parametrize(
    ("name", "more", "scorer", "message"),
    [
        (
            "missing parquet",
            ["data.train_files=/nowhere/train.parquet"],
            None,
            r"FileNotFoundError: .*/nowhere/train.parquet",
        ),
        (
            "row without ground truth",
            ["data.train_files={assets}/no_ground_truth.parquet"],
            None,
            r"data.train_files, row 11 \(data_source 'rlla'\): tool_rl ground_truth",
        ),
        (
            "unknown reward name",
            ["+algorithm.gdpo.rewards.corectness=1.0"],
            None,
            r"reward 'corectness' is configured, but .* did you mean 'correctness'",
        ),
        (
            "scorer raises for one sample in a hundred",
            ["trainer.val_before_train=False", "data.train_batch_size=32"],
            "raises_for_one_row",
            r"extra_info.index 5: KeyError: 'a bug in the scorer' \[.*varied_reward.py:\d+\]",
        ),
        (
            "scorer returns nan in validation",
            [],
            "nan_in_validation",
            r"reward 'letters' is nan; expected a finite number",
        ),
    ],
)
def test_bad_input_stops_the_run(assets, tmp_path, name, more, scorer, message):
    more = [line.format(assets=assets) for line in more]
    run = run_verl(tmp_path, overrides(assets, *more, scorer=scorer))
    assert run.exit_code == 1, run.last_lines()
    raised = [line for line in run.output.splitlines() if re.search(r"Error: ", line)]
    assert re.search(message, raised[-1]), raised[-3:]
    assert "step:1 " not in run.output
