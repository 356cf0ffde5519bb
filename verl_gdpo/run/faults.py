"""Says why a run ended: from its log, and from what the log cannot contain."""

import os
import re
import signal
import tempfile
from pathlib import Path

from verl_gdpo.run.folder import read_metrics
from verl_gdpo.run.starts import TRACKER
from verl_gdpo.terminal import printable

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE_BYTES = 1 << 20
LOG_END_BYTES = 1 << 20  # a failure's reason is searched in this much of the log's end


def stop_report(run: Path, reason: str, go_on: str | None = None) -> str:
    """Return one line about a run that somebody stopped, or that reached its time limit.

    Args:
        reason: "stopped", or another word, which is said too.
        go_on: the command that goes on with it.
    """
    step = max(read_metrics(run), default=0)
    said = f"stopped at step {step}" if step else "stopped before the first step"
    if reason != "stopped":
        said = f"{reason}: {said}"
    tracker = run / "checkpoints" / TRACKER
    saved = tracker.read_text().strip() if tracker.exists() else ""
    if not saved:
        return f"{said}; there is no checkpoint yet, so nothing to go on with"
    command = go_on or "the same command and trainer.resume_mode=auto"
    return f"{said}; the last checkpoint is of step {saved}; go on with: {command}"


def failure_report(run: Path, since: int = 0, lines: int = 25, exit_code: int = 1) -> str:
    """Return why a run failed: faults from outside, and the log's last exception or last lines.

    Args:
        since: position in the log, in bytes, at which this start begins.
        lines: number of the last lines to return if the log has no exception.
    """
    with (run / "train.log").open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - LOG_END_BYTES))
        log = file.read().decode(errors="replace").splitlines()
    raised = [line for line in log if re.match(r"[\w.]*(Error|Exception)(\(\w+\))?: ", line)]
    said = [printable(line) for line in raised[-1:] or log[-lines:]]
    faults = faults_from_outside(run, exit_code)
    return "\n".join([*faults, *said, f"(whole log: {run / 'train.log'})"])


def faults_from_outside(run: Path, exit_code: int) -> list[str]:
    """Return a line if an unexpected signal ended the run, and one if its folder is not writable.

    Args:
        run: the run's folder.
        exit_code: after a signal, either 128 + signal (shell) or -signal (`subprocess`).
    """
    lines = []
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in {*signal.Signals} - {*ASKED}:
        lines.append(
            f"the training process was ended by {signal.Signals(number).name}, which nothing in a "
            "run sends to it: the memory may have run out (see dmesg), or somebody sent the signal"
        )
    try:
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        lines.append(f"{run} cannot be written: {error}. What the run wrote last may be missing")
    return lines
