"""Finds causes of a run's end that its log cannot contain."""

import signal
import tempfile
from pathlib import Path

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE_BYTES = 1 << 20


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
