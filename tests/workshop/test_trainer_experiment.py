"""The experiment with verl's trainer: its rows, runs, data, and what the page says of them."""

import json
import math
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from quick_composition import compose_quickly as compose_config
from repository import REPO

from verl_gdpo.run.end_conditions import RunEnd
from verl_gdpo.run.processes import locked
from workshop.experiments.trainer import (
    __main__ as command,
)
from workshop.experiments.trainer import (
    compare,
    conclusions,
    drive,
    expectations,
    on_cpu,
    on_gpu,
    page,
    paper,
    pictures,
    policy,
    results,
    settings,
    task,
)
from workshop.experiments.trainer.results import Failure, Result
from workshop.experiments.trainer.settings import SETTINGS, Run, plan

FOUND = results.read_all()
FIRST = {run: found for run, found in FOUND.items() if SETTINGS[run.setting].edition == 1}
RUN = Run("20_to_1", "gdpo", 1)
SHARES = {"small": (0.25, 0.75), "large": (0.5, 1.0)}
SAMPLE = Result("abc", SHARES, {"format": 0.1}, 60.0, {"verl": "0.9.1"})

# --- the task -------------------------------------------------------------------------------------


def wanted(row):
    return json.loads(row["reward_model"]["ground_truth"])


@pytest.mark.parametrize("own_format", [False, True])
def test_rows(own_format):
    rows = task.make_rows(3, own_format=own_format)
    assert [row["prompt"][0]["content"] for row in rows] == [*task.NAMES]
    assert len({*task.NAMES}) == 16
    formats = Counter(str(wanted(row)["format"]) for row in rows)
    assert (len(formats) > 8) if own_format else (len(formats) == 1)
    assert len({str(wanted(row)["answer"]) for row in rows}) > 8
    factors = [factor for row in rows for factor in wanted(row)["factor"].values()]
    assert all(1 / 8 <= factor <= 8 for factor in factors)
    if own_format:  # 32 of them, uniform in the logarithm
        assert min(factors) < 1 / 4 and max(factors) > 4
    else:
        assert {*factors} == {1.0}
    assert rows == task.make_rows(3, own_format=own_format)
    assert rows != task.make_rows(4, own_format=own_format)


@pytest.mark.parametrize(
    ("response", "format_met", "answer_met"),
    [
        ("<say> big blue late </say> .", True, True),
        ("<say> big blue late </say> !", False, True),  # another end
        ("say: big blue late </say> .", False, True),
        ("<say> small blue late </say> .", True, False),
        ("<say> big blue late </say> . .", False, False),  # seven words
        ("big blue late", False, False),
        ("", False, False),
    ],
)
def test_a_response_is_scored(response, format_met, answer_met):
    truth = {"format": [0, 0, 0], "answer": [0, 1, 3], "factor": {"format": 0.5, "answer": 2.0}}
    score = task.compute_score(
        "experiment", response, json.dumps(truth), {}, ranges={"format": 20.0, "answer": 1.0}
    )
    # worth 20 x 0.5 and 1 x 2, so the answer is the small one
    assert score == {
        "format": 10.0 * format_met,
        "answer": 2.0 * answer_met,
        "small_met": float(answer_met),
        "large_met": float(format_met),
    }


def test_the_small_reward_depends_on_the_row():
    response, ranges = "<say> big red old ; .", {"format": 1.0, "answer": 1.0}
    for factors, is_small in (((0.5, 2.0), "format"), ((2.0, 0.5), "answer"), ((1, 1), "answer")):
        truth = {"format": [0, 1, 0], "answer": [1, 1, 1]}
        truth["factor"] = dict(zip(("format", "answer"), factors, strict=True))
        score = task.compute_score("experiment", response, json.dumps(truth), {}, ranges)
        assert score["small_met"] == (is_small == "format"), factors


def test_a_demonstration_is_half_right():
    """Three places are all right in 1 of 8 of them, one reward whatever the other."""
    [row, *_] = task.make_rows(1, own_format=True)
    chance = random.Random(0)
    shown = [task.demonstration(row, chance) for _ in range(4000)]
    met = {r: [task.met(text, r, wanted(row)[r]) for text in shown] for r in task.OF_REWARD}
    assert sum(met["format"]) / 4000 == pytest.approx(1 / 8, abs=0.02)
    assert sum(met["answer"]) / 4000 == pytest.approx(1 / 8, abs=0.02)
    both = sum(map(lambda pair: all(pair), zip(*met.values(), strict=True)))
    assert both / 4000 == pytest.approx(1 / 64, abs=0.008)


@pytest.mark.slow
def test_the_starting_policy(tmp_path):
    """A seed that the comparison does not use."""
    torch.set_num_threads(1)
    rows = task.make_rows(100, own_format=False)
    policy.make_policy(tmp_path / "policy", rows, 100)
    rates = policy.start_rates(tmp_path / "policy", rows)
    assert all(0.07 < rates[reward] < 0.19 for reward in task.OF_REWARD), rates
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "policy" / "model.safetensors")
    parameters = sum(weight.numel() for weight in weights.values())
    assert f"policies of {round(parameters, -4):,} to " in page.PAGE.read_text()


