"""The metrics of a run in each tracker, as `report` and `summary` find them."""

import json
import math
import re
import types

import plain_verl_archive
import pytest
import wandb
from torch.utils.tensorboard import SummaryWriter
from verl.utils.logger.aggregate_logger import concat_dict_to_str
from verl.utils.tracking import Tracking

from verl_gdpo.tools.run_folder.folder import training_rewards, validation_rewards
from verl_gdpo.tools.run_folder.tracker_logs import read_logged

STEPS = {
    0: {"val-core/math/reward/mean@1": 0.25, "val-aux/math/short/mean@1": 1.0},
    1: {"critic/score/mean": 0.5, "actor/grad_norm": math.nan},
    2: {"critic/score/mean": 0.75, "response_length/mean": 7.0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of verl that knows nothing of verl-gdpo."""
    return plain_verl_archive.unpack(tmp_path_factory.mktemp("plain"))


def log(backend):
    """Through verl's own Tracking, as a trainer does."""
    config = {"trainer": {"nnodes": 3}, "algorithm": {}}
    tracking = Tracking("project", "run", [backend], config=config)
    for step, metrics in STEPS.items():
        tracking.log(data=metrics, step=step)
    tracking.finish()


def same(found, expected):
    """NaN equals NaN."""
    return found.keys() == expected.keys() and all(
        found[step] == pytest.approx(expected[step], nan_ok=True) for step in expected
    )


@pytest.mark.parametrize(
    ("variable", "value", "sources"),
    [
        (None, "", ["project/run.jsonl", "project"]),
        ("VERL_FILE_LOGGER_ROOT", "root", ["root/project/run.jsonl", "root/project"]),
        ("VERL_FILE_LOGGER_PATH", "metrics.log", ["metrics.log"]),
    ],
)
def test_verls_file_logger(tmp_path, monkeypatch, variable, value, sources):
    """By default it writes PROJECT/EXPERIMENT.jsonl into the current folder, or into a root."""
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    log("file")
    for source in sources:
        logged = read_logged(str(tmp_path / source))
        assert same(logged.metrics, STEPS) and logged.name in ("run", "project", "metrics")


def console_lines():
    text = "".join(f"{concat_dict_to_str(STEPS[step], step)}\n" for step in STEPS)
    return f"starting\n{text}"


def log_to_wandb_folder(folder):
    """As W&B keeps what the process prints, and a link to the latest run."""
    run = folder / "wandb" / "offline-run-1" / "files"
    run.mkdir(parents=True)
    (run / "output.log").write_text(console_lines())
    (folder / "wandb" / "latest-run").symlink_to("offline-run-1")


@pytest.mark.parametrize("place", ["train.log", "nohup.out", "wandb"])
def test_what_a_script_printed(tmp_path, place):
    """verl's console logger, which is on by default, is enough."""
    if place == "wandb":
        log_to_wandb_folder(tmp_path)
    else:
        (tmp_path / place).write_text(console_lines())
        assert same(read_logged(str(tmp_path / place)).metrics, STEPS)
    (tmp_path / "notes.log").write_text("no step here\n")
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n')
    logged = read_logged(str(tmp_path))
    assert logged.kind == "console" and same(logged.metrics, STEPS)


@pytest.mark.parametrize("backend", ["file", "tensorboard"])
def test_the_folder_in_which_a_script_started(tmp_path, monkeypatch, backend):
    """It holds PROJECT/EXPERIMENT.jsonl and tensorboard_log/PROJECT/EXPERIMENT."""
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    log(backend)
    (tmp_path / "train.log").write_text("step:1 - a:1.0\n")
    logged = read_logged(str(tmp_path))
    assert logged.kind == ("file logger" if backend == "file" else "tensorboard")
    assert logged.metrics[2]["critic/score/mean"] == 0.75
    assert "a" not in logged.metrics[1]


def test_of_several_runs_one_has_to_be_named(tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(console_lines())
    message = f"{tmp_path}: holds several runs; name one of them: {tmp_path}/a.log, {tmp_path}/b"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_logged(str(tmp_path))
    for number in range(9):
        (tmp_path / f"c{number}.log").write_text(console_lines())
    with pytest.raises(ValueError, match="and 6 more"):
        read_logged(str(tmp_path))


def test_tensorboard_keeps_every_step(tmp_path):
    """Its reader keeps a sample of 10,000 values, unless it is told otherwise."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(10_050):
            writer.add_scalar("critic/score/mean", step, step)
    metrics = read_logged(str(tmp_path)).metrics
    assert training_rewards(metrics)["score"] == {step: step for step in range(10_050)}


def test_a_later_start_wins_in_tensorboard(tmp_path):
    for number, first in ((1, 1), (2, 3)):  # the second start repeats step 3
        with SummaryWriter(str(tmp_path), filename_suffix=f".{number}") as writer:
            for step in range(first, first + 3):
                writer.add_scalar("a", 10 * number + step, step)
    files = sorted(tmp_path.iterdir(), key=lambda path: path.name[-1])
    for number, file in enumerate(files):  # both were made in one second
        file.rename(tmp_path / f"events.out.tfevents.{number}")
    metrics = read_logged(str(tmp_path)).metrics
    assert {step: row["a"] for step, row in metrics.items()} == {1: 11, 2: 12, 3: 23, 4: 24, 5: 25}


def test_steps_that_a_resume_gives_up_are_in_no_tracker(tmp_path):
    """The first start got to step 6; the second one validates at 3, and got to 4."""
    starts = (range(1, 7), range(4, 5))
    for number, steps in enumerate(starts, 1):
        with SummaryWriter(str(tmp_path / "events"), filename_suffix=f".{number}") as writer:
            for step in steps:
                writer.add_scalar("a", number, step)
                writer.add_scalar("b", number, step)
            if number == 2:
                writer.add_scalar("val-aux/x/a/mean@1", 0.5, 3)
    for file in (tmp_path / "events").iterdir():  # both were made in one second
        file.rename(file.with_name(f"events.out.tfevents.{file.suffix[1:]}"))
    lines = [f"step:{step} - a:1.0 - b:1.0\n" for step in starts[0]]
    lines += ["step:3 - val-aux/x/a/mean@1:0.5\n", "step:4 - a:2.0 - b:2.0\n"]
    (tmp_path / "train.log").write_text("".join(lines))
    both = {step: {"a": 1.0, "b": 1.0} for step in (1, 2, 3)}
    both[3]["val-aux/x/a/mean@1"] = 0.5
    expected = {**both, 4: {"a": 2.0, "b": 2.0}}
    assert read_logged(str(tmp_path / "train.log")).metrics == expected
    assert read_logged(str(tmp_path / "events")).metrics == expected


class Server:
    """W&B's public API, as its reference documents it; no test can ask the real one."""

    def __init__(self, rows, error=None):
        self.rows, self.error, self.asked = rows, error, []

    def Api(self):
        return self

    def run(self, path):
        self.asked.append(path)
        if self.error:
            raise self.error
        config = {"trainer": {"experiment_name": "run"}, "algorithm": {}}
        return types.SimpleNamespace(
            name="sunny-sea-7", id="a1b2", config=config, scan_history=lambda: iter(self.rows)
        )


def test_wandbs_server(monkeypatch):
    rows = [{"_step": step, "_runtime": 1.5, "critic/score/mean": step} for step in range(1, 600)]
    rows[3] |= {"critic/score/mean": "NaN", "val/generations": {"_type": "table-file"}, "x": None}
    server = Server(rows)
    monkeypatch.setattr(wandb, "Api", server.Api)
    logged = read_logged("wandb:lab/project/a1b2")
    assert server.asked == ["lab/project/a1b2"]
    assert (logged.name, logged.config.trainer.experiment_name) == ("sunny-sea-7", "run")
    expected = {step: {"critic/score/mean": step} for step in range(1, 600)}
    assert same(logged.metrics, expected | {4: {"critic/score/mean": math.nan}})


def test_wandbs_server_refuses(monkeypatch):
    error = wandb.errors.CommError("Could not find run <Run lab/project/x>\n(not found)")
    monkeypatch.setattr(wandb, "Api", Server([], error).Api)
    with pytest.raises(ValueError, match=r"(?s)Could not find run .*\(not found\).*wandb login"):
        read_logged("wandb:lab/project/x")


def test_folders_that_are_refused(tmp_path, plain):
    for folder, message in (
        (tmp_path / "nowhere", "no such file or folder; expected the folder of a run"),
        (tmp_path, "no metrics in it; expected the folder of a run"),
        (plain / plain_verl_archive.DUMPS, "no metrics in it"),
        (plain / plain_verl_archive.DUMPS / "1.jsonl", r"no step in it \(file logger\)"),
    ):
        with pytest.raises(ValueError, match=message):
            read_logged(str(folder))
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"step": 1, "data": {"a": 1}}) + "\n")
    with pytest.raises(ValueError, match="holds several runs; name one"):
        read_logged(str(tmp_path))


