"""A run's folder: complete and broken metrics, where verl's loggers write, and the summary."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra import compose, initialize_config_dir
from launched import step_line
from omegaconf import OmegaConf
from quick_composition import compose_quickly as compose_config
from repository import REPO
from verl.utils.tracking import Tracking
from verl_batch import verl_config
from verls_run import run_with_plugins

from verl_gdpo.terminal import render
from verl_gdpo.tools.run.starts import starts_of
from verl_gdpo.tools.run_folder import folder as run_folder
from verl_gdpo.tools.run_folder.folder import (
    MetricsReader,
    claim_metrics_file,
    keep_earlier_metrics,
    name_metrics_file,
    read_metrics,
    training_rewards,
    validation_rewards,
    write_into_run_dir,
)
from verl_gdpo.tools.summary import HEADER, as_json, as_text, reward_table

METRICS = {
    0: {"val-aux/rlla/format/mean@1": 0.2, "val-aux/rlla/reward/mean@1": -1.0},
    1: {"gdpo/format/mean": 0.25, "gdpo/format/max": 1.0, "gdpo/correctness/mean": -2.0},
    2: {
        "gdpo/batch_norm_mean": 0.0,
        "gdpo/format/mean": 0.5,
        "gdpo/format/correlation_with_correctness": 0.1,
        "gdpo/correctness/mean": -1.0,
        "val-aux/rlla/format/mean@1": 0.75,
    },
}


def write_metrics(run, *starts):
    (run / "metrics").mkdir()
    for number, steps in enumerate(starts, 1):
        lines = [step_line(step, **data) for step, data in steps.items()]
        (run / "metrics" / f"{number}.jsonl").write_text("".join(lines))


def test_metrics_of_all_starts_are_read(tmp_path):
    write_metrics(tmp_path, {0: METRICS[0], 1: METRICS[1]}, {1: {"gdpo/format/mean": 0.3}})
    with open(tmp_path / "metrics" / "2.jsonl", "a") as file:
        file.write('{"step": 2, "da')  # verl is writing
    metrics = read_metrics(tmp_path)
    assert list(metrics) == [0, 1]
    assert training_rewards(metrics) == {"format": {1: 0.3}, "correctness": {1: -2.0}}
    assert validation_rewards(metrics) == {"format": {0: 0.2}}


def of_start(number, steps):
    return {step: {"gdpo/format/mean": number} for step in steps}


TESTED = {"val-aux/rlla/format/mean@1": 0.9}
GOT_TO_6 = of_start(1, range(1, 7))


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([of_start(2, (4, 5))], {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}),
        # of a second resume, which goes on from before or behind the first one's checkpoint
        ([of_start(2, (4, 5)), of_start(3, (3,))], {1: 1, 2: 1, 3: 3}),
        ([of_start(2, (4, 5)), of_start(3, (5, 6))], {1: 1, 2: 1, 3: 1, 4: 2, 5: 3, 6: 3}),
        # of a run that goes on at its end, or anew
        ([of_start(2, (7, 8))], {step: 1 for step in range(1, 7)} | {7: 2, 8: 2}),
        ([{0: TESTED, **of_start(2, (1,))}], {1: 2}),
        # of starts that have trained no step
        ([{}], {step: 1 for step in range(1, 7)}),
        ([{3: TESTED}, {}], {step: 1 for step in range(1, 7)}),
        ([{}, {3: TESTED}, of_start(3, (4,))], {1: 1, 2: 1, 3: 1, 4: 3}),
    ],
)
def test_steps_that_a_resume_gives_up_are_left_out(tmp_path, later, expected):
    write_metrics(tmp_path, GOT_TO_6, *later)
    metrics = read_metrics(tmp_path)
    assert training_rewards(metrics) == {"format": expected}
    assert set(metrics) - {0} == set(expected)


def test_the_validation_of_a_checkpoint_is_kept(tmp_path):
    """verl validates before a start's first step, at the step of the checkpoint."""
    write_metrics(tmp_path, {**GOT_TO_6, 5: {**GOT_TO_6[5], **TESTED}}, {3: TESTED, 4: {"a": 2.0}})
    metrics = read_metrics(tmp_path)
    assert metrics[3] == {"gdpo/format/mean": 1, **TESTED}
    assert validation_rewards(metrics) == {"format": {3: 0.9}}