def test_the_policy_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "STEPS", 2)
    rows = task.make_rows(100, own_format=True)
    for name in ("one", "two"):
        policy.make_policy(tmp_path / name, rows, 5)
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"model.safetensors", "tokenizer.json"} <= files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


# --- the runs -------------------------------------------------------------------------------------


def test_the_order_of_the_runs():
    runs = [*plan()]
    assert [str(run) for run in runs[:4]] == [
        "20_to_1-grpo-1",
        "20_to_1-gdpo-1",
        "20_to_1-grpo_rescaled-1",
        "20_to_1-grpo-2",
    ]
    # 5 x 3, 5 x 2, 8 x 3, 5 x 3, and three further arms with 5 seeds each
    first, second = runs[:79], runs[79:]
    assert len({*first}) == len(first) == 15 + 10 + 24 + 15 + 15
    # four settings with 5 x 3, then 3 x 2 and 2 x 2
    assert len({*second}) == len(second) == 60 + 6 + 4
    assert [*dict.fromkeys(run.setting for run in runs)] == [*SETTINGS]
    assert [run.seed for run in second[:60]] == [seed for seed in range(1, 6) for _ in range(12)]
    assert [*map(str, second[:4])] == [
        *("gsm8k-grpo-1", "gsm8k-gdpo-1", "gsm8k-grpo_rescaled-1", "maths-grpo-1")
    ]


def test_the_pilot_has_a_seed_of_its_own():
    assert not {(run.setting, run.seed) for run in settings.pilot()} & {
        (run.setting, run.seed) for run in plan()
    }
    assert {run.arm for run in settings.pilot()} == {"grpo"}
    assert {run.setting for run in settings.pilot()} == {*settings.SECOND, "coding"}


def test_the_protocol_has_the_plan():
    text = (Path(settings.__file__).parent / "protocol.md").read_text()
    seeds = dict(re.findall(r"^\| `(\w+)`.*\| 1 to (\d+) \|$", text, re.M))
    assert seeds == {name: str(len(SETTINGS[name].seeds)) for name in settings.PROTOCOL}
    assert all(setting.seeds[0] == 1 for setting in SETTINGS.values())
    assert {f"`{arm}`" for arm in settings.ARMS} <= {*re.findall(r"`\w+`", text)}
    assert "1 - 0.05/7" in text and len(compare.COMPARISONS) == 7
    assert pytest.approx(1 - 0.05 / 7) == compare.LEVEL
    assert "-0.05 and +0.05" in text and compare.MATTERS == 0.05
    assert "20 minutes in the place of 10" in text and on_cpu.TIME_LIMIT_SECONDS == 1200
    assert "repeated once" in text and results.MAX_TRIES == 2


def test_the_page_has_what_the_protocol_expects():
    text = (Path(settings.__file__).parent / "protocol.md").read_text()
    said = " ".join(text.split("Expected, from")[1].split("##")[0].split())
    main, control, by_prompt, _ = said.split(";") if said.count(";") == 3 else [""] * 4
    assert "main +0.15 to +0.21 against `grpo`, and within 0.03 against `grpo_rescaled`" in main
    assert "within 0.02" in control and "+0.05 or more against both" in by_prompt
    texts = {of: text for of, (text, _, _) in expectations.FIRST.items()}
    assert {name: [*text.values()] for name, text in by_setting(texts).items()} == {
        "20_to_1": ["+0.15 to +0.21", "within 0.03"],
        "1_to_1": ["within 0.02"],
        "by_prompt": ["+0.05 or more"] * 2,
    }


def by_setting(texts):
    found = {}
    for (setting, other), text in texts.items():
        found.setdefault(setting, {})[other] = text
    return found


