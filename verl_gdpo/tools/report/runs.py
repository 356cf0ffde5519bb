"""Runs grouped by arm, and curves over the seeds of an arm.

Seeds are summed up by the median and the inter-quartile range, as pandas' default (linear)
quantiles give them. Runs of one arm are pooled only if their configurations differ in nothing but
seeds and folders.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.hooks.configuration import scorers_bounds, uses_gdpo_manager
from verl_gdpo.run.dump_reader import data_sources, dump_files, dumps_to_read
from verl_gdpo.run.folder import (
    Metrics,
    curves,
    load_config,
    read_versions,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.run.resolved_config import with_files
from verl_gdpo.run.resume_rules import ON_REQUEST
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.run.starts import starts_of
from verl_gdpo.run.tracker_logs import Logged, read_logged

Curve = Mapping[int, float]
Read = Callable[["Run"], Curve]
ReadEach = Callable[["Run"], Mapping[str, Curve]]

TRAINED: ReadEach = attrgetter("trained")
TESTED: ReadEach = attrgetter("tested")

MAIN_ARM = "gdpo"
SMOOTHED_STEPS = 5
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
class Run:
    """One training run: one arm, one seed."""

    folder: Path  # or the file or address that was named
    metrics: Metrics
    config: Any = None  # DictConfig, None where there is none
    versions: Mapping[str, str] = field(default_factory=dict)
    # {reward: (lowest, highest)}, where the configuration or a scorer declares them
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    label: str = ""  # the tracker's name for it; "" for that of the folder
    tracker: str = "file logger"
    rollouts: Path | None = None  # the folder with its dumps
    scorer: Scorer | None = None  # scores the dumps again

    @property
    def name(self) -> str:
        return self.label or self.folder.resolve().name

    @property
    def arm(self) -> str:
        """`arm` of the recipes, the estimator of a run without it, or else its name."""
        return str(self.setting("arm") or self.setting("algorithm.adv_estimator") or self.name)

    @property
    def last_step(self) -> int:
        return max(self.metrics)

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        return curves(self.metrics)

    @cached_property
    def trained(self) -> Mapping[str, Curve]:
        """Each reward in training."""
        return training_rewards(self.metrics)

    @cached_property
    def tested(self) -> Mapping[str, Curve]:
        """Each reward in validation."""
        return validation_rewards(self.metrics)

    def dumps(self) -> list[Path]:
        """Return its rollout dumps, by step.

        Raises:
            ValueError: there are none.
        """
        if self.rollouts is None:
            raise ValueError("no rollout dump; the end of this page says how to have them")
        return dump_files(self.rollouts)[0]

    def setting(self, key: str) -> Any:
        """A key of the configuration such as `data.seed`; None where there is none."""
        return None if self.config is None else OmegaConf.select(self.config, key)


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
    for option, given in (("--config", configs), ("--rollouts", rollouts)):
        if given and len(given) != len(sources):
            raise ValueError(
                f"{option} is given {len(given)} times for {len(sources)} runs; expected once for "
                "each run, in their order"
            )
    seen: set[Path] = set()
    runs: dict[tuple[str, bool], list[Run]] = {}
    for source, config, folder in zip_longest(sources, configs, rollouts):
        if Path(source).resolve() in seen:
            raise ValueError(f"{source}: named twice; each run counts once")
        seen.add(Path(source).resolve())
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
    for run, one in zip(runs, settings, strict=True):
        # a name alone does not say that two runs differ in their seed only
        pairs = [str(run.folder)]
        if run.config is not None:
            pairs = [f"{key}={one.get(key)}" for key in keys]
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
    keys = sorted({key for one in settings for key in one if not is_of_one_run(key)})
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]


def is_of_one_run(key: str) -> bool:
    """Whether a key such as `data.seed` or `trainer.default_local_dir` says nothing of the arm."""
    last = key.rpartition(".")[2]
    is_listed = last in OF_ONE_RUN or last.rpartition("_")[2] in OF_ONE_RUN
    return is_listed and not key.startswith(OF_AN_ARM)


def compared(runs: Sequence[Run]) -> list[dict[str, str]]:
    """What is compared of each run, {dotted key: value as text}.

    With a manifest of every run, these are the resolved configurations with the sizes of files,
    and what was changed within a run. Otherwise they are the configurations as they are written.
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
                f"{key} before step {one.start.step + 1}": str(before)
                for one in starts
                for key, (before, _, verdict) in one.start.changes.items()
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


