"""verl's own trainer without a GPU, in the ways that `test_run_tool_rl.py` does not run it.

A start takes more than a minute, so one run may test several things, such as training and a bad
sample. A tiny untrained model gets ToolRL's rewards, which are always the lowest for it, and two
rewards that vary.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import oracle
import planted
import pytest
import two_outputs
from judge_stub import judge_stub
from rollout_check import BATCH, GRPO, SAMPLES, check_advantages, check_rollouts
from small_trainings import REWARD_FILE, check_error, overrides
from start_verl import run_verl
from varied_reward import PATTERNS, letters_alone, service_fails

from verl_gdpo.scoring.lengths import smooth
from verl_gdpo.tasks.tool_rl import score as tool_rl


def test_colocate_async_trains_until_a_reward_is_no_number(assets, tmp_path):
    """Two ranks; every other session has two outputs; rollouts come from older weights."""
    agent_loops = tmp_path / "agent_loops.yaml"
    agent_loops.write_text(two_outputs.CONFIG)
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=2",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agent_loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_outputs",
            "data.max_response_length=300",
            "trainer.total_training_steps=4",
            "trainer.test_freq=4",
            "trainer.val_before_train=False",
            scorer="nan_in_validation",
        ),
        PYTHONPATH=os.pathsep.join([str(REWARD_FILE.parent), os.environ.get("PYTHONPATH", "")]),
    )
    check_error(run, r"reward 'letters' is nan; expected a finite number")
    staleness = {}
    weights = dict.fromkeys(["correctness", "format", "letters", "brevity"], 1.0)
    for step, metrics in run.steps().items():
        rows = run.dump(step)
        check_rollouts(rows, weights)
        second = [row["uid"] for row in rows if row["uid"].endswith("_1") and row["session"] % 2]
        assert len(second) == BATCH * SAMPLES / 2
        staleness[step] = metrics["training/off_policy/trajectory_staleness_worst/max"]
        if staleness[step] == 0:
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert sorted(staleness) == [1, 2, 3]
    assert staleness[1] == 0 < max(staleness.values())


# --- groups without signal are filtered, and some rewards are missing ----------------------------


def filtered(assets, *more, scorer="patterned"):
    return overrides(
        assets,
        f"data.train_files={assets}/mixed_train.parquet",
        f"data.val_files={assets}/mixed_test.parquet",
        "data.shuffle=False",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        *more,
        scorer=scorer,
    )


def check_filtered(run, kept, tolerance=1e-5, **options):
    """Groups of the patterns `kept` alone were trained on; `options` go to the oracle."""
    rows = [row for row in run.dump(1) if not row["is_padding"]]
    # `rare` is missing here and there, and else constant: it adds nothing
    rewards = [tuple(row["rewards"][name] for name in "abc") for row in rows]
    check_advantages(rows, rewards, tolerance, **options)
    groups = {}
    for row, values in zip(rows, rewards, strict=True):
        groups.setdefault(row["group"], []).append(values)
    name_of = {tuple(sorted(pattern)): name for name, pattern in PATTERNS.items()}
    assert {name_of[tuple(sorted(values))] for values in groups.values()} == kept
    rare = {row["rewards"].get("rare", "no such reward") for row in rows}
    assert rare >= {None, "no such reward"}
    assert run.steps()[0]["val-aux/rlla/rare/mean@1"] == 0.0
    assert run.steps()[1]["training/filter_groups/evicted_samples"] > 0


def test_the_grpo_arm(assets, tmp_path):
    run = run_verl(tmp_path, filtered(assets, "estimator=grpo", "trainer.total_training_steps=1"))
    assert run.exit_code == 0, run.last_lines()
    assert "replaces the gdpo of verl 0.9.1;" in run.output
    check_filtered(run, {"ordinary", "stairs"}, 1e-4, **GRPO)  # verl's own grpo is in float32
    metrics = run.steps()[1]
    assert metrics["gdpo/a/max"] == 1.0
    assert metrics["gdpo/no_signal"] == 0
    assert metrics["gdpo/distinct_grpo"] == 7  # of the sums 0, 1, 1, 3 and of 0, 1, 2, 3


@pytest.fixture(scope="session")
def verl_0_9_0(tmp_path_factory):
    """A folder for PYTHONPATH: verl 0.9.0 without dependencies, which are those of 0.9.1."""
    folder = tmp_path_factory.mktemp("verl_0.9.0")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*pip, "verl==0.9.0"], check=True, timeout=300)
    return str(folder)


def test_verl_0_9_0_until_the_scorer_raises_for_one_row(assets, tmp_path, verl_0_9_0):
    run = run_verl(
        tmp_path,
        filtered(assets, "trainer.total_training_steps=9", scorer="patterned_but_for_one_row"),
        PYTHONPATH=os.pathsep.join([verl_0_9_0, os.environ.get("PYTHONPATH", "")]),
    )
    assert "replaces the gdpo of verl 0.9.0;" in run.output
    check_error(run, r"extra_info.index 20: KeyError: 'a bug in the scorer' \[.*reward.py:\d+\]")
    check_filtered(run, {"tied", "ordinary", "stairs"})
    assert len(run.steps()) < 5  # validation, and what the rows before allow


# --- a list of reward functions ------------------------------------------------------------------


def test_functions_from_three_places_of_which_one_is_a_judge(assets, tmp_path):
    """A task, a package, a file and a judge; each planted fault is its own sample's alone."""
    (tmp_path / "template.txt").write_text("Rate for {prompt}: {response}")
    (tmp_path / "agent_loops.yaml").write_text(planted.CONFIG)
    agent = "actor_rollout_ref.rollout.agent"
    with judge_stub() as stub:
        entries = {
            "tool": {"task": "tool_rl", "weight": "{format: 1.0, correctness: 1.0}"},
            "letters": {"path": REWARD_FILE, "name": "letters_alone"},
            "brief": {"path": "pkg://verl_gdpo.scoring.lengths", "name": "smooth", "limit": 8},
            "q": {
                **{"judge": stub.address, "model": "m", "template": tmp_path / "template.txt"},
                **{"rewards": "{clear: [0, 10], right: [0, 1]}", "on_error": "missing"},
            },
        }
        run = run_verl(
            tmp_path,
            overrides(
                assets,
                *(
                    f"+reward.reward_functions.{name}.{key}={value}"
                    for name, entry in entries.items()
                    for key, value in entry.items()
                ),
                *("+reward.max_concurrent=2", "+reward.timeout=2", "reward.num_workers=3"),
                *("++algorithm.gdpo.max_failed=0.6", "trainer.total_training_steps=2"),
                *("data.shuffle=False", "data.max_response_length=64"),
                f"{agent}.agent_loop_config_path={tmp_path}/agent_loops.yaml",
                f"{agent}.default_agent_loop=planted",
                scorer=None,
            ),
            PYTHONPATH=os.pathsep.join([str(REWARD_FILE.parent), os.environ.get("PYTHONPATH", "")]),
        )
    assert run.exit_code == 0, run.last_lines()
    for step in (1, 2):
        rows = [row for row in run.dump(step) if not row["is_padding"]]
        present = [[True] * 4 + [row["output"] not in planted.FAIL] * 2 for row in rows]
        rewards = []
        for row, (*_, is_there) in zip(rows, present, strict=True):
            text, length = row["output"], row["response_tokens"]
            named = {f"tool__{k}": v for k, v in tool_rl.score(text, row["gts"]).items()}
            named |= {"letters": letters_alone(text)}
            named |= {"brief": smooth({"generated_tokens": length}, 8)}
            judged = stub.gave[text] if is_there else dict.fromkeys(["clear", "right"])
            named |= {f"q__{name}": judged[name] for name in ("clear", "right")}
            rewards.append([value or 0.0 for value in named.values()])
            assert json.loads(row["rewards"].pop("q__answer", "null")) == (
                judged if is_there else None
            )
            assert row["rewards"].pop("q__call", {"tokens": 12})["tokens"] == 12
            assert row["rewards"] == pytest.approx(named)
        assert {row["output"] for row in rows} >= {*planted.SAID}
        check_advantages(rows, rewards, present=present)
        assert run.steps()[step]["gdpo/scoring/failed_q"] == len(planted.FAIL) / len(rows)
    assert stub.most == 2