def composed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "STEPS", 1)
    inputs, rows = tmp_path, []
    if SETTINGS[run.setting].recipe == "facts":
        inputs, rows = on_cpu.prepare(run, tmp_path)
    arguments = on_cpu.command(run, rows, inputs, tmp_path / "run", "/tmp/ray")
    assert arguments[1:3] == ["-m", "verl.trainer.main_ppo"]
    keys = [key for key in arguments[7:] if not key.startswith("hydra.")]
    path = f"hydra.searchpath=[pkg://verl.trainer.config,file://{settings.OWN_RECIPES}]"
    with initialize_config_dir(str(REPO / "recipes"), version_base=None):
        return compose("train", overrides=[path, *keys])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_arms_differ_in_the_estimator_alone(setting, tmp_path, monkeypatch):
    configs = {}
    for arm in SETTINGS[setting].arms:
        config = composed(Run(setting, arm, 2), tmp_path, monkeypatch)
        configs[arm] = (config.algorithm.adv_estimator, config.algorithm.gdpo.get("rewards"))
        config.algorithm.adv_estimator, config.arm = "any", "any"
        config.trainer.experiment_name, config.algorithm.gdpo.rewards = "any", None
        assert config.seed == config.actor_rollout_ref.rollout.seed == 2
        assert config.trainer.total_training_steps == SETTINGS[setting].steps
        assert config.trainer.test_freq == config.trainer.save_freq == -1
        assert not config.trainer.val_before_train
        assert not config.actor_rollout_ref.actor.use_kl_loss
        assert not config.algorithm.use_kl_in_reward
        rate = 3e-4 if SETTINGS[setting].recipe == "tool_rl" else 1e-3
        assert config.actor_rollout_ref.actor.optim.lr == rate
        assert not config.algorithm.filter_groups.enable
        mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert mini_batch == config.data.train_batch_size  # one update a step
        rest = configs.setdefault("rest", config)
        assert config == rest, arm
    assert configs["grpo"][0] == "grpo" and configs["gdpo"][0] == "gdpo"
    assert configs["grpo"][1] == configs["gdpo"][1]
    if setting == "20_to_1":
        assert configs["grpo_rescaled"] == ("grpo", {"format": 1 / 20, "answer": 1.0})
        arguments = configs["rest"].reward.custom_reward_function.reward_kwargs
        assert arguments == {"ranges": {"format": 20.0, "answer": 1.0}}
    if SETTINGS[setting].recipe == "tool_rl":
        assert configs["grpo_rescaled"] == ("grpo", {"format": 1.0, "correctness": 1 / 6})


def test_weights_where_ranges_depend_on_the_prompt():
    """Factors 3 and 4 have the mean square 12.5; 1 and 7 have 25."""
    rows = []
    for factor in ((3, 1), (4, 7)):
        truth = {"factor": dict(zip(("format", "answer"), factor, strict=True))}
        rows.append({"reward_model": {"ground_truth": json.dumps(truth)}})
    keys = dict(
        key.split("=") for key in settings.weights(Run("by_prompt", "grpo_rescaled", 1), rows)
    )
    assert float(keys["++algorithm.gdpo.rewards.format"]) == pytest.approx(1 / math.sqrt(12.5))
    assert float(keys["++algorithm.gdpo.rewards.answer"]) == pytest.approx(1 / 5)
    assert settings.weights(Run("by_prompt", "grpo", 1), rows) == []


def test_a_fingerprint(tmp_path, monkeypatch):
    first = settings.fingerprint(RUN)
    assert settings.fingerprint(RUN._replace(seed=9)) == first
    others = [
        settings.fingerprint(run)
        for run in (
            RUN._replace(arm="grpo"),
            RUN._replace(arm="grpo_rescaled"),
            RUN._replace(setting="1_to_1"),
            RUN._replace(setting="by_prompt"),
        )
    ]
    assert len({first, *others}) == 5
    changed = tmp_path / "recipes" / "task"
    changed.mkdir(parents=True)
    text = (settings.OWN_RECIPES / "task/facts.yaml").read_text()
    monkeypatch.setattr(settings, "OWN_RECIPES", tmp_path / "recipes")
    (changed / "facts.yaml").write_text(text + "# a comment\n")
    assert settings.fingerprint(RUN) == first
    (changed / "facts.yaml").write_text(text.replace("lr: 1e-3", "lr: 2e-3"))
    assert settings.fingerprint(RUN) != first


# --- the driver -----------------------------------------------------------------------------------


def trains(made, outcome=SAMPLE):
    def train(run, work):
        made.append(str(run))
        found = outcome(run) if callable(outcome) else outcome
        return replace(found, fingerprint=settings.fingerprint(run))

    return train


def test_the_driver_goes_on_where_it_stopped(tmp_path, capsys):
    work, data, made = tmp_path / "work", tmp_path / "data", []
    runs = [*plan()][:5]

    def stop_at_second(run):
        if len(made) == 2:
            (work / "stop").touch()
        return SAMPLE

    drive.drive(runs, trains(made, stop_at_second), work, data)
    assert made == [str(run) for run in runs[:2]]
    assert "3 runs are left" in capsys.readouterr().err
    (work / "stop").unlink()
    drive.drive(runs, trains(made), work, data)
    assert made == [str(run) for run in runs]
    said = capsys.readouterr().err
    assert "20_to_1-grpo_rescaled-1: started; 3 runs left, about 8 min" in said  # 3 x 150 s
    assert "small 0.500, large 0.750, 60 s" in said
    drive.drive(runs, trains(made), work, data)
    assert len(made) == 5


def test_a_failed_run_is_repeated_once(tmp_path, capsys):
    work, data, made = tmp_path / "work", tmp_path / "data", []
    failing = trains(made, Failure("", "the disk is full", 3.0))
    for _ in range(3):
        drive.drive([RUN], failing, work, data)
    assert made == [str(RUN)] * 2
    assert [failure.reason for failure in results.failures(RUN, data)] == ["the disk is full"] * 2
    assert "failed after 3 s: the disk is full" in capsys.readouterr().err
    assert results.read(RUN, data) is None


