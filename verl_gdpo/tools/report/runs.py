"""Runs with all that is known of them, grouped by arm, and curves over the seeds of an arm.

Seeds are summed up by the median and the inter-quartile range, as pandas' default (linear)
quantiles give them. Runs of one arm are pooled only if their configurations differ in nothing but
seeds and folders.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf

from verl_gdpo.tools.run_folder.dump_reader import Scorer, dump_files
from verl_gdpo.tools.run_folder.folder import (
    SCORE,
    Metrics,
    curves,
    load_config,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.tools.run_folder.tracker_logs import Logged, read_logged

Curve = Mapping[int, float]
Read = Callable[["Run"], Curve]
ReadEach = Callable[["Run"], Mapping[str, Curve]]

TRAINED: ReadEach = attrgetter("trained")
TESTED: ReadEach = attrgetter("tested")

MAIN_ARM = "gdpo"
FEWEST_FOR_BAND = 5  # runs of an arm
FEWEST_RUNS = 2  # of an arm, for an interval
FAR = 0.9  # of the way that most runs of an arm have gone
LEFT_OUT = "the tables leave it out, and so speak well of an arm that fails more often"
LONGEST_NAME = 40  # of a run, in characters: names may be hashes
SMOOTHED_STEPS = 5
LARGEST_SUMMED = 1e300
# How the last part of a key ends in which runs of one arm may differ: seeds, names, folders, ports.
OF_ONE_RUN = {
    "arm",
    "seed",
    "project_name",
    "experiment_name",
    "resume_mode",
    "resume_from_path",
    "recipes",
    "dir",
    "save_path",
    "timeline_json_file",
    "port",
    "ports",
    "address",
}
# Below these, a key of such a name may say what is trained.
OF_AN_ARM = ("data_dir", "algorithm.", "reward.reward_kwargs.", "reward.custom_reward_function.")


@dataclass(frozen=True)
class Run:
    """One training run: one arm, one seed."""

    folder: Path  # or the file or address that was named
    metrics: Metrics
    config: Any = None  # DictConfig, None where there is none
    label: str = ""  # the tracker's name for it; "" for that of the folder
    rollouts: Path | None = None  # the folder with its dumps
    scorer: Scorer | None = None  # scores the dumps again

    @property
    def name(self) -> str:
        name = self.label or self.folder.resolve().name
        if len(name) <= LONGEST_NAME:
            return name
        half = LONGEST_NAME // 2
        beginning = name[: half - 1]
        end = name[-(half - 2) :]
        return f"{beginning}...{end}"

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

    @property
    def named_rewards(self) -> list[str]:
        """The rewards in the metrics of training, which only verl-gdpo logs one by one."""
        return [name for name in self.trained if name != SCORE]

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """{dotted key: value as text} of what is trained; interpolations are not resolved."""
        if self.config is None:
            # A name alone says nothing of what was trained, so that no two runs are one arm.
            return {"run": str(self.folder)}
        [flat] = pd.json_normalize(OmegaConf.to_container(self.config)).to_dict("records")
        return {str(key): str(value) for key, value in flat.items() if not is_of_one_run(str(key))}

    def dumps(self) -> list[Path]:
        """Return its dumps, by step.

        Raises:
            ValueError: there are none.
        """
        if self.rollouts is None:
            where = "trainer.rollout_data_dir=FOLDER, and name it with --rollouts"
            raise ValueError(f"no dump: train with {where}")
        return dump_files(self.rollouts)[0]

    def setting(self, key: str) -> Any:
        """A key of the configuration such as `data.seed`; None where there is none."""
        if self.config is None:
            return None
        return OmegaConf.select(self.config, key)


@dataclass(frozen=True)
class RunsOfArm:
    """The runs that differ in their seed alone."""

    name: str
    runs: Sequence[Run]


class _ArmKey(NamedTuple):
    """What the runs of an arm have in common."""

    name: str
    settings: frozenset[tuple[str, str]] | None  # None where a user chose the arm


def is_of_one_run(key: str) -> bool:
    """Whether a key such as `data.seed` or `trainer.default_local_dir` says nothing of the arm."""
    last = key.rpartition(".")[2]
    is_listed = last in OF_ONE_RUN or last.rpartition("_")[2] in OF_ONE_RUN
    return is_listed and not key.startswith(OF_AN_ARM)


def run_of(
    logged: Logged,
    source: Path,
    config: Path | None = None,
    rollouts: Path | None = None,
    scorer: Scorer | None = None,
) -> Run:
    """A run with all that is known of it, also from its configuration; see `read_arms`."""
    settings = logged.config
    if config is not None:
        settings = load_config(config)
    if rollouts is None:
        rollouts = _rollouts_of(logged.folder, settings)
    else:
        # Raises if the user named a folder without dumps.
        dump_files(rollouts)
    if scorer is not None:
        scorer = scorer.with_options_of(settings)
    return Run(source, logged.metrics, settings, logged.name, rollouts, scorer)


def _rollouts_of(folder: Path | None, settings: Any) -> Path | None:
    """Return the folder of a run's dumps, in its own folder or as its configuration names it."""
    if folder is not None and (folder / "rollouts").is_dir():
        return folder / "rollouts"
    if settings is None:
        return None
    named = OmegaConf.select(settings, "trainer.rollout_data_dir")
    if named and Path(named).is_dir():
        return Path(named)
    return None


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
            raise ValueError(f"{option}: expected once for each of {len(sources)} runs")
    if len({Path(source).resolve() for source in sources}) < len(sources):
        raise ValueError("a run is named twice; each run counts once")
    runs = []
    # Without any --config or --rollouts, each run gets None.
    for source, config, folder in zip_longest(sources, configs, rollouts):
        runs.append(run_of(read_logged(str(source)), Path(source), config, folder, scorer))
    groups: dict[_ArmKey, list[Run]] = {}
    for source, run in zip(sources, _with_own_names(runs), strict=True):
        if source in arm_of:
            key = _ArmKey(arm_of[source], None)
        else:
            key = _ArmKey(run.arm, frozenset(run.settings.items()))
        groups.setdefault(key, []).append(run)
    return _named(groups)