def test_rewards_of_a_list_where_functions_fail_or_have_other_sources(assets, tmp_path):
    """Three workers, each of which sees other rows."""
    entries = {
        "two": {"path": REWARD_FILE, "name": "two"},
        "form": {"task": "tool_rl", "sources": "[rlla,rlala]"},
    }
    entries["two"] |= {"on_error": "missing", "rewards": "[two,letters]"}
    listed = [
        f"+reward.reward_functions.{name}.{key}={value}"
        for name, entry in entries.items()
        for key, value in entry.items()
    ]
    more = ["reward.num_workers=3", "++algorithm.gdpo.max_failed=0.9", "+my.eps=0.5"]
    more += [f"data.train_files={assets}/mixed_train.parquet"]
    more += ["trainer.total_training_steps=2", "trainer.test_freq=2", "data.shuffle=False"]
    more += ["++algorithm.gdpo.eps=${my.eps}", f"data.val_files={assets}/mixed_test.parquet"]
    run = run_verl(tmp_path, overrides(assets, *listed, *more, scorer=None))
    assert run.exit_code == 0, run.last_lines()
    assert "no row has data_source 'rlala'; did you mean 'rlla'?" in run.output
    failed = 0
    for step in (1, 2):
        rows = [row for row in run.dump(step) if not row["is_padding"]]
        present, rewards = [], []
        for row in rows:
            has_failed = service_fails(row["output"])
            failed += has_failed
            of_two = [None, None] if has_failed else [1.0, letters_alone(row["output"])]
            of_form = [None, None]
            if row["data_source"] == "rlla":
                of_form = list(tool_rl.score(row["output"], row["gts"]).values())
            names = ("two__two", "two__letters", "form__format", "form__correctness")
            named = dict(zip(names, [*of_two, *of_form], strict=True))
            assert row["rewards"] == pytest.approx(named)
            present.append([value is not None for value in named.values()])
            rewards.append([value or 0.0 for value in named.values()])
        assert {row["data_source"] for row in rows} == {"rlla", "other"}
        check_advantages(rows, rewards, present=present, eps=0.5)
    assert 0 < failed < 2 * BATCH * SAMPLES