def test_the_driver_stops_when_nothing_works(tmp_path):
    made = []
    failing = trains(made, Failure("", "no torch", 1.0))
    with pytest.raises(RuntimeError, match=r"2 runs in a row failed.*machine or the environment"):
        drive.drive([*plan()], failing, tmp_path / "work", tmp_path / "data")
    assert len(made) == 2


def test_a_failure_stays_beside_the_result(tmp_path):
    outcomes = iter([Failure("", "exit code 1", 3.0), SAMPLE])
    train = trains([], lambda run: next(outcomes))
    for _ in range(2):
        drive.drive([RUN], train, tmp_path / "work", tmp_path / "data")
    assert len(results.failures(RUN, tmp_path / "data")) == 1
    assert results.read(RUN, tmp_path / "data").shares == SHARES


def test_a_setting_that_is_complete_may_have_another_configuration(tmp_path):
    results.write(RUN, SAMPLE, tmp_path)
    results.check_fingerprints([RUN], tmp_path)
    assert RUN in FOUND and FOUND[RUN].fingerprint != settings.fingerprint(RUN)
    results.check_fingerprints(plan())


@pytest.mark.parametrize("kept", [SAMPLE, Failure("abc", "exit code 1", 3.0)])
def test_results_of_two_configurations_are_not_mixed(kept, tmp_path):
    results.write(RUN, kept, tmp_path / "data")
    other, made = Run("20_to_1", "grpo", 1), []
    with pytest.raises(ValueError, match=r"20_to_1-gdpo-1: its configuration .*abc.*--data"):
        drive.drive([other, RUN], trains(made), tmp_path / "work", tmp_path / "data")
    assert made == []


def test_two_drivers_share_the_runs(tmp_path, capsys):
    work, data, made = tmp_path / "work", tmp_path / "data", []
    first, second, third = [*plan()][:3]
    (work / "locks").mkdir(parents=True)
    # flock is of an open file, so this process is refused as another one is
    with locked(work / "locks" / str(second), "a run"):
        drive.drive([first, second, third], trains(made), work, data)
    assert made == [str(first), str(third)]
    assert f"{second}: another process has it" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu, "launch", lambda *_, **__: RunEnd(143, "stopped"))
    monkeypatch.setattr(policy, "STEPS", 1)
    with pytest.raises(results.Interrupted, match="20_to_1-gdpo-1"):
        drive.drive([RUN], on_cpu.train, tmp_path / "work", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_reason_of_a_failure_is_kept(tmp_path, monkeypatch):
    def fails(_command, folder, **_):
        folder.mkdir(parents=True)
        (folder / "train.log").write_text("begin\nValueError: rewards are nan\nend\n")
        return RunEnd(1, "failed")

    monkeypatch.setattr(on_cpu, "launch", fails)
    monkeypatch.setattr(policy, "STEPS", 1)
    found = on_cpu.train(RUN, tmp_path)
    assert found.reason == "exit code 1: ValueError: rewards are nan"
    assert found.fingerprint == settings.fingerprint(RUN)


# --- the data -------------------------------------------------------------------------------------


def dump(folder, step, rewards, end="\n"):
    row = {"uid": "a_0_0", "group": "a", "session": 0, "data_source": "experiment"}
    row |= {"response_tokens": 7, "trained_tokens": 7, "advantage": 0.0, "is_padding": False}
    lines = [json.dumps({**row, "rewards": each}) for each in rewards]
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + end)


def test_what_is_measured_in_the_dumps(tmp_path):
    folder, facts, tool_rl = tmp_path / "rollouts", SETTINGS["20_to_1"], SETTINGS["tool_rl_seeds"]
    met = [{"small_met": 0.0, "large_met": 1.0}, {"small_met": 1.0, "large_met": 1.0}]
    dump(folder, 1, met)
    dump(folder, 2, met[:1] * 2)
    found = results.measured(tmp_path, facts)
    assert found["shares"] == {"small": (0.5, 0.0), "large": (1.0, 1.0)}
    assert found["varies"] == {"small": (1.0, 0.0), "large": (0.0, 0.0)}
    # a group of 0 and 1 has the standard deviation .7071, and the range is 1
    assert found["spread"] == {"small": (0.70711, 0.0), "large": (0.0, 0.0)}
    dump(folder, 4, met)
    with pytest.raises(ValueError, match="missing or incomplete"):
        results.measured(tmp_path, facts)
    dump(folder, 3, met, end="")
    with pytest.raises(ValueError, match="missing or incomplete"):
        results.measured(tmp_path, facts)
    for path in folder.iterdir():
        path.unlink()
    dump(folder, 1, [{"format": 1.0, "correctness": 3.0}, {"format": 1.0, "correctness": -1.5}])
    found = results.measured(tmp_path, tool_rl)
    assert found["shares"] == {"format": (1.0,), "correctness": (0.625,)}  # (1 + 0.25) / 2
    assert found["spread"] == {"format": (0.0,), "correctness": (3.18198,)}  # 4.5 / sqrt(2)
    same = results.measured(tmp_path, SETTINGS["tool_rl"])["shares"]
    assert same == {"small": (1.0,), "large": (0.625,)}


