"""Runs grouped by arm, and curves over the seeds of an arm.

Seeds are summed up by the median and the inter-quartile range, as pandas' default (linear)
quantiles give them. Runs of one arm are pooled only if their configurations differ in nothing but
seeds and folders.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from verl_gdpo.run.resume_rules import ON_REQUEST, with_files
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.run.starts import starts_of
from verl_gdpo.run.tracker_logs import read_logged
from verl_gdpo.tools.report.runs import Curve, Read, ReadEach, Run, run_of, trailing_mean

MAIN_ARM = "gdpo"
FEWEST_FOR_BAND = 5  # runs of an arm
# the last words of keys in which runs of one arm may differ: seeds, names, folders and ports
OF_ONE_RUN = {
    *("arm", "seed", "project_name", "experiment_name", "resume_mode", "resume_from_path"),
    *("recipes", "dir", "save_path", "timeline_json_file", "port", "ports", "address"),
}
# where a key of such a name may say what is trained
OF_AN_ARM = ("data_dir", "algorithm.", "reward.reward_kwargs.", "reward.custom_reward_function.")
SETTINGS_IN_A_NAME = 3  # of an arm


@dataclass(frozen=True)
class RunsOfArm:
    """The runs that differ in their seed alone."""

    name: str
    runs: Sequence[Run]


def read_arms(
    sources: Sequence[Path | str],
    configs: Sequence[Path] = (),
    rollouts: Sequence[Path] = (),
    scorer: Scorer | None = None,
    arm_of: Mapping[Path | str, str] = MappingProxyType({}),
) -> list[RunsOfArm]:
    """Read runs; arms in the order in which they are first named.

    Args:
        sources: what `read_logged` takes.
        configs, rollouts: each run's configuration and folder of dumps, in the order of the runs,
            where they are not in its folder; or none.
        scorer: scores the dumps again.
        arm_of: the arm of each source that a user put into one, whatever its configuration.

    Raises:
        ValueError: a run is not there, is named twice, or has no metrics.
    """
    for option, places in (("--config", configs), ("--rollouts", rollouts)):
        if places and len(places) != len(sources):
            raise ValueError(
                f"{option} is given {len(places)} times for {len(sources)} runs; expected once for "
                "each run, in their order"
            )
    known: set[Path] = set()
    runs: dict[tuple[str, bool], list[Run]] = {}
    for source, config, folder in zip_longest(sources, configs, rollouts):
        if Path(source).resolve() in known:
            raise ValueError(f"{source}: named twice; each run counts once")
        known.add(Path(source).resolve())
        run = run_of(read_logged(str(source)), Path(source), config, folder, scorer)
        runs.setdefault((arm_of.get(source, run.arm), source in arm_of), []).append(run)
    arms = [
        arm
        for (name, is_chosen), members in runs.items()
        for arm in ([RunsOfArm(name, members)] if is_chosen else _alike(name, members))
    ]
    return [*_told_apart(arms)]


def _told_apart(arms: Sequence[RunsOfArm]) -> Iterator[RunsOfArm]:
    """The arms, each with a name of its own: two runs of one script may share theirs."""
    names = [arm.name for arm in arms]
    for number, arm in enumerate(arms, start=1):
        if names.count(arm.name) > 1:
            arm = replace(arm, name=f"{arm.name} {number} ({arm.runs[0].arm})")
        yield arm


def last_common_step(arms: Sequence[RunsOfArm]) -> int:
    """The last step that all runs have got to, of those that have trained."""
    ends = (run.last_step for arm in arms for run in arm.runs)
    return min((end for end in ends if end > 0), default=0)


def ends_apart(arms: Sequence[RunsOfArm]) -> str:
    """What to say of runs that end at different steps; "" where all end at one."""
    last = last_common_step(arms)
    later = any(run.last_step > last for arm in arms for run in arm.runs)
    return f" up to step {last}, the last one that all runs have" if later else ""


def _alike(name: str, runs: Sequence[Run]) -> list[RunsOfArm]:
    """The runs of an arm; several, named after their settings, where more than seeds differ."""
    settings = compared(runs)
    keys = differing(settings)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run, setting in zip(runs, settings, strict=True):
        # a name alone does not say that two runs differ in their seed only
        pairs = [str(run.folder)]
        if run.config is not None:
            pairs = [f"{key}={setting.get(key)}" for key in keys]
        groups.setdefault(tuple(pairs), []).append(run)
    if len(groups) == 1:
        alone = len(runs) == 1 and not runs[0].setting("arm")
        return [RunsOfArm(runs[0].name if alone else name, runs)]
    return [
        RunsOfArm(f"{name} {number} ({listed(pairs, SETTINGS_IN_A_NAME)})", members)
        for number, (pairs, members) in enumerate(groups.items(), start=1)
    ]


def listed(texts: Sequence[str], most: int = 3) -> str:
    """The first texts, and how many more there are."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more])


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which runs differ that say something of their arm; see `compared`."""
    keys = sorted({key for setting in settings for key in setting if not is_of_one_run(key)})
    return [key for key in keys if len({setting.get(key) for setting in settings}) > 1]


def is_of_one_run(key: str) -> bool:
    """Whether a key such as `data.seed` or `trainer.default_local_dir` says nothing of the arm."""
    last = key.rpartition(".")[2]
    is_listed = last in OF_ONE_RUN or last.rpartition("_")[2] in OF_ONE_RUN
    return is_listed and not key.startswith(OF_AN_ARM)


def compared(runs: Sequence[Run]) -> list[dict[str, str]]:
    """What is compared of each run, {dotted key: value as text}.

    They are the configurations as they are written; with a manifest of every run, with the sizes of
    files, and with what was changed within a run.
    """
    recorded = [starts_of(run.folder) if run.folder.is_dir() else [] for run in runs]
    if not all(recorded):
        return [{} if run.config is None else leaves(run.config) for run in runs]
    return [
        {
            **{
                key: str(value)
                for key, value in with_files(
                    last.configuration, last.files, with_times=False
                ).items()
                if key != "data_dir"  # what is in it counts
            },
            **{
                f"{key} before step {start.start.step + 1}": str(before)
                for start in starts
                for key, (before, _, verdict) in start.start.changes.items()
                if verdict == ON_REQUEST
            },
        }
        for starts in recorded
        for last in [starts[-1].start]
    ]


def leaves(config: Any) -> dict[str, str]:
    """{dotted key: value as text}; interpolations are not resolved."""
    [flat] = pd.json_normalize(OmegaConf.to_container(config)).to_dict("records")
    return {str(key): "null" if value is None else str(value) for key, value in flat.items()}


def names(arms: Sequence[RunsOfArm], read: ReadEach) -> list[str]:
    """Every name that some run has, in the order of its first appearance."""
    every = [name for arm in arms for run in arm.runs for name in read(run)]
    return list(dict.fromkeys(every))


def over_runs(arm: RunsOfArm, read: Read, smooth: int = 1) -> dict[str, Curve]:
    """The median of one quantity over the runs of an arm, and of several its quartiles.

    Args:
        read: the quantity of one run, {step: value}.
        smooth: each run's curve is first replaced by the mean of its last `smooth` steps.

    Returns:
        {"": median, "low": quartile, "high": quartile}; a step without a number is NaN. It is empty
        if no run has the quantity.
    """
    curves_of_runs = [trailing_mean(curve, smooth) for run in arm.runs if (curve := read(run))]
    if len(curves_of_runs) < 2:
        return {"": curves_of_runs[0]} if curves_of_runs else {}
    values = pd.concat([pd.Series(curve) for curve in curves_of_runs], axis=1).sort_index()
    shares = {"": 0.5, "low": 0.25, "high": 0.75}
    return {name: values.quantile(share, axis=1).to_dict() for name, share in shares.items()}
