"""The data of the comparison: a small file of text for each run, also for each that failed."""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.run.dump_reader import dump_files, read_dump
from verl_gdpo.run.folder import read_versions
from workshop.experiments.trainer.settings import SETTINGS, Run, Setting, fingerprint, pilot, plan

DATA = Path(__file__).parent / "data"
DATA_OF = {1: DATA, 2: DATA.with_name("data_2")}  # of the editions
MAX_TRIES = 2


@dataclass(frozen=True)
class Result:
    """What is kept of a run.

    shares: {reward: share of it that the samples of each training step earned, from 0 to 1}.
        "small" and "large" are the rewards of the smaller and of the larger range.
    start: share of 256 samples of the starting policy that meet each reward, if they are counted.
    made_with: versions of the packages.
    varies: {reward: share of the groups of each step in which it varies}.
    spread: {reward: its standard deviation within a group, the mean over the groups of each step}.
    inputs: hash of the rows and the starting policy. The first edition did not keep these three.
    """

    fingerprint: str
    shares: Mapping[str, tuple[float, ...]]
    start: Mapping[str, float]
    seconds: float
    made_with: Mapping[str, str]
    varies: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spread: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    inputs: str = ""


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
        kept = measured(folder, SETTINGS[run.setting])
    except ValueError as error:
        return Failure(fingerprint(run), str(error), seconds)
    return Result(
        fingerprint=fingerprint(run),
        start={},
        seconds=seconds,
        made_with=read_versions(folder),
        **kept,
    )


def measured(run_folder: Path, setting: Setting) -> dict[str, Any]:
    """Return `shares`, `varies` and `spread` of a `Result`, from the dumps of a finished run.

    Raises:
        ValueError: a dump is incomplete or missing.
    """
    complete, incomplete = dump_files(run_folder)
    if incomplete or [int(path.stem) for path in complete] != [*range(1, len(complete) + 1)]:
        raise ValueError(f"{run_folder}: rollout dumps are missing or incomplete")
    steps = [[row for row in read_dump(path) if not row["is_padding"]] for path in complete]
    kept: dict[str, Any] = {"shares": {}, "varies": {}, "spread": {}}
    for reward, worth in setting.worth.items():
        of_steps = [_groups(rows, reward, setting) for rows in steps]
        # groups are of one size
        kept["shares"][reward] = _means(of_steps, fmean)
        kept["varies"][reward] = _means(of_steps, lambda group: float(min(group) < max(group)))
        kept["spread"][reward] = tuple(round(worth * sd, 5) for sd in _means(of_steps, stdev))
    return kept


def _means(
    of_steps: Iterable[Iterable[Sequence[float]]], of: Callable[[Sequence[float]], float]
) -> tuple[float, ...]:
    """The mean over the groups of each step."""
    return tuple(round(fmean(map(of, groups)), 5) for groups in of_steps)


def _groups(
    rows: Iterable[Mapping[str, Any]], reward: str, setting: Setting
) -> Collection[list[float]]:
    """The shares of each sample, by group."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(_share(row["rewards"], reward, setting))
    return groups.values()


def _share(rewards: Mapping[str, float], name: str, setting: Setting) -> float:
    """Of what is to be had of a reward, from 0 to 1; the condition of the reward holds here too."""
    reward = setting.columns[name]
    other = setting.when.get(reward)
    if other and rewards[other] < 1:
        return 0.0
    low, high = setting.bounds.get(reward, (0.0, 1.0))
    return (rewards[reward] - low) / (high - low)


def folder_of(run: Run, folder: Path | None = None) -> Path:
    """The given folder, or that of the edition."""
    return folder or DATA_OF[SETTINGS[run.setting].edition]


def write(run: Run, found: Result | Failure, folder: Path | None = None) -> None:
    """Write the file of a run; a failure does not replace an earlier one."""
    name = str(run)
    if isinstance(found, Failure):
        name += f".failed-{len(failures(run, folder)) + 1}"
    with replace_together(folder_of(run, folder) / f"{name}.json") as [path]:
        lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(found).items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(run: Run, folder: Path | None = None) -> Result | None:
    """Return the result of a run, or None if there is none."""
    return _read(folder_of(run, folder) / f"{run}.json")


def read_replaced(run: Run, folder: Path | None = None) -> Result | None:
    """Return the result that a run had on another machine, before it was made again."""
    return _read(folder_of(run, folder) / f"{run}.replaced.json")


def _read(path: Path) -> Result | None:
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    shares = kept.pop("shares", None) or {name: kept.pop(name) for name in ("small", "large")}
    for name, curves in (("shares", shares), *((n, kept.get(n, {})) for n in ("varies", "spread"))):
        kept[name] = {reward: tuple(curve) for reward, curve in curves.items()}
    return Result(**kept)


def failures(run: Run, folder: Path | None = None) -> list[Failure]:
    """Return the tries of a run that failed."""
    paths = sorted(folder_of(run, folder).glob(f"{run}.failed-*.json"))
    return [Failure(**json.loads(path.read_text())) for path in paths]


def is_due(run: Run, folder: Path | None = None) -> bool:
    return read(run, folder) is None and len(failures(run, folder)) < MAX_TRIES


def check_fingerprints(runs: Iterable[Run], folder: Path | None = None) -> None:
    """Refuse to add to a setting that another configuration made.

    Raises:
        ValueError: a kept run had another configuration.
    """
    runs = [*runs]
    grows = {run.setting for run in runs if is_due(run, folder)}
    for run in runs:
        kept: list[Any] = [*failures(run, folder), *filter(None, [read(run, folder)])]
        for found in kept if run.setting in grows else ():
            if found.fingerprint != fingerprint(run):
                raise ValueError(
                    f"{folder_of(run, folder)}, {run}: its configuration has the fingerprint "
                    f"{found.fingerprint}, and the one of today {fingerprint(run)}. Results of "
                    "both would be mixed: undo the change of the configuration, or name a new "
                    "folder with --data"
                )


def read_all(folder: Path | None = None) -> dict[Run, Result]:
    """Return all results that are there, in the order of the plan, with the pilot."""
    found = ((run, read(run, folder)) for run in (*plan(), *pilot()))
    return {run: result for run, result in found if result is not None}