def test_validation_of_several_sources_is_kept_apart():
    metrics = {0: {"val-aux/a/format/mean@1": 0.2, "val-aux/openai/gsm8k/format/mean@4": 0.4}}
    assert validation_rewards(metrics) == {
        "format (a)": {0: 0.2},
        "format (openai/gsm8k)": {0: 0.4},
    }


def test_training_on_several_sources_is_kept_apart():
    common = {"gdpo/format/mean": 0.3, "gdpo/format/mean_x/mean": 0.1}
    metrics = {
        1: {**common, "gdpo/format/mean/a": 0.2, "gdpo/correctness/mean/openai/gsm8k": 0.6},
        2: {**common, "gdpo/format/mean/a": 0.4},
    }
    assert training_rewards(metrics) == {
        "format (a)": {1: 0.2, 2: 0.4},
        "correctness (openai/gsm8k)": {1: 0.6},
    }
    # step 2 had no sample with this reward
    assert reward_table(metrics)[1][1:3] == ("0.600", "0.600 (step 1)")


OF_TOOLS = {
    "gdpo/rollout/generated_tokens/mean": 90.0,
    "gdpo/rollout/tool_seconds/mean": 3.0,
    "gdpo/rollout/tool_seconds/max": 7.0,
}


def test_what_tools_take_is_no_reward():
    one = {1: {"gdpo/format/mean": 0.3, **OF_TOOLS}}
    assert training_rewards(one) == {"format": {1: 0.3}}
    several = {1: {"gdpo/format/mean/a": 0.2, "gdpo/format/mean/b/mean/c": 0.4, **one[1]}}
    assert training_rewards(several) == {"format (a)": {1: 0.2}, "format (b/mean/c)": {1: 0.4}}
    without_rewards = {1: {"critic/score/mean": 0.5, **OF_TOOLS}}
    assert training_rewards(without_rewards) == {"score": {1: 0.5}}


def test_table():
    assert reward_table(METRICS) == [
        ("format", "0.250", "0.500", "0.200", "0.750"),
        ("correctness", "-2.000", "-1.000", "-", "-"),
    ]
    lines = render(HEADER, reward_table(METRICS)).splitlines()
    assert " ".join(lines[0].split()) == "reward first step last step validation before after"
    assert len({len(line) for line in lines}) == 1


def test_a_reward_of_any_size_is_told_from_0():
    """A penalty for each token is small, and a sum of squares may be as large as a float can be."""
    metrics = {
        1: {"gdpo/each_token/mean": -0.0000271, "gdpo/squares/mean": 1e308},
        2: {"gdpo/each_token/mean": -0.0014, "gdpo/squares/mean": -0.0},
    }
    assert reward_table(metrics) == [
        ("each_token", "-2.71e-05", "-0.0014", "-", "-"),
        ("squares", "1e+308", "0.000", "-", "-"),
    ]


def test_what_has_been_read_is_not_read_again(tmp_path, monkeypatch):
    write_metrics(tmp_path, {step: {"a": 1.0} for step in range(5000)})
    parsed = []
    real_loads = json.loads
    monkeypatch.setattr(run_folder.json, "loads", lambda text: parsed.append(1) or real_loads(text))
    reader = MetricsReader(tmp_path)
    assert len(list(reader.new())) == len(parsed) == 5000
    assert list(reader.new()) == []
    assert len(parsed) == 5000
    with open(tmp_path / "metrics" / "1.jsonl", "a") as file:
        file.write(step_line(5000, a=2.0)[:-5])
        file.flush()
        assert list(reader.new()) == []
        file.write(step_line(5000, a=2.0)[-5:])
    (tmp_path / "metrics" / "2.jsonl").write_text(step_line(1, a=3.0))
    assert list(reader.new()) == [(5000, {"a": 2.0}), (1, {"a": 3.0})]
    assert len(parsed) == 5002