def test_a_reward_without_its_condition_is_not_earned(tmp_path):
    rewards = [{"correctness": 0.0, "length": 1.0}, {"correctness": 1.0, "length": 1.0}]
    dump(tmp_path / "rollouts", 1, rewards)
    shares = {
        name: results.measured(tmp_path, SETTINGS[name])["shares"]["length"]
        for name in ("maths", "maths_if_correct")
    }
    assert shares == {"maths": (1.0,), "maths_if_correct": (0.5,)}


def test_what_is_written_is_read(tmp_path):
    results.write(RUN, SAMPLE, tmp_path)
    assert results.read(RUN, tmp_path) == SAMPLE
    assert results.read_all(tmp_path) == {RUN: SAMPLE}


def test_the_data_are_of_the_plan_and_of_one_configuration():
    known = {f"{run}.json" for run in (*plan(), *settings.pilot())}
    names = [path.name for folder in results.DATA_OF.values() for path in folder.glob("*")]
    assert {re.sub(r"\.failed-\d+|\.replaced", "", name) for name in names} <= known
    assert len(FOUND) == sum(name in known for name in names) > 0
    of = {}
    for run, result in FOUND.items():
        setting = SETTINGS[run.setting]
        assert {*result.shares} == {*setting.columns}
        for curve in result.shares.values():
            assert len(curve) == setting.steps and all(0 <= share <= 1 for share in curve)
        assert of.setdefault((run.setting, run.arm), result.fingerprint) == result.fingerprint
        if run.setting != "tool_rl":  # all arms have the start of the seed
            other = next(r for r in FOUND if (r.setting, r.seed) == (run.setting, run.seed))
            assert (result.start, result.inputs) == (FOUND[other].start, FOUND[other].inputs)


def test_the_dip_that_the_page_explains():
    """No other run loses a fifth of the small reward in one step."""
    falls = {
        (*run[:3], step)
        for run, found in FIRST.items()
        for step in range(2, 31)
        if found.shares["small"][step - 1] < found.shares["small"][step - 2] - 0.2
    }
    assert falls == {("20_to_1", "gdpo", 5, 22)}
    assert "(GDPO, ranges 20 and 1, seed 5)" in page.PAGE.read_text()


def test_rescaled_rewards_are_rewards_of_equal_range():
    """Trainings on the same numbers are the same training, as the page says."""
    pairs = [
        (found, FOUND[equal])
        for run, found in FOUND.items()
        if run[:2] == ("20_to_1", "grpo_rescaled")
        and (equal := Run("1_to_1", "grpo", run.seed)) in FOUND
    ]
    assert pairs
    for rescaled, equal in pairs:
        assert rescaled.shares == equal.shares


# --- the comparison -------------------------------------------------------------------------------


def results_of(setting, **arms):
    """Runs whose small reward is the given number all the time, one number a seed."""
    return {
        Run(setting, arm, seed): replace(SAMPLE, shares={"small": (value,), "large": (0.5,)})
        for arm, values in arms.items()
        for seed, value in enumerate(values, 1)
    }


def test_a_paired_interval():
    """Differences .1 .2 .3 .2 .2: mean .2, sd .0707; t(.975, 4) = 2.776, so .2 +- .0878."""
    found = results_of("1_to_1", gdpo=[0.5, 0.5, 0.6, 0.4, 0.4], grpo=[0.4, 0.3, 0.3, 0.2, 0.2])
    gain = compare.difference(found, "1_to_1", "gdpo", "grpo", level=0.95)
    assert gain.mean == pytest.approx(0.2)
    assert gain.spread == pytest.approx(math.sqrt(0.005))
    assert (gain.low, gain.high) == pytest.approx((0.2 - 0.0878, 0.2 + 0.0878), abs=1e-4)
    assert compare.difference(found, "1_to_1", "gdpo", "grpo").half_width > gain.half_width
    # the mean of both shares: the large one is the same, so half of it is left
    both = compare.difference(found, "1_to_1", "gdpo", "grpo", compare.mean_of_all)
    assert both.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 0.1, 0.11, 0.1, 0.1], "difference"),
        ([-0.1, -0.1, -0.11, -0.1, -0.1], "difference"),
        ([0.01, 0.01, 0.011, 0.01, 0.01], "difference, but none that matters"),
        ([-0.01, -0.01, -0.011, -0.01, -0.01], "difference, but none that matters"),
        ([0.01, -0.01, 0.0, 0.01, 0.0], "no difference that matters"),
        ([0.1, -0.1, 0.0, 0.1, 0.0], "open"),
        ([0.1, 0.1, 0.1, 0.1], "not complete"),
        ([], "not complete"),
    ],
)
def test_a_verdict(values, expected):
    gain = compare.Difference(dict(enumerate(values, 1)), range(1, 6), compare.LEVEL)
    assert gain.verdict == expected


