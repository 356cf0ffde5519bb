"""What the launcher says of a run that ended before its last step."""

import resource
import signal

import pytest
from launched import errors_of, step_line, with_steps

from verl_gdpo.tools.run.end_reasons import end_report
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.stop_conditions import RunEnd


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


def reported(folder, text, exit_code=1):
    """What is said of a failed run with this log."""
    (folder / "train.log").write_text(text)
    with HeldFolder(folder) as held, (folder / "train.log").open("rb") as log:
        return end_report(held, RunEnd(exit_code, "failed"), log)


@pytest.mark.parametrize(
    ("number", "is_of_memory"),
    [(signal.SIGKILL, True), (signal.SIGBUS, True)]
    + [(number, False) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)],
)
def test_memory_is_blamed_for_signals_of_memory_alone(tmp_path, number, is_of_memory):
    said = reported(tmp_path, "", 128 + number)[0]
    assert said.startswith(f"the training process was ended by {number.name}")
    assert said.endswith(": the memory may have run out (see dmesg)") == is_of_memory


def test_a_stopped_resume_says_its_own_last_step(tmp_path):
    """An earlier start got further, to step 6."""
    with_steps(tmp_path, saved=3)
    (tmp_path / "checkpoints" / "global_step_3").mkdir()
    for number, steps in ((1, range(1, 7)), (2, range(4, 6))):
        lines = [step_line(step, a=1.0) for step in steps]
        (tmp_path / "metrics" / f"{number}.jsonl").write_text("".join(lines))
    (tmp_path / "train.log").touch()
    with HeldFolder(tmp_path) as held, (tmp_path / "train.log").open("rb") as log:
        (report,) = end_report(held, RunEnd(130, "stopped"), log, last_step=5)
    assert report.startswith("stopped at step 5; go on after global_step_3 with: ")


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
