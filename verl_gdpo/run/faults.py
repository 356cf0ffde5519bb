"""What ended a run from outside, which its log cannot say."""

import signal
import tempfile
from pathlib import Path

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE_BYTES = 1 << 20


def faults_from_outside(run: Path, exit_code: int) -> list[str]:
    """A line for each: a signal that nobody sends on purpose, and a folder that takes no more.

    Args:
        run: the run's folder.
        exit_code: as a shell gives it, 128 + signal, or as `subprocess` does, -signal.
    """
    lines = []
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in {*signal.Signals} - {*ASKED}:
        lines.append(
            f"the training process was ended by {signal.Signals(number).name}, which nothing in a "
            "run sends to it: look for a lack of memory (dmesg) or for who did"
        )
    try:
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        lines.append(f"{run} cannot be written: {error}. What the run wrote last may be missing")
    return lines