def test_the_endpoints():
    """Shares .5 and .75 of the ranges 1 and 20: (.5 + 20 x .75) / 21."""
    values = [endpoint(SAMPLE, SETTINGS["20_to_1"]) for endpoint in compare.ENDPOINTS.values()]
    assert values == pytest.approx([0.5, 0.75, 0.625, 15.5 / 21])
    assert math.isnan(compare.declared(SAMPLE, SETTINGS["by_prompt"]))
    eight = {"gdpo": HIGH + HIGH[:3], "grpo": LOW + LOW[:3]}
    found = results_of("by_prompt", **eight)
    assert not compare.difference(found, "by_prompt", "gdpo", "grpo", compare.declared).of_seed
    assert "| not kept |" in page.endpoints(found)


def test_a_missed_expectation_is_called_so():
    gains = {row: compare.difference(FOUND, *row) for row in compare.COMPARISONS}
    lines = expectations.table(expectations.FIRST, gains).splitlines()
    # of two more, the mean is in what was expected, and a part of the interval is not
    assert [line.rsplit("| ", 1)[1] for line in lines if "within" in line] == ["open |"] * 2
    assert [line for line in lines if "missed" in line] == [
        line for line in lines if line.startswith("| ranges 20 and 1 | GRPO |")
    ]
    assert sum("as expected" in line for line in lines) == 2


