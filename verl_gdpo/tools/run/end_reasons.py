"""Why a run ended before its last step, and how it goes on: what the launcher says at its end."""

import contextlib
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from verl_gdpo.terminal import GO_ON, printable
from verl_gdpo.tools.run import ray_folders
from verl_gdpo.tools.run.checkpoints import checkpoints_of, newest_checkpoint, step_of
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.stop_conditions import RunEnd
from verl_gdpo.tools.run_folder import folder

PROBE_BYTES = 1 << 20
LOG_BYTES = 1 << 20  # of the log's end, in which a failure's reason is searched
# What is shown of a log that says no reason: so many lines, of so many characters each.
LAST_LINES = 25
LAST_WIDTH = 300
MORE_LINES = 10  # of a message, after its first line
RAISED = re.compile(r"[\w.]*(Error|Exception)(\(\w+\))?: ")
# a line of Ray's own programs that is an error: severity, process and thread
OF_RAY = re.compile(r"\[[\d-]+ [\d:,]+ [ECF] \d+ \d+\] (\(\w+\) )?[\w.]+:\d+: +(?P<text>.*)")
# Linux sends the first where memory runs out, and the second where /dev/shm is full.
OF_MEMORY = (signal.SIGKILL, signal.SIGBUS)
NO_GCS = "Failed to connect to GCS"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PROCESS = re.compile(r"\bpid: (\d+)")  # of an actor that died, in what Ray says of it


def end_report(
    held: HeldFolder,
    end: RunEnd,
    log: IO[bytes],
    since: int = 0,
    last_step: int = 0,
    go_on: str | None = None,
    checkpoints: Path | None = None,
) -> list[str]:
    """Return why a run ended before its last step, and how it goes on if somebody stopped it.

    Of a run that finished, it tells alone that its folder is gone. It raises nothing, even where
    the folder or its disk is gone.

    Args:
        held: the folder of the run.
        log: `train.log`, open for reading. It is read also where it has been deleted.
        since: position in the log, in bytes, at which this start begins.
        last_step: the last step that was seen in the run's metrics.
        go_on: the command that goes on with it.
        checkpoints: the folder of its checkpoints, where it is not in the folder of the run.

    Returns:
        The lines, of which the first one says the reason.
    """
    loss = held.loss()
    lines = []
    if end.is_wanted:
        lines.append(_stopped(held, end, last_step, go_on, checkpoints))
    elif end.reason != "finished":
        lines += _why_it_failed(held, end, log, since, is_there=not loss)
        if not loss:
            lines.append(f"(whole log: {held.path / 'train.log'})")
    if loss:
        lines.append(loss)
    return lines


def _why_it_failed(
    held: HeldFolder, end: RunEnd, log: IO[bytes], since: int, *, is_there: bool
) -> list[str]:
    """Return what is known of a failure; see `end_report` for the arguments.

    Args:
        is_there: whether the folder is where it was, so that its disk can be tried.
    """
    if end.message:
        return [end.message]
    reasons = _signal(end.exit_code)
    if is_there:
        reasons += _full_disk(held.path)
    text = _end_of_log(log, since)
    return reasons + (_reason_in_log(text) or _without_reason(text, end.exit_code))


def _stopped(
    held: HeldFolder, end: RunEnd, last_step: int, go_on: str | None, checkpoints: Path | None
) -> str:
    """Return how a run goes on that somebody stopped; see `end_report` for the arguments."""
    places = [held.path]
    place = held.place()
    if place is not None and place != held.path:
        # verl may have written into both.
        places.append(place)
    step = last_step
    saved: list[Path] = []
    for run in places:
        with contextlib.suppress(OSError, ValueError):
            step = max(step, max(folder.read_metrics(run), default=step))
            newest = newest_checkpoint(checkpoints or checkpoints_of(run))
            if newest is not None:
                saved.append(newest)
    if not saved:
        if place is None:
            return f"{end.reason} at step {step}; no checkpoint is found"
        where = checkpoints or checkpoints_of(held.path)
        return f"{end.reason} at step {step}; {where} has no checkpoint yet"
    last = max(saved, key=lambda checkpoint: step_of(checkpoint.name))
    command = go_on or "the same command and trainer.resume_mode=auto"
    if place == held.path:
        return f"{end.reason} at step {step}; go on after {last.name} with: {command}"
    told = f"{end.reason} at step {step}; the last checkpoint is {last}. "
    if place is not None:
        told += f"Bring the parts of the run together: {_bring_together(held.path, place)}. "
    return f"{told}Go on with: {command}"