def test_trackers_of_one_real_run_agree(plain):
    of_file = read_logged(str(plain / plain_verl_archive.METRICS)).metrics
    of_events = read_logged(str(plain / plain_verl_archive.TENSORBOARD)).metrics
    (file,) = (plain / plain_verl_archive.TENSORBOARD).iterdir()
    assert same(read_logged(str(file)).metrics, of_events)
    assert [*of_file] == [*of_events] == [*range(11)]
    for step, values in of_file.items():
        assert of_events[step] == pytest.approx(values, rel=1e-6)


def test_a_run_without_verl_gdpo_has_its_score(plain):
    metrics = read_logged(str(plain / plain_verl_archive.METRICS)).metrics
    ((name, curve),) = training_rewards(metrics).items()
    assert (name, min(curve), max(curve)) == ("score", 1, 10)
    assert curve[10] == pytest.approx(2.158, abs=1e-3)
    measured = validation_rewards(metrics)
    # the score is verl's `reward`, beside what the reward function returned by name
    assert [*measured] == ["score", "layout", "correct"]
    assert measured["score"] == pytest.approx({0: 0.0, 5: 1.95, 10: 1.8667}, abs=1e-4)
    # with verl-gdpo each reward has its name, and their sum is not one of them
    named = {step: {**row, "gdpo/layout/mean": 0.5} for step, row in metrics.items()}
    assert [*training_rewards(named)] == ["layout"]
    assert [*validation_rewards(named)] == ["layout", "correct"]