def run_of(
    logged: Logged,
    source: Path,
    config: Path | None = None,
    rollouts: Path | None = None,
    scorer: Scorer | None = None,
) -> Run:
    """A run with all that is known of it, also from its configuration; see `read_arms`."""
    settings = logged.config if config is None else load_config(config)
    if rollouts is not None:
        dump_files(rollouts)  # raises if the user named a folder without dumps
    if rollouts is None and logged.folder is not None and (logged.folder / "rollouts").is_dir():
        rollouts = logged.folder / "rollouts"
    if rollouts is None and settings is not None:
        named = OmegaConf.select(settings, "trainer.rollout_data_dir")
        rollouts = Path(named) if named and Path(named).is_dir() else None
    return Run(
        source,
        logged.metrics,
        settings,
        {} if logged.folder is None else read_versions(logged.folder),
        bounds_of_run(rollouts, settings),
        logged.name,
        logged.kind,
        rollouts,
        scorer,
    )


def bounds_of_run(rollouts: Path | None, config: Any) -> dict[str, Bounds]:
    """Of each reward of a run, after its condition, as far as they are declared.

    With several data sources also of each "reward (source)": their scorers may disagree.
    """
    if config is None:
        return {}
    sources = None
    if rollouts is not None:
        with suppress(ValueError):  # no dump is complete yet
            sources = data_sources(dumps_to_read(dump_files(rollouts)[0]))
    try:
        found = _bounds_of(config, sources)
        if sources is not None and len(sources) > 1:
            for source in sources:
                of_source = _bounds_of(config, {source})
                found |= {f"{name} ({source})": pair for name, pair in of_source.items()}
    except ValueError:  # a configuration of another version; nothing trains with it in this one
        return {}
    return found


def _bounds_of(config: Any, sources: set[str] | None) -> dict[str, Bounds]:
    has_manager = OmegaConf.select(config, "reward.reward_manager") and uses_gdpo_manager(config)
    declared = scorers_bounds(config, sources) if has_manager else {}
    settings = GdpoSettings.from_algorithm(config.algorithm, declared)
    ranges = {name: settings.range_of(name) for name in settings.bounds}
    return {name: pair for name, pair in ranges.items() if pair is not None}


def names(arms: Sequence[RunsOfArm], read: ReadEach) -> list[str]:
    """Every name that some run has, in the order of its first appearance."""
    found = [name for arm in arms for run in arm.runs for name in read(run)]
    return list(dict.fromkeys(found))


def over_runs(arm: RunsOfArm, read: Read, smooth: int = 1) -> dict[str, Curve]:
    """The median of one quantity over the runs of an arm, and of several its quartiles.

    Args:
        read: the quantity of one run, {step: value}.
        smooth: each run's curve is first replaced by the mean of its last `smooth` steps.

    Returns:
        {"": median, "low": quartile, "high": quartile}; a step without a number is NaN. It is empty
        if no run has the quantity.
    """
    found = [trailing_mean(curve, smooth) for run in arm.runs if (curve := read(run))]
    if len(found) < 2:
        return {"": found[0]} if found else {}
    values = pd.concat([pd.Series(curve) for curve in found], axis=1).sort_index()
    shares = {"": 0.5, "low": 0.25, "high": 0.75}
    return {name: values.quantile(share, axis=1).to_dict() for name, share in shares.items()}


def trailing_mean(curve: Curve, window: int) -> dict[int, float]:
    """At each step the mean of the last `window` values, of fewer at the start or at a gap.

    A step whose own value is NaN stays one.
    """
    values = pd.Series(curve)
    means = values.rolling(window, min_periods=1).mean().where(values.notna())
    return {step: mean for step, mean in means.items()}
