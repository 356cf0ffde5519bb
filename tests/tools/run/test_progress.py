"""What the launcher prints while a run goes on."""

import os
import subprocess

from launched import driver, logging_driver, start, step_line, with_steps

from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.launch import launch
from verl_gdpo.tools.run.progress import Progress
from verl_gdpo.tools.run_folder import folder as run_folder
from verl_gdpo.tools.run_folder.findings import findings
from verl_gdpo.tools.run_folder.folder import read_metrics


def test_progress_lines(tmp_path, capsys):
    line = step_line(1, **{"gdpo/format/mean": 0.5, "gdpo/format/std": 0.1, "actor/lr": 1e-6})
    more = {"actor/kl_loss": 0.00123, "response_length/mean": 27.4, "timing_s/step": 9.87}
    validation = {"val-aux/x/format/mean@1": 0.25}
    lines = [line, step_line(2, **more, **validation, **{"gdpo/format/mean": 0.6})]
    launch(logging_driver(tmp_path, step_line(0, **validation), *lines), tmp_path)
    shown = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert shown == [
        "step    0  validation  format 0.250",
        "step    1  format 0.500",
        "step    2  format 0.600  KL 0.0012  27 tokens  9.9 s",
        "step    2  validation  format 0.250",
    ]


def test_a_small_reward_is_not_shown_as_0(tmp_path, capsys):
    line = step_line(1, **{"gdpo/each_token/mean": -0.0000271})
    launch(logging_driver(tmp_path, line), tmp_path)
    assert capsys.readouterr().out.splitlines()[0].endswith("step    1  each_token -2.71e-05")


def test_steps_of_the_console_are_shown_where_no_file_logger_writes(tmp_path, capsys):
    """As of a script of one's own, whose `trainer.logger` has the console alone."""
    lines = "Total training steps: 2\\nstep:1 - gdpo/format/mean:0.5\\n"
    body = f"print('{lines}', flush=True); time.sleep(.5); print('step:2 - gdpo/format/mean:0.6')"
    launch(driver(tmp_path, body), tmp_path)
    shown = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert shown == ["step    1  format 0.500", "step    2  format 0.600"]


def test_the_file_logger_is_believed_and_not_the_console_too(tmp_path, capsys):
    line = step_line(1, **{"gdpo/format/mean": 0.5})
    body = (
        "print('step:1 - gdpo/format/mean:0.7', flush=True); time.sleep(.05); "
        f"open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({line!r}); time.sleep(.5)"
    )
    launch(driver(tmp_path, body), tmp_path)
    shown = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert shown == ["step    1  format 0.500"]


def test_a_sign_of_life_says_whether_a_step_was_logged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("verl_gdpo.tools.run.progress.ALIVE_SECONDS", -1.0)
    progress = Progress(HeldFolder(tmp_path), quiet=False)
    progress.show()
    with_steps(tmp_path, 1, saved=1)
    progress.show()
    lines = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert lines[0] == "starting Ray, the policy and its servers ..."
    assert lines[-1] == "running ..."


