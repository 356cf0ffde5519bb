"""The rules that find what is wrong with a run; each looks at one step, and at what is usual.

What happens to what they see is in `findings.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from verl_gdpo.run.folder import SCORE, SCORE_IN_VALIDATION, TRAINING_KEY, VALIDATION_KEY
from verl_gdpo.run.levels import Level, Validations
from verl_gdpo.run.metric_limits import ADVANTAGES, LIMITS, LOWER
from verl_gdpo.tasks import main_rewards

HOLD = 5  # steps, for what is broken
LONG = 20  # steps, for what a mini-batch of small runs shows by chance
CONSTANT = 0.01  # share of groups in which a reward still differs
AT_BOUND = 0.9  # share of samples
DRIVEN = 0.5  # share of the squared advantages
LOWERED = -0.1  # correlation of a reward's contribution with the advantage
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean


class Symptom(NamedTuple):
    """What a rule sees at one step; `what` and `advice` are templates for `numbers`."""

    topic: str
    holds: bool
    what: str
    advice: str
    numbers: Mapping[str, object]
    hold: int = LONG


@dataclass
class RunHistory:
    """What the rules remember of a run; it does not grow with the steps."""

    levels: dict[str, Level] = field(default_factory=dict)
    validations: dict[str, Validations] = field(default_factory=dict)
    has_names: bool = False  # of rewards, so that their sum says nothing more

    def level(self, name: str) -> Level:
        if name not in self.levels:
            self.levels[name] = Level()
        return self.levels[name]


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step; `rewards` is {(reward, data source or ""): {statistic: value}}."""

    number: int
    values: Mapping[str, float]
    rewards: Mapping[tuple[str, str], Mapping[str, float]]

    @classmethod
    def of(cls, number: int, values: Mapping[str, float]) -> "StepMetrics":
        rewards: dict[tuple[str, str], dict[str, float]] = {}
        for key, value in values.items():
            if parts := _statistic(key):
                rewards.setdefault(parts[:2], {})[parts[2]] = value
        return cls(number, values, rewards)

    def of_names(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Of each reward, without data sources and without the sum."""
        return (
            (reward, values)
            for (reward, source), values in self.rewards.items()
            if not source and reward != SCORE
        )


STATISTICS = {
    *("mean", "min", "max", "varies", "at_high", "update_all_low", "correlation", "validation")
}


@lru_cache(maxsize=4096)
def _statistic(key: str) -> tuple[str, str, str] | None:
    """Return (reward, data source, statistic) of a metric."""
    if match := TRAINING_KEY.fullmatch(key):
        return match["reward"], match["source"], "mean"
    if match := VALIDATION_KEY.fullmatch(key):
        name = SCORE if match["reward"] == SCORE_IN_VALIDATION else match["reward"]
        return name, match["source"], "validation"
    prefix, _, rest = key.partition("/")
    reward, _, last = rest.rpartition("/")
    if prefix == "gdpo" and reward and last in STATISTICS:
        return reward, "", last
    return (SCORE, "", last) if key in ("critic/score/mean", "critic/score/min") else None


def broken_training(step: StepMetrics, history: RunHistory) -> Iterator[Symptom]:
    """A metric of verl that is far from what it was."""
    for name, limit in LIMITS.items():
        value = step.values.get(name, math.nan)
        if name == ADVANTAGES:
            value = max(abs(step.values.get(f"{name}/{end}", math.nan)) for end in ("min", "max"))
        if not math.isfinite(value):
            continue
        level = history.level(name)
        level.add(value)
        holds = limit.is_broken(value, level)
        if not holds:
            level.near.append(value)
        numbers = {"value": value, "start": level.start, "usual": level.usual} if holds else {}
        yield Symptom(limit.topic, holds, limit.what, limit.advice, numbers, HOLD)


def no_numbers(step: StepMetrics, _: RunHistory) -> Iterator[Symptom]:
    """Rewards, gradients or losses that are NaN or infinite."""
    named = ("actor/grad_norm", "actor/entropy", "actor/pg_loss", "critic/score/mean")
    means = [key for key in step.values if (parts := _statistic(key)) and parts[2] == "mean"]
    looked_at = {name for name in (*named, *means) if name in step.values}
    bad = sorted(name for name in looked_at if not math.isfinite(step.values[name]))
    if looked_at:
        numbers = {"names": ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if bad[3:] else "")}
        yield Symptom(
            "no number",
            bool(bad),
            "{names} {is} NaN or infinite",
            "Look for the first such step in train.log, and go on from a checkpoint before it",
            numbers,
            HOLD,
        )


def collapsed_rewards(step: StepMetrics, history: RunHistory) -> Iterator[Symptom]:
    """A reward that falls from a good level to almost nothing."""
    history.has_names |= any("mean" in values for _, values in step.of_names())
    of_sources = {reward for reward, source in step.rewards if source}
    for (reward, source), values in step.rewards.items():
        if "mean" not in values or (reward == SCORE and history.has_names):
            continue
        level = history.level(f"{reward} {source}")
        if math.isfinite(values["mean"]):
            level.add_mean(values["mean"])
        of_all = step.rewards.get((reward, ""), {})
        level.low = min(level.low, of_all.get("min", math.inf))
        level.high = max(level.high, of_all.get("max", -math.inf))
        if not source and reward in of_sources:
            continue  # told of each data source
        fallen = level.best - level.recent
        height = level.best - (level.low if math.isfinite(level.low) else 0.0)
        is_sure = fallen > SURE_OF_COLLAPSE * level.noise and height > 0
        holds = is_sure and fallen > (1 - COLLAPSED) * height
        name = f"{reward} ({source})" if source else reward
        yield Symptom(
            f"collapse {name}",
            holds,
            "{name} {is} {now:.3g}, and was {best:.3g}: almost all of it {is} lost",
            LOWER,
            {"name": name, "now": level.recent, "best": level.best},
            1,
        )


def constant_rewards(step: StepMetrics, history: RunHistory) -> Iterator[Symptom]:
    """A reward that is the same in all groups, and is not reached."""
    for name, values in step.of_names():
        if "varies" not in values:
            continue
        level, mean = history.level(f"{name} "), values.get("mean", math.nan)
        top = level.low + AT_BOUND * (level.high - level.low)
        at_high = values.get("at_high", float(mean > (top if level.high > level.low else 0)))
        yield Symptom(
            f"constant {name}",
            values["varies"] < CONSTANT and at_high < AT_BOUND,
            "{name} {is} {mean:.3g} and does not differ in any group: it trains nothing",
            "If no sample is good enough, use easier prompts, a supervised start, a finer reward, "
            "or more samples of a prompt. Otherwise look at its scorer",
            {"name": name, "mean": mean},
        )


def wrong_answers(step: StepMetrics, _: RunHistory) -> Iterator[Symptom]:
    """Groups without any right answer drive the update: the rewards beside the main one do."""
    for name, values in step.of_names():
        if name in main_rewards() and {"update_all_low", "varies"} <= values.keys():
            share = values["update_all_low"]
            yield Symptom(
                f"wrong answers {name}",
                share > DRIVEN and values["varies"] >= CONSTANT,
                "{share:.0%} of the update {come} from groups in which no sample has more than "
                "the lowest {name}: the other rewards drive it",
                "Set algorithm.filter_groups.enable=True with metric={name}, let the other "
                "rewards count only where {name} is met, or use easier prompts",
                {"share": share, "name": name},
            )


def lowered_rewards(step: StepMetrics, history: RunHistory) -> Iterator[Symptom]:
    """A reward that is below its best, while the advantage opposes it."""
    for name, values in step.of_names():
        if "correlation" in values:
            level = history.level(f"{name} ")
            fallen = level.best - level.recent > SURE_OF_COLLAPSE * level.noise
            yield Symptom(
                f"lowered {name}",
                values["correlation"] < LOWERED and fallen,
                "training lowers {name}, from {best:.3g} to {now:.3g}: its part of the advantage "
                "has the correlation {value:.2f} with the whole",
                "The other rewards oppose it; raise its weight, or give them a condition",
                {
                    "name": name,
                    "best": level.best,
                    "now": level.recent,
                    "value": values["correlation"],
                },
            )


def falling_validation(step: StepMetrics, history: RunHistory) -> Iterator[Symptom]:
    """Validation that falls while training does not: the training rows are learned by heart."""
    for (reward, source), values in step.rewards.items():
        levels = (history.levels.get(f"{reward} {one}") for one in (source, ""))
        trained = next(filter(None, levels), None)
        if "validation" not in values or trained is None:
            continue
        name = f"{reward} ({source})"
        known = history.validations.setdefault(name, Validations())
        known.add(step.number, values["validation"], trained)
        begin, sure = known.fall()
        rise = known.rise_of_training(begin)
        yield Symptom(
            f"validation {name}",
            rise > -2 and sure > known.sure_enough(rise),
            "validation of {name} {fall} from {best:.3f} to {now:.3f} since step {since}, while "
            "training goes from {before:.3f} to {after:.3f}",
            "The policy may learn the training rows by heart; the checkpoint of step {since} may "
            "be the best one",
            known.numbers(begin) | {"name": name},
            2,
        )


RULES: tuple[Callable[[StepMetrics, RunHistory], Iterator[Symptom]], ...] = (
    no_numbers,
    broken_training,
    collapsed_rewards,
    falling_validation,
    constant_rewards,
    wrong_answers,
    lowered_rewards,
)