BAD_LINES = ["{\n", "[]\n", "1\n", '{"step": 1}\n', '{"step": "a", "data": {}}\n', "\xff\n"]


def test_lines_that_cannot_be_read_are_left_out_and_named(tmp_path, capsys):
    write_metrics(tmp_path, {1: {"a": 1.0, "b": "text", "c": [1], "d": None, "e": True}})
    (tmp_path / "metrics" / "notes.jsonl").write_text("mine")
    (tmp_path / "metrics" / "7.jsonl").mkdir()
    (tmp_path / "metrics" / "\u00b2.jsonl").write_text("a digit that is no number")
    with open(tmp_path / "metrics" / "1.jsonl", "a", encoding="latin-1") as file:
        file.write("".join(BAD_LINES) + step_line(2, a=2.0))
    metrics = read_metrics(tmp_path)
    assert list(metrics) == [1, 2]
    assert metrics[1]["a"] == 1.0
    assert [name for name, value in metrics[1].items() if value != value] == ["b", "c", "d"]
    [error] = capsys.readouterr().err.splitlines()
    assert f"{len(BAD_LINES)} lines of" in error and "1.jsonl, line 2 left out" in error


def test_every_start_gets_a_metrics_file_of_its_own(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "2.jsonl").write_text("of the second start; the first one's is gone")
    (tmp_path / "metrics" / "notes.jsonl").write_text("mine")
    (tmp_path / "metrics" / "3.jsonl").mkdir()
    names = [claim_metrics_file(tmp_path).name for _ in range(2)]
    assert names == ["4.jsonl", "5.jsonl"]
    assert (tmp_path / "metrics" / "2.jsonl").read_text().startswith("of the second")


def test_a_file_that_became_shorter_is_read_from_its_beginning(tmp_path):
    """verl's file logger empties its file where a second training gets the same one."""
    write_metrics(tmp_path, {1: METRICS[1], 2: METRICS[2]})
    reader = MetricsReader(tmp_path)
    assert [step for step, _ in reader.new()] == [1, 2]
    (tmp_path / "metrics" / "1.jsonl").write_text(step_line(1, a=0.5))
    assert list(reader.new()) == [(1, {"a": 0.5})]
    assert not reader.problems


def test_two_starts_at_one_moment_do_not_share_a_metrics_file(tmp_path, monkeypatch):
    # both look at the folder before either has made its file
    monkeypatch.setattr(run_folder, "_metrics_files", lambda folder: [])
    assert claim_metrics_file(tmp_path) != claim_metrics_file(tmp_path)


LOGGER_VARIABLES = (
    *("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR", "WANDB_DIR"),
)


@pytest.fixture
def no_logger_variables(monkeypatch):
    for name in (*LOGGER_VARIABLES, "VERL_GDPO_METRICS"):
        monkeypatch.setenv(name, "")  # so that it is as before once the test has ended
        monkeypatch.delenv(name)


def training(run_dir, *loggers):
    keys = {"logger": list(loggers)}
    return OmegaConf.create({"recipes": "verl-gdpo", "run_dir": run_dir, "trainer": keys})