def test_time_left(tmp_path, capsys, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("verl_gdpo.tools.run.progress.time.monotonic", lambda: now)
    (tmp_path / "train.log").write_text("Total training steps: 7\n")  # of an earlier start
    (tmp_path / "metrics").mkdir()
    progress = Progress(HeldFolder(tmp_path), quiet=False)
    with (tmp_path / "train.log").open("a") as log:
        log.write("(TaskRunnerV1 pid=1) INFO:Total training steps: 2000\n")
    for step in (0, 1, 4, 1990, 2000):
        now = 1000.0 + 10 * step
        with (tmp_path / "metrics" / "1.jsonl").open("a") as metrics:
            metrics.write(step_line(step, **{"gdpo/format/mean": 0.5, "gdpo/format/std": 0.1}))
        progress.show()
    ends = [line.split("0.500")[1] for line in capsys.readouterr().out.splitlines()]
    left = ["", "5 h 33 min", "5 h 33 min", "2 min", ""]
    assert ends == [text and f"  {text} left of 2000 steps" for text in left]


LOST_OR_REPEATED = {1: (332, 333, 334, 335), 2: (331,)}


def log_steps(run, start, steps, progress):
    (run / "metrics").mkdir(exist_ok=True)
    with (run / "metrics" / f"{start}.jsonl").open("a") as file:
        for step in steps:
            values = {f"perf/{name}": 1.0 for name in range(50)}
            values["response_length/clip_ratio"] = 0.9 if 100 < step < 120 else 0.0
            # above the level of the first steps, which only the first start has
            values["actor/grad_norm"] = 0.3 if step < 550 else 30.0
            values["actor/pg_clipfrac"] = 0.9 if start == 1 and 310 < step < 340 else 0.01
            # at the last four steps that are lost, and at the one before them when repeated
            broken = step in LOST_OR_REPEATED[start]
            values["response/aborted_ratio"] = 0.9 if broken else 0.0
            file.write(step_line(step, **values))
            if step % 5 == 0 or step == 331:
                file.flush()
                progress.show()


def test_the_log_finds_what_the_summary_finds(tmp_path, capsys):
    """600 steps; the first start got to 335, and the second goes on after the checkpoint at 300."""
    log_steps(tmp_path, 1, range(1, 336), Progress(HeldFolder(tmp_path), quiet=False))
    resumed = Progress(HeldFolder(tmp_path), quiet=False)
    first = [line for line in capsys.readouterr().out.splitlines() if "FINDING" in line]
    log_steps(tmp_path, 2, range(301, 601), resumed)
    second = [line for line in capsys.readouterr().out.splitlines() if "FINDING" in line]
    assert ["90% of the responses" in line for line in first] == [True, False]  # and clipped tokens
    (gradient,) = second  # what the first start has said is not said again
    assert "the gradient norm is 30; at the start it was 0.3" in gradient
    in_all = findings(read_metrics(tmp_path))
    assert resumed.tracker.findings() == in_all
    topics = [(one.topic, one.is_over) for one in in_all]
    assert topics == [("gradient", False), ("length limit", True)]
    assert resumed.earlier == {}


def test_a_resume_reads_each_line_of_the_run_once(tmp_path, monkeypatch):
    log_steps(tmp_path, 1, range(1, 41), Progress(HeldFolder(tmp_path), quiet=True))
    read, step_of = [], run_folder._step_of
    monkeypatch.setattr(run_folder, "_step_of", lambda line: read.append(line) or step_of(line))
    resumed = Progress(HeldFolder(tmp_path), quiet=False)
    log_steps(tmp_path, 2, range(31, 61), resumed)
    assert len(read) == 40 + 30


def test_a_resumed_run_shows_its_own_steps_alone(tmp_path, capsys):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "1.jsonl").write_text(step_line(3) + step_line(4))
    launch(logging_driver(tmp_path, step_line(4), step_line(5)), tmp_path)
    shown = capsys.readouterr().out
    assert [step for step in range(7) if f"step    {step}  " in shown] == [4, 5]


def test_no_line_of_metrics_ends_a_run(tmp_path, capsys):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "notes.jsonl").write_text("mine\n")
    first = step_line(1, **{"gdpo/format/mean": 0.5, "comment": "a string"})
    broken = ["{\n", '{"step": 1e999, "data": {}}\n', "[" * 100_000 + "\n"]
    last = step_line(2, **{"gdpo/format/mean": 0.75, "count": 10**400})
    lines = [first, *broken, last]
    assert launch(logging_driver(tmp_path, *lines), tmp_path).exit_code == 0
    assert (tmp_path / "ended").exists()
    shown = capsys.readouterr().out
    assert "step    1  format 0.500" in shown and "step    2  format 0.750" in shown
    assert "1.jsonl, line 2 left out" in shown


def test_no_mishap_of_the_display_ends_a_run(tmp_path, capsys, monkeypatch):
    def fail(metrics):
        raise RuntimeError("a bug")

    monkeypatch.setattr("verl_gdpo.tools.run_folder.folder.training_rewards", fail)
    assert launch(logging_driver(tmp_path, step_line(1), step_line(2)), tmp_path).exit_code == 0
    assert (tmp_path / "ended").exists()
    shown = capsys.readouterr().out
    assert shown.count("no progress is shown from here on: RuntimeError('a bug')") == 1


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = logging_driver(tmp_path, step_line(1))
    process = start(tmp_path, command=command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 0
    assert (tmp_path / "ended").exists()
