"""What the launcher prints while a run goes on, and why it ended."""

import os
import resource
import signal
import subprocess

import pytest
from launched import driver, errors_of, logging_driver, start, step_line, with_steps

from verl_gdpo.tools.run.console import Progress, end_report
from verl_gdpo.tools.run.end_conditions import RunEnd
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.launch import launch
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
    monkeypatch.setattr("verl_gdpo.tools.run.console.ALIVE_SECONDS", -1.0)
    progress = Progress(HeldFolder(tmp_path), quiet=False)
    progress.show()
    with_steps(tmp_path, 1, saved=1)
    progress.show()
    lines = [text.split("] ")[1] for text in capsys.readouterr().out.splitlines()]
    assert lines[0] == "starting Ray, the policy and its servers ..."
    assert lines[-1] == "running ..."


def test_time_left(tmp_path, capsys, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("verl_gdpo.tools.run.console.time.monotonic", lambda: now)
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
    lines = [first, "{\n", step_line(2, **{"gdpo/format/mean": 0.75})]
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


def test_why_a_run_failed(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(worker) ValueError: inner\nTraceback:\n  x\nray.exceptions.RayTaskError(ValueError): a\n"
        "verl_gdpo.algorithm.values.RewardError: reward 'a' is nan\n\nSet HYDRA_FULL_ERROR=1\n"
    )
    with HeldFolder(tmp_path) as held, log.open("rb") as file:
        report = end_report(held, RunEnd(1, "failed"), file)
    assert report[0] == "verl_gdpo.algorithm.values.RewardError: reward 'a' is nan"
    assert str(log) in report[1]


def reported(folder, text):
    """What is said of a failed run with this log."""
    (folder / "train.log").write_text(text)
    with HeldFolder(folder) as held, (folder / "train.log").open("rb") as log:
        return end_report(held, RunEnd(1, "failed"), log)


OF_A_DEAD_ACTOR = """\
{before}ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: WorkerDict
\tpid: 10808
The actor is dead because its worker process has died. {detail}

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""
CRASHED = "\x1b[36m(WorkerDict pid=10808)\x1b[0m *** SIGSEGV received at time=1 on cpu 1 ***\n"


@pytest.mark.parametrize(
    ("before", "detail", "said"),
    [
        ("", "A connection error code 2. End of file.", "Process 10808 logged no signal, as after"),
        (CRASHED, "A connection error code 2. End of file.", "Process 10808 crashed with SIGSEGV"),
        ("", "The process receives a SIGTERM.", None),
    ],
)
def test_the_whole_message_of_a_dead_actor_and_its_signal(tmp_path, before, detail, said):
    lines = reported(tmp_path, OF_A_DEAD_ACTOR.format(before=before, detail=detail))
    message, rest = lines[:4], lines[4:-1]
    assert message[0].startswith("ray.exceptions.ActorDiedError: ")
    assert message[2] == r"\tpid: 10808" and message[3].endswith(detail)
    assert [line.startswith(said) for line in rest] == ([True] if said else [])


def test_a_dead_gcs_is_named_and_no_raw_line_is_shown(tmp_path):
    text = (
        "\x1b[36m(TaskRunner pid=1)\x1b[0m step:1 - a:1\n"
        "[2026-11-28 08:42:12,765 E 11589 11865] rpc_client.h:204: Failed to connect to GCS within "
        "60 seconds. GCS may have been killed.\n"
    )
    first, *others = reported(tmp_path, text)
    assert first.startswith("Ray's central process, gcs_server, died. A start with trainer.resume_")
    assert first.endswith("60 seconds. GCS may have been killed.")
    assert others == [f"(whole log: {tmp_path / 'train.log'})"]


def test_a_log_without_a_reason_is_shown_without_colours_and_in_short_lines(tmp_path):
    log = f"\x1b[36m(W pid=1)\x1b[0m {'x' * 5000}\n" * 40
    first, *shown, _ = reported(tmp_path, log)
    assert first == "exit code 1, and the log has no error. Its last lines:"
    assert len(shown) == 25
    assert {len(line) for line in shown} == {300}
    assert shown[0].startswith("(W pid=1) x")


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_home_that_ray_could_not_write(tmp_path, monkeypatch, is_ours):
    monkeypatch.setattr(
        "verl_gdpo.tools.run.ray_folders.unwritable", lambda _: {"/.ray": "Set HOME"}
    )
    folder = "/.ray" if is_ours else "/else"
    lines = reported(tmp_path, f"PermissionError: [Errno 13] Permission denied: '{folder}'\n")
    assert lines[1:-1] == (["Set HOME"] if is_ours else [])


def test_why_a_run_failed_is_of_this_start_and_no_command_to_the_terminal(tmp_path):
    (tmp_path / "train.log").write_text("ValueError: of an earlier start\n")
    body = r"print('\x1b[2J gone'); sys.exit(1)"
    _, errors = errors_of(tmp_path, body)
    assert errors.splitlines()[1:] == [r"\x1b[2J gone", f"(whole log: {tmp_path / 'train.log'})"]


def test_a_disk_that_is_full(tmp_path):
    """RLIMIT_FSIZE stands for it: as on a full disk a write raises OSError, in the log too."""

    def no_file_above_64_kb():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    body = "[print('x' * 1000, flush=True) for _ in range(100)]"
    exit_code, errors = errors_of(tmp_path, body, preexec_fn=no_file_above_64_kb)
    # Python 3.11.2 ends with 120, as it cannot write the rest of its output either.
    assert exit_code in (1, 120)
    assert f"{tmp_path} cannot be written: [Errno 27]" in errors.splitlines()[0]