def test_a_typo_in_sources_stops_the_run_before_ray(assets, tmp_path):
    entry = {"path": REWARD_FILE, "name": "letters_alone", "sources": "[RLLA]"}
    listed = [f"+reward.reward_functions.x.{key}={value}" for key, value in entry.items()]
    run = run_verl(tmp_path, overrides(assets, *listed, scorer=None))
    check_error(run, r"x.sources=\['RLLA'\]: no training or validation .*; did you mean 'rlla'")
    assert "Started a local Ray instance" not in run.output


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_samples_without_their_service_leave_the_step(assets, tmp_path, estimator):
    entry = {
        **{"path": REWARD_FILE, "name": "service", "log": tmp_path / "service.log"},
        **{"weight": "{digits: 1.0}", "on_error": "drop"},
    }
    listed = [f"+reward.reward_functions.service.{key}={value}" for key, value in entry.items()]
    more = ("++algorithm.gdpo.max_failed=0.6", "++algorithm.gdpo.min_group=3")
    steps = ("trainer.total_training_steps=2", f"estimator={estimator}")
    run = run_verl(tmp_path, overrides(assets, *listed, *more, *steps, scorer=None))
    assert run.exit_code == 0, run.last_lines()
    dropped = 0
    for step in (1, 2):
        rows = [row for row in run.dump(step) if not row["uid"].startswith("pad")]
        works = [row for row in rows if not service_fails(row["output"])]
        whole = Counter(row["group"] for row in works)
        left = [row for row in works if whole[row["group"]] >= 3]
        assert [row for row in rows if not row["is_padding"]] == left
        assert {row["advantage"] for row in rows if row["is_padding"]} <= {0.0}
        digits = [[sum(map(str.isdigit, row["output"]))] for row in left]
        assert [row["rewards"]["service__digits"] for row in left] == [each for [each] in digits]
        options = GRPO if estimator == "grpo" else {}
        expected = oracle.gdpo(digits, [row["group"] for row in left], **options)
        assert [row["advantage"] for row in left] == pytest.approx(expected, abs=1e-4)
        share = 1 - len(left) / len(rows)
        assert run.steps()[step]["gdpo/scoring/dropped"] == pytest.approx(share)
        dropped += share
    assert 0 < dropped < 1.2


# --- nothing is trained; faults.py has more such runs ---------------------------------------------


def test_a_row_without_ground_truth_stops_the_run(assets, tmp_path):
    rows = f"data.train_files={assets}/no_ground_truth.parquet"
    run = run_verl(tmp_path, overrides(assets, rows, scorer=None))
    check_error(run, r"data.train_files, row 11 \(data_source 'rlla'\): tool_rl ground truth")
    assert not run.steps()
