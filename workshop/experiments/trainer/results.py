"""The data of the comparison: a small file of text for each run, also for each that failed."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.run.dump_reader import dump_files, read_dump
from verl_gdpo.run.folder import read_versions
from workshop.experiments.trainer.settings import Run, fingerprint, plan

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Result:
    """What is kept of a run.

    small, large: share of the reward of the smaller and of the larger range that the samples of
        each training step earned, from 0 to 1.
    start: share of 256 samples of the starting policy that meet each reward; empty for ToolRL.
    made_with: versions of the packages.
    """

    fingerprint: str
    small: tuple[float, ...]
    large: tuple[float, ...]
    start: Mapping[str, float]
    seconds: float
    made_with: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """A run without a result."""

    fingerprint: str
    reason: str
    seconds: float


class Interrupted(Exception):
    """A signal ended the training; the run has no result and did not fail."""


def new_folder(run: Run, work: Path) -> Path:
    """Return a folder inside of `work` that no earlier try of the run has."""
    return work / "runs" / f"{run}_{len([*work.glob(f'runs/{run}_*')]) + 1}"


def of_ended(
    run: Run, folder: Path, code: int, why: Callable[[], str], seconds: float
) -> Result | Failure:
    """Return what is kept of a training that has ended; the start of a `Result` is left empty.

    Args:
        code: exit code of the training.
        why: returns what is said behind the code of a failure.

    Raises:
        Interrupted: by a signal.
    """
    if code > 128:
        raise Interrupted(f"{run}: a signal ended it (exit code {code}), so it has no result")
    if code:
        return Failure(fingerprint(run), f"exit code {code}{why()}", seconds)
    try:
        small, large = curves(folder)
    except ValueError as error:
        return Failure(fingerprint(run), str(error), seconds)
    return Result(fingerprint(run), tuple(small), tuple(large), {}, seconds, read_versions(folder))


def curves(run_folder: Path) -> tuple[list[float], list[float]]:
    """Return the two curves of a `Result`, from the rollout dumps of a finished run.

    Raises:
        ValueError: a dump is incomplete or missing.
    """
    complete, incomplete = dump_files(run_folder)
    if incomplete or [int(path.stem) for path in complete] != [*range(1, len(complete) + 1)]:
        raise ValueError(f"{run_folder}: rollout dumps are missing or incomplete")
    steps = [[_shares(row["rewards"]) for row in read_dump(path)] for path in complete]
    small, large = ([round(fmean(row[k] for row in rows), 5) for rows in steps] for k in (0, 1))
    return small, large


def _shares(rewards: Mapping[str, float]) -> tuple[float, float]:
    if "correctness" in rewards:  # ToolRL's, from -3 to 3
        return rewards["format"], (rewards["correctness"] + 3) / 6
    return rewards["small_met"], rewards["large_met"]


def write(run: Run, found: Result | Failure, folder: Path = DATA) -> None:
    """Write the file of a run; a failure does not replace an earlier one."""
    name = str(run)
    if isinstance(found, Failure):
        name += f".failed-{len(failures(run, folder)) + 1}"
    with replace_together(folder / f"{name}.json") as [path]:
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(found).items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(run: Run, folder: Path = DATA) -> Result | None:
    """Return the result of a run, or None if there is none."""
    path = folder / f"{run}.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    return Result(**{**kept, "small": tuple(kept["small"]), "large": tuple(kept["large"])})


def failures(run: Run, folder: Path = DATA) -> list[Failure]:
    """Return the tries of a run that failed."""
    paths = sorted(folder.glob(f"{run}.failed-*.json"))
    return [Failure(**json.loads(path.read_text())) for path in paths]


def check_fingerprints(runs: Iterable[Run], folder: Path = DATA) -> None:
    """Refuse to add to data that other settings made.

    Raises:
        ValueError: a kept run had another configuration.
    """
    for run in runs:
        kept: list[Any] = [*failures(run, folder), *filter(None, [read(run, folder)])]
        for found in kept:
            if found.fingerprint != fingerprint(run):
                raise ValueError(
                    f"{folder}, {run}: its configuration has the fingerprint {found.fingerprint}, "
                    f"and the one of today {fingerprint(run)}. Results of both would be mixed: "
                    "undo the change of the configuration, or name a new folder with --data"
                )


def read_all(folder: Path = DATA) -> dict[Run, Result]:
    """Return all results of the plan that are there, in its order."""
    found = ((run, read(run, folder)) for run in plan())
    return {run: result for run, result in found if result is not None}
