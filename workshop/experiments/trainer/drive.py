"""Runs what is missing, one training after the other, and keeps what came of it."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from verl_gdpo.run.processes import BusyError, locked
from workshop.experiments.trainer import results
from workshop.experiments.trainer.results import Failure, Result
from workshop.experiments.trainer.settings import Run

MAX_FAILURES_IN_A_ROW = 2  # more are not the runs' fault
GUESS_SECONDS = 150.0  # of a run, before one has finished
STOP = "stop"  # a file of this name in the work folder ends the driver between two runs
Train = Callable[[Run, Path], Result | Failure]


def drive(runs: Sequence[Run], train: Train, work: Path, data: Path | None = None) -> None:
    """Train what has no result yet, in this order, until all have one or the file `stop` appears.

    A second process with the same folders takes the runs that the first one does not have.

    Args:
        runs: what to train.
        train: trains one run in a new folder inside of the given one.
        work: folder of everything that the runs write.
        data: folder of the results; by default that of the edition.

    Raises:
        ValueError: `data` has results of another configuration.
        Interrupted: by a signal; raised by `train`.
        RuntimeError: several runs in a row failed.
    """
    results.check_fingerprints(runs, data)
    (work / "locks").mkdir(parents=True, exist_ok=True)
    took: list[float] = []
    failed = 0
    for run in runs:
        if (work / STOP).exists():
            _say(f"{work / STOP} is there; {_missing(runs, data)} runs are left")
            return
        if not results.is_due(run, data):
            continue
        left = _missing(runs, data)
        minutes = left * (fmean(took) if took else GUESS_SECONDS) / 60
        _say(f"{run}: started; {left} runs left, about {minutes:.0f} min")
        start = time.monotonic()
        try:
            with locked(work / "locks" / str(run), str(run)):
                if results.is_due(run, data):
                    results.write(run, found := train(run, work), data)
                    _say(f"{run}: {_summary(found)}")
                    failed = failed + 1 if isinstance(found, Failure) else 0
        except BusyError:
            _say(f"{run}: another process has it")
            continue
        took.append(time.monotonic() - start)
        if failed == MAX_FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"{failed} runs in a row failed, so something is wrong with the machine or the "
                f"environment. The reasons are in {results.folder_of(run, data)}/*.failed-*.json: "
                "mend it, delete those files and start again"
            )


def _missing(runs: Iterable[Run], data: Path | None) -> int:
    return sum(results.is_due(run, data) for run in runs)


def _summary(found: Result | Failure) -> str:
    if isinstance(found, Failure):
        return f"failed after {found.seconds:.0f} s: {found.reason}"
    shares = [f"{name} {fmean(curve):.3f}" for name, curve in found.shares.items()]
    return f"{', '.join(shares)}, {found.seconds:.0f} s"


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