@pytest.mark.slow
def test_a_further_setting_changes_no_verdict():
    """Who adds a setting writes a protocol of his own; the claims of this one stay."""
    code = (
        "from workshop.experiments.trainer import settings\n"
        "settings.SETTINGS['fifth'] = settings.SETTINGS['1_to_1']\n"
        "from workshop.experiments.trainer import __main__, compare, page, results\n"
        "assert len(compare.COMPARISONS) == 7\n"
        "text = page.PAGE.read_text()\n"
        "found = results.read_all()\n"
        "assert page.table(found) in text and page.endpoints(found) in text\n"
        "assert all(line in text for line in page.conclusions(found))\n"
        "assert __main__.main(['--list', '--only', 'fifth']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_a_seed_counts_if_both_arms_have_it():
    found = results_of("1_to_1", gdpo=[0.5, 0.6], grpo=[0.4])
    assert compare.difference(found, "1_to_1", "gdpo", "grpo").of_seed == {1: pytest.approx(0.1)}


def test_the_seeds_that_an_effect_needs():
    """s = d: at n = 10, (2.262 + 0.883)^2 = 9.9 <= 10; at n = 9, (2.306 + 0.889)^2 = 10.2 > 9."""
    assert compare.seeds_needed(0.1, 0.1) == 10
    # large n: (1.96 + 0.842)^2 x 100 = 785, and a few more for t
    assert 785 <= compare.seeds_needed(0.01, 0.1) <= 790


# --- what is said ---------------------------------------------------------------------------------

HIGH, LOW = [0.5, 0.51, 0.5, 0.51, 0.5], [0.2, 0.2, 0.21, 0.2, 0.2]
WIDE = [0.9, 0.1, 0.5, 0.2, 0.4]


def test_nothing_is_claimed_of_a_setting_that_is_not_complete():
    found = results_of("20_to_1", gdpo=HIGH[:4], grpo=LOW, grpo_rescaled=LOW)
    said = conclusions.conclusions(found)
    assert all("so nothing is claimed" in line for line in said)
    assert "4 of 5 seeds" in said[0]
    assert "0 of 8 seeds" in said[2]


@pytest.mark.parametrize(
    ("grpo", "control", "expected"),
    [
        (LOW, HIGH, "So GDPO helps the small reward"),
        (LOW, LOW, "whatever the ranges"),
        (LOW, None, "The control with equal ranges is not complete"),
        (HIGH, HIGH, "does not show the effect"),
        (WIDE, HIGH, "does not show the effect"),
    ],
)
def test_the_main_conclusion(grpo, control, expected):
    found = results_of("20_to_1", gdpo=HIGH, grpo=grpo)
    if control:
        found |= results_of("1_to_1", gdpo=HIGH, grpo=control)
    sentence = conclusions.conclusions(found)[0]
    assert expected in sentence
    others = (
        "So GDPO helps the small reward",
        "whatever the ranges",
        "not complete",
        "does not show",
    )
    assert sum(words in sentence for words in others) == 1
    if grpo is LOW:
        assert "GDPO minus GRPO is +0.30 [" in sentence


@pytest.mark.parametrize(
    ("rescaled", "expected"),
    [
        (LOW, "GDPO does more than rescale"),
        ([0.8] * 4 + [0.81], "Rescaling is better"),
        ([high - 0.01 for high in HIGH], "Dividing by the range does nearly the same"),
        (HIGH, "Dividing by the range does the same"),
        (WIDE, "Which of them is better is open"),
    ],
)
def test_the_conclusion_about_rescaling(rescaled, expected):
    found = results_of("20_to_1", gdpo=HIGH, grpo_rescaled=rescaled)
    assert expected in conclusions.conclusions(found)[1]


@pytest.mark.parametrize(
    ("rescaled", "expected"), [(LOW, "GDPO's own ground"), (HIGH, "is not shown")]
)
def test_the_conclusion_about_ranges_by_prompt(rescaled, expected):
    eight = {"gdpo": HIGH + HIGH[:3], "grpo": LOW + LOW[:3]}
    found = results_of("by_prompt", **eight, grpo_rescaled=rescaled + rescaled[:3])
    assert expected in conclusions.conclusions(found)[2]


def test_the_conclusion_about_tool_rl():
    found = results_of("tool_rl", gdpo=HIGH, grpo=LOW, grpo_rescaled=HIGH)
    sentence = conclusions.conclusions(found)[3]
    assert "(difference)" in sentence and "(no difference that matters)" in sentence


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_made_from_the_data():
    assert page.PAGE.read_text() == page.render(FOUND)


def test_the_sentences_of_the_readme_are_those_of_the_data():
    said = " ".join((REPO / "README.md").read_text().split())
    gains = {
        (setting, other): compare.difference(FOUND, setting, "gdpo", other)
        for setting in ("20_to_1", "1_to_1", "by_prompt", "tool_rl")
        for other in ("grpo", "grpo_rescaled")
        if other in page.SETTINGS[setting].arms
    }
    matter = {of for of, gain in gains.items() if gain.verdict == "difference"}
    assert matter == {("20_to_1", "grpo"), ("by_prompt", "grpo"), ("by_prompt", "grpo_rescaled")}
    assert f"earned {gains['20_to_1', 'grpo'].mean:.2f} more than GRPO where" in said
    assert f"and {gains['by_prompt', 'grpo'].mean:.2f} more where they depend on the prompt" in said
    less = [
        -compare.difference(FOUND, setting, "gdpo", "grpo", compare.share("large")).mean
        for setting in ("20_to_1", "by_prompt")
    ]
    assert f"Of the other reward it earned {less[0]:.2f} and {less[1]:.2f} less." in said
    assert f"{len(FIRST)} trainings" in said
    verdicts = Counter(gain.verdict for gain in compare.holm(FOUND).values())
    assert verdicts == {"open": 7, "no difference that matters": 1}
    assert "70 more trainings, with the rewards of GSM8K, maths and tool calling" in said
    assert "left seven of eight comparisons open" in said


def test_the_template_holds_no_results():
    """Numbers with a decimal point come from the data, except levels and parameters."""
    text = (Path(page.__file__).parent / "page.md.jinja").read_text()
    outside = re.sub(r"\{[{%].*?[}%]\}", "", text)
    allowed = {"0.05", "0.001", "0.8", "0.975", "2601.05242", "2.5"}  # Qwen2.5
    assert {*re.findall(r"\d+\.\d+", outside)} <= allowed


def test_the_code_of_the_page_computes_the_number_in_its_table():
    text = page.PAGE.read_text()
    [block] = re.findall(r"<!-- executed by \S+ -->\n```python\n(.*?)```", text, re.DOTALL)
    gain = compare.difference(FOUND, "20_to_1", "gdpo", "grpo")
    if gain.verdict == "not complete":
        pytest.skip("the main setting is not complete")
    done = subprocess.run([sys.executable, "-c", block], cwd=REPO, capture_output=True, text=True)
    assert f"| {done.stdout.strip()} [" in text, done


def test_the_pictures_show_the_data(tmp_path):
    pictures.draw(FOUND, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in pictures.PICTURES.iterdir()}
    linked = re.findall(r"\]\(in_verls_trainer/([^)]+)\)", page.PAGE.read_text())
    assert drawn == {*linked}
    found = results_of("20_to_1", gdpo=HIGH, grpo=LOW, grpo_rescaled=HIGH[:2])
    [axes] = pictures.endpoints(found).axes
    marks = [float(bar.lines[0].get_xdata()[0]) for bar in axes.containers]
    # small: .504 - .202; large: .5 - .5; half of the first; (20 x 0 + .302) / 21
    expected = [0.302, 0.0, 0.151, 0.302 / 21]
    assert marks == pytest.approx([*expected, 0.0, 0.0, 0.0, 0.0])  # two equal seeds
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:2] == [
        "ranges 20 and 1:\nminus GRPO (5 seeds)",
        "ranges 20 and 1:\nminus rescaled GRPO (2 of 5 seeds)",
    ]
    filled = [bar.lines[0].get_markerfacecolor() for bar in axes.containers]
    assert [colour != pictures.LOOK.background for colour in filled] == [True] + [False] * 7
    panels = pictures.curves(FOUND).axes
    names = [panel.get_title(loc="left") for panel in panels]
    assert names[0] == "ranges 20 and 1:\nsmall reward (answer)" and "large" in names[4]
    for size, panel in (("small", panels[0]), ("large", panels[4])):
        runs = [found for run, found in FOUND.items() if run[:2] == ("20_to_1", "gdpo")]
        mean = [sum(shares) / 5 for shares in zip(*(r.shares[size] for r in runs), strict=True)]
        assert [*panel.lines[0].get_ydata()] == pytest.approx(mean)