def _with_own_names(runs: Sequence[Run]) -> list[Run]:
    """The runs, where those of one name have the folders around them in their names."""
    of_one_name: dict[str, list[Run]] = {}
    for run in runs:
        of_one_name.setdefault(run.name, []).append(run)
    told_apart = []
    for run in runs:
        namesakes = of_one_name[run.name]
        if len(namesakes) > 1:
            run = replace(run, label=_name_with_folders(run, namesakes))
        told_apart.append(run)
    return told_apart


def _name_with_folders(run: Run, namesakes: Sequence[Run]) -> str:
    """The end of a run's path that no other run of its name has, as `gdpo/seed2`.

    Args:
        namesakes: all runs of its name, with itself.
    """
    paths = [each.folder.resolve().parts for each in namesakes]
    own = run.folder.resolve().parts
    for count in range(2, len(own)):
        end = own[-count:]
        if sum(path[-count:] == end for path in paths) == 1:
            return "/".join(end)
    return str(run.folder)


def _named(groups: Mapping[_ArmKey, Sequence[Run]]) -> list[RunsOfArm]:
    """The arms, with numbers where several have one name."""
    arms = []
    for key, runs in groups.items():
        name = key.name
        # A run alone is better known by its own name, unless its arm was chosen.
        if key.settings and len(runs) == 1 and not runs[0].setting("arm"):
            name = runs[0].name
        arms.append(RunsOfArm(name, runs))

    times = Counter(arm.name for arm in arms)
    taken = set(times)
    told_apart = []
    for number, arm in enumerate(arms, start=1):
        if times[arm.name] > 1:
            name = f"{arm.name} {number}"
            while name in taken:
                number += 1
                name = f"{arm.name} {number}"
            taken.add(name)
            told_apart.append(replace(arm, name=name))
        else:
            told_apart.append(arm)
    return told_apart


def without_stopped(arms: Sequence[RunsOfArm]) -> tuple[list[RunsOfArm], dict[str, str]]:
    """The arms without runs that stopped early, as after a crash, and {run: what to say of it}.

    At the last step of such a run the others had hardly trained, so no comparison would see what
    they came to. An arm that would have one run left keeps all.
    """
    compared: list[RunsOfArm] = []
    remarks: dict[str, str] = {}
    for arm in arms:
        usual = statistics.median_high(run.last_step for run in arm.runs)
        whole = [run for run in arm.runs if run.last_step >= FAR * usual]
        if len(whole) >= FEWEST_RUNS:
            compared.append(replace(arm, runs=whole))
            then = LEFT_OUT
        else:
            compared.append(arm)
            then = "the tables compare the arms there"
        for run in arm.runs:
            if run not in whole:
                remarks[run.name] = (
                    f"{run.name} got to step {run.last_step}, and most runs of {arm.name} to "
                    f"{usual}: {then}"
                )
    return compared, remarks


def last_common_step(arms: Sequence[RunsOfArm]) -> int:
    """The last step that all runs have got to, of those that have trained."""
    ends = (run.last_step for arm in arms for run in arm.runs)
    return min((end for end in ends if end > 0), default=0)


def ends_apart(arms: Sequence[RunsOfArm]) -> str:
    """What to say of runs that end at different steps; "" where all end at one."""
    last = last_common_step(arms)
    later = any(run.last_step > last for arm in arms for run in arm.runs)
    if not later:
        return ""
    return f" up to step {last}, the last one that all runs have"


def names(arms: Sequence[RunsOfArm], read: ReadEach) -> list[str]:
    """Every name that some run has, in the order of its first appearance."""
    every: list[str] = []
    for arm in arms:
        for run in arm.runs:
            every.extend(read(run))
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
    curves_of_runs = []
    for run in arm.runs:
        curve = read(run)
        if curve:
            curves_of_runs.append(trailing_mean(curve, smooth))
    if not curves_of_runs:
        return {}
    if len(curves_of_runs) == 1:
        return {"": curves_of_runs[0]}

    # A row for each step, and a column for each run.
    values = pd.concat([pd.Series(curve) for curve in curves_of_runs], axis=1).sort_index()
    return {
        "": values.quantile(0.5, axis=1).to_dict(),
        "low": values.quantile(0.25, axis=1).to_dict(),
        "high": values.quantile(0.75, axis=1).to_dict(),
    }


def trailing_mean(curve: Curve, window: int) -> dict[int, float]:
    """At each step the mean of the last `window` values, of fewer at the start or at a gap.

    A step whose own value is NaN stays one.
    """
    values = pd.Series(curve)
    # pandas adds up the values of a window, whose sum may be more than a float holds.
    unit = max(1.0, values.abs().max() / LARGEST_SUMMED)
    in_units = values / unit
    means = in_units.rolling(window, min_periods=1).mean().where(values.notna())
    return dict((means * unit).items())