def test_verls_loggers_write_into_run_dir(tmp_path, monkeypatch, no_logger_variables):
    monkeypatch.chdir(tmp_path)
    loggers = ("file", "tensorboard")
    write_into_run_dir(training("runs/by_hand", *loggers))
    tracking = Tracking("verl-gdpo", "tool_rl", list(loggers), config={})
    tracking.log(data={"a": 1.0}, step=1)
    tracking.finish()
    assert read_metrics(tmp_path / "runs" / "by_hand") == {1: {"a": 1.0}}
    assert list((tmp_path / "runs" / "by_hand" / "tensorboard").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("name", LOGGER_VARIABLES)
def test_what_the_environment_says_of_loggers_holds(
    tmp_path, monkeypatch, no_logger_variables, name
):
    monkeypatch.setenv(name, "elsewhere")
    write_into_run_dir(training(str(tmp_path), "file"))
    assert os.environ[name] == "elsewhere"
    if name == "VERL_FILE_LOGGER_ROOT":
        assert "VERL_FILE_LOGGER_PATH" not in os.environ


def test_a_configuration_without_run_dir_is_left_alone(no_logger_variables):
    write_into_run_dir(OmegaConf.create({"trainer": {"logger": ["file"]}}))
    for run_dir in ({"root": "x"}, "runs/x"):  # of a script of somebody else
        trainer = {"logger": ["file"], "hang_minutes": 0}  # as docs/failures.md says
        write_into_run_dir(OmegaConf.create({"run_dir": run_dir, "trainer": trainer}))
    assert not {*LOGGER_VARIABLES} & os.environ.keys()


def test_a_run_by_hand_of_our_recipe_leaves_its_metrics_in_run_dir(tmp_path, no_logger_variables):
    environments = []

    def run_ppo(config, **_):
        environments.append(config.ray_kwargs.ray_init.runtime_env.env_vars)

    config = compose_config(REPO / "recipes", "train", [f"run_dir={tmp_path}/run"])
    run_with_plugins(run_ppo, config)
    file = f"{tmp_path}/run/metrics/1.jsonl"
    assert os.environ["VERL_FILE_LOGGER_PATH"] == file
    assert environments[0]["VERL_FILE_LOGGER_PATH"] == file


# a training of plain verl, which nobody records, and one with gdpo
TRAINED = {
    "plain": ["algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive"],
    "gdpo": [],
}


@pytest.mark.parametrize("second", TRAINED)
def test_a_second_training_of_one_command_gets_a_metrics_file_of_its_own(
    tmp_path, monkeypatch, no_logger_variables, second
):
    """`verl-gdpo run -- bash my_script.sh` gives all trainings of the script the same variables."""
    given = Path(name_metrics_file(tmp_path / "run")["VERL_FILE_LOGGER_PATH"])
    settings = ["trainer.logger=[file]", f"trainer.default_local_dir={tmp_path}/saved"]
    files = []

    def run_ppo(config, task_runner_class=None):
        files.append(Path(os.environ["VERL_FILE_LOGGER_PATH"]))
        files[-1].write_bytes(b"{}")

    for kind in ("gdpo", second):
        # Each training is a process of its own.
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(given))
        monkeypatch.setenv("VERL_GDPO_METRICS", str(given))
        run_with_plugins(run_ppo, verl_config(*settings, *TRAINED[kind]))
    assert files == [given, given.with_name("2.jsonl")]
    recorded = [one.start.metrics for one in starts_of(tmp_path / "saved")]
    assert recorded == [str(file) for file in (files if second == "gdpo" else files[:1])]


def test_a_second_training_on_the_same_ray_says_that_it_empties_the_file(
    tmp_path, monkeypatch, no_logger_variables, capsys
):
    """Ray's processes have the variables of its own start."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    os.environ.update(name_metrics_file(tmp_path))
    file = tmp_path / "metrics" / "1.jsonl"
    places = ["trainer.logger=[file]", f"trainer.default_local_dir={tmp_path}/saved"]
    for content, warnings in ((b"", 0), (b"{}", 1)):
        file.write_bytes(content)
        run_with_plugins(lambda config, task_runner_class=None: None, verl_config(*places))
        assert capsys.readouterr().err.count(f"{file} has the metrics of an earlier") == warnings
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(file)


def test_a_metrics_file_that_the_user_has_named_is_kept(tmp_path, monkeypatch, no_logger_variables):
    """Also one of the script's own, within the launcher: verl empties it, as without ours."""
    os.environ.update(name_metrics_file(tmp_path))
    (tmp_path / "metrics" / "1.jsonl").write_text("of the first")
    mine = tmp_path / "mine.jsonl"
    mine.write_text("of the first")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(mine))
    keep_earlier_metrics()
    assert os.environ["VERL_FILE_LOGGER_PATH"] == str(mine)
    assert os.listdir(tmp_path / "metrics") == ["1.jsonl"]