def test_the_rerun_of_others():
    """Squares of the deviations: 3341.2 / 4 = 835.3 and 100.8 / 4 = 25.2, so 28.90 and 5.02."""
    mean, low, high = paper.rerun_difference()
    assert mean == pytest.approx(35.2 - 38.6)
    assert low < 0 < high
    assert paper.rerun_spread("gdpo") == pytest.approx(28.90, abs=0.01)
    # sqrt(835.3 / 5 + 25.2 / 5) = 13.12; 4.24 degrees of freedom: t .975 = 2.71, t .8 = 0.93
    assert paper.rerun_detectable() == pytest.approx(13.12 * (2.71 + 0.93), rel=0.01)


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["1gpu", "8gpu"])
def test_the_commands_of_gpus(hardware, capsys, tmp_path):
    arguments = ["--hardware", hardware, "--dry-run", "--work", str(tmp_path)]
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    keys_of = {}
    for line, run in zip(lines, plan(hardware), strict=True):
        script, limit, _, *keys, seed, folder = shlex.split(line)
        assert Path(script) == REPO / "run_tool_rl.sh" and limit == "--time-limit"
        assert seed == f"seed={run.seed}" and folder == f"run_dir={tmp_path}/runs/{run}"
        assert keys == keys_of.setdefault(run.arm, keys)
    assert len(keys_of) == 3
    for arm, keys in keys_of.items():
        config = compose_config(REPO / "recipes", "train", ["task=tool_rl", *keys, "seed=3"])
        assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
        assert config.trainer.n_gpus_per_node == int(hardware[0])
        assert (config.seed, config.trainer.save_freq) == (3, -1)
        assert config.algorithm.adv_estimator == ("gdpo" if arm == "gdpo" else "grpo")
        rescaled = {"format": 1.0, "correctness": 1 / 6}
        assert config.algorithm.gdpo.rewards == (rescaled if arm == "grpo_rescaled" else None)


def test_the_steps_of_a_run_on_gpus():
    from workshop.benchmarks.step_model import TOOL_RL

    config = compose_config(REPO / "recipes", "train", ["task=tool_rl"])
    # 3,920 rows
    steps = 3920 // config.data.train_batch_size * config.trainer.total_epochs
    assert steps == page.GPU_STEPS
    assert config.data.train_batch_size == TOOL_RL.prompts


def test_a_run_on_gpus_is_kept(tmp_path, monkeypatch):
    run = Run("tool_rl", "gdpo", 1, "8gpu")

    def script(arguments):
        folder = Path(arguments[-1].removeprefix("run_dir="))
        folder.mkdir(parents=True)
        dump(folder / "rollouts", 1, [{"format": 1.0, "correctness": 0.0}] * 2)
        return 0

    monkeypatch.setattr(on_gpu.subprocess, "call", script)
    found = on_gpu.train(run, tmp_path)
    assert found.shares == {"small": (1.0,), "large": (0.5,)}
    assert found.fingerprint == settings.fingerprint(run) != settings.fingerprint(Run(*run[:3]))
    monkeypatch.setattr(on_gpu.subprocess, "call", lambda _: 1)
    assert "exit code 1; see " in on_gpu.train(run, tmp_path).reason
    monkeypatch.setattr(on_gpu.subprocess, "call", lambda _: 130)
    with pytest.raises(results.Interrupted):
        on_gpu.train(run, tmp_path)


# --- the command ----------------------------------------------------------------------------------


def test_the_list(tmp_path, capsys):
    results.write(RUN, SAMPLE, tmp_path)
    results.write(RUN, Failure("abc", "exit code 1", 3.0), tmp_path)
    assert command.main(["--list", "--only", "20_to_1-gdpo", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["20_to_1-gdpo-1: done, failed 1 times", "20_to_1-gdpo-2: not done"]
    assert len(lines) == 5  # and not 20_to_1-gdpo_no_batch_norm


def test_another_configuration_is_an_error(tmp_path, capsys):
    results.write(RUN, SAMPLE, tmp_path / "data")
    code = command.main(["--work", str(tmp_path / "work"), "--data", str(tmp_path / "data")])
    assert code == 1
    assert "Results of both would be mixed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "30_to_1"], "--only 30_to_1: no run has this name"),
        (["--dry-run"], "add --hardware 8gpu or 1gpu"),
        (["--hardware", "2gpu"], "invalid choice: '2gpu'"),
    ],
)
def test_a_wrong_argument(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


# --- a real run -----------------------------------------------------------------------------------