def _bring_together(old: Path, new: Path) -> str:
    """Return the command that moves a renamed run back under the name that verl knows.

    verl has written under the old name again, if it has saved anything since.
    """
    old_word = shlex.quote(str(old))
    new_word = shlex.quote(str(new))
    if not old.is_dir():
        return f"mv {new_word} {old_word}"
    return f"cp -a {old_word}/. {new_word} && rm -r {old_word} && mv {new_word} {old_word}"


def _end_of_log(log: IO[bytes], since: int) -> str:
    """Return the end of what this start has logged, without colours; "" if it cannot be read."""
    try:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(since, end - LOG_BYTES))
        text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return COLOUR.sub("", text)


def _reason_in_log(text: str) -> list[str]:
    """Return the message of the last error in the log; nothing if it has none."""
    lines = text.splitlines()
    for number in reversed(range(len(lines))):
        of_ray = OF_RAY.match(lines[number])
        if of_ray and NO_GCS in of_ray["text"]:
            says = printable(of_ray["text"])
            return [f"Ray's central process, gcs_server, died. {GO_ON}. Ray says: {says}"]
        if RAISED.match(lines[number]):
            message = list(_message(lines[number:]))
            reasons = message + _killed_by(text, "\n".join(message)) + _denied(message)
            return [printable(line) for line in reasons]
    return []


def _without_reason(text: str, exit_code: int) -> list[str]:
    """Return the last lines of a log that says no reason."""
    lines = [f"exit code {exit_code}, and the log has no error. Its last lines:"]
    for line in text.splitlines()[-LAST_LINES:]:
        lines.append(printable(line)[:LAST_WIDTH])
    return lines


def _message(lines: Sequence[str]) -> Iterator[str]:
    """Yield the first line, and those that go on with the same message."""
    yield lines[0]
    for line in lines[1 : 1 + MORE_LINES]:
        is_of_another = re.match(r"\(\w+ pid=\d+|Traceback |\[|$", line) or RAISED.match(line)
        if is_of_another or line.startswith("Set the environment variable HYDRA_FULL_ERROR"):
            return
        yield line


def _killed_by(log: str, message: str) -> list[str]:
    """Name the signal that ended the process of which Ray says that it died.

    Ray tells SIGTERM itself, and lets a process that crashes log its signal. Nothing can log
    SIGKILL.
    """
    process = PROCESS.search(message)
    if process is None or "SIGTERM" in message:
        return []
    process_id = process[1]
    crashed = re.search(rf"pid={process_id}\b.*\*\*\* (SIG\w+) received", log)
    if crashed:
        return [f"Process {process_id} crashed with {crashed[1]}: its stack is in the log"]
    if "End of file" in message:
        return [f"Process {process_id} logged no signal, as after SIGKILL"]
    return []


def _denied(message: Sequence[str]) -> list[str]:
    """Say what to set if Ray could not write into a folder of its own."""
    answers = []
    for folder_of_ray, what_to_do in ray_folders.unwritable(os.environ).items():
        if any("Permission denied" in line and folder_of_ray in line for line in message):
            answers.append(what_to_do)
    return answers


def _signal(exit_code: int) -> list[str]:
    """Return a line if a signal ended the run."""
    try:
        number = signal.Signals(exit_code - 128)
    except ValueError:
        return []
    ended = f"the training process was ended by {number.name}"
    if number in OF_MEMORY:
        ended += ": the memory may have run out (see dmesg)"
    return [ended]


def _full_disk(run: Path) -> list[str]:
    """Return a line if the folder of a run cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return [f"{run} cannot be written: {error}. What the run wrote last may be missing"]
    return []