def test_hydra_writes_into_run_dir():
    with initialize_config_dir(str(REPO / "recipes"), version_base=None):
        verls = "hydra.searchpath=[pkg://verl.trainer.config]"
        config = compose("train", [verls, "run_dir='a=b'"], return_hydra_config=True)
    # a folder for each start: Hydra overwrites what it finds there
    assert re.fullmatch(r"a=b/hydra/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", config.hydra.run.dir)


def summary(run, **streams):
    command = [sys.executable, "-m", "verl_gdpo", "summary", str(run)]
    streams = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, text=True, **streams)


def test_summary_of_a_run(tmp_path):
    write_metrics(tmp_path, METRICS)
    for name in ("global_step_2", "global_step_3_half_written", "global_step_5_old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    done = summary(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "correctness" in done.stdout
    assert re.search(r"^checkpoint +\S+/global_step_2$", done.stdout, re.M)
    assert f"curves         verl-gdpo report {tmp_path}\n" in done.stdout


@pytest.mark.parametrize("show", [as_json, as_text])
def test_metrics_that_cannot_be_read_are_said_in_one_line(tmp_path, monkeypatch, capsys, show):
    """As those of another user; root may read all."""
    refused = PermissionError(13, "Permission denied", "metrics.jsonl")
    monkeypatch.setattr("verl_gdpo.tools.summary.read_logged", Mock(side_effect=refused))
    assert show(str(tmp_path)) == 1
    expected = "verl-gdpo summary: [Errno 13] Permission denied: 'metrics.jsonl'\n"
    assert capsys.readouterr().err == expected


def test_the_summary_of_a_run_that_left_a_collapse_behind(tmp_path):
    """It collapsed at step 60, and goes on from the checkpoint at 50, up to 75 until now."""
    healthy = {"gdpo/correct/mean": 0.7, "gdpo/correct/min": 0.0, "gdpo/correct/max": 1.0}
    collapsed = {**healthy, "gdpo/correct/mean": 0.01}
    first = {step: healthy if step < 60 else collapsed for step in range(1, 101)}
    write_metrics(tmp_path, first)
    assert "correct is 0.01, and was 0.7" in summary(tmp_path).stdout
    (tmp_path / "metrics" / "2.jsonl").write_text(
        "".join(step_line(step, **healthy) for step in range(51, 76))
    )
    done = summary(tmp_path)
    assert done.returncode == 0 and "FINDING" not in done.stdout
    assert re.search(r"^correct +0.700 +0.700 ", done.stdout, re.M)


def test_the_command_in_a_summary_can_be_pasted(tmp_path):
    run = tmp_path / "a b" / "run 1"
    run.mkdir(parents=True)
    write_metrics(run, METRICS)
    (line,) = [line for line in summary(run).stdout.splitlines() if line.startswith("curves")]
    assert shlex.split(line) == ["curves", "verl-gdpo", "report", str(run)]


def test_a_summary_without_metrics(tmp_path):
    """Of a folder of something else, and of a run without verl's file logger."""
    done = summary(tmp_path)
    assert done.returncode == 1 and "expected the folder of a run" in done.stderr
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "1.jsonl").touch()
    (tmp_path / "train.log").touch()
    (tmp_path / "rollouts").mkdir()
    done = summary(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no metrics in it; expected the folder of a run" in done.stderr
    assert re.search(r"^log +\S+/train.log$", done.stdout, re.M)
    assert re.search(r"^rollouts +\S+/rollouts$", done.stdout, re.M)


def test_summary_for_a_reader_that_has_gone(tmp_path):
    write_metrics(tmp_path, METRICS)
    read, write = os.pipe()
    os.close(read)
    done = summary(tmp_path, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141
