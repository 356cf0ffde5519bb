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
from verl_gdpo.tasks import main_rewards

HOLD = 5  # steps, for what is broken
LONG = 20  # steps, for what a mini-batch of small runs shows by chance
CONSTANT = 0.01  # share of groups in which a reward still differs
AT_BOUND = 0.9  # share of samples
DRIVEN = 0.5  # share of the squared advantages
LOWERED = -0.1  # correlation of a reward's contribution with the advantage
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean


class Seen(NamedTuple):
    """What a rule sees at one step; `what` and `advice` are templates for `numbers`."""

    topic: str
    holds: bool
    what: str
    advice: str
    numbers: Mapping[str, object]
    hold: int = LONG


@dataclass
class Memory:
    """What the rules remember of a run; it does not grow with the steps."""

    levels: dict[str, Level] = field(default_factory=dict)
    validations: dict[str, Validations] = field(default_factory=dict)
    has_names: bool = False  # of rewards, so that their sum says nothing more

    def level(self, name: str) -> Level:
        if name not in self.levels:
            self.levels[name] = Level()
        return self.levels[name]


@dataclass(frozen=True)
class Row:
    """The metrics of one step; `rewards` is {(reward, data source or ""): {statistic: value}}."""

    step: int
    values: Mapping[str, float]
    rewards: Mapping[tuple[str, str], Mapping[str, float]]

    @classmethod
    def of(cls, step: int, values: Mapping[str, float]) -> "Row":
        rewards: dict[tuple[str, str], dict[str, float]] = {}
        for key, value in values.items():
            if found := _statistic(key):
                rewards.setdefault(found[:2], {})[found[2]] = value
        return cls(step, values, rewards)

    def of_names(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Of each reward, without data sources and without the sum."""
        return ((r, of_one) for (r, s), of_one in self.rewards.items() if not s and r != SCORE)


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


class Limit(NamedTuple):
    """When a metric of verl is broken, by its value and its level."""

    topic: str
    is_broken: Callable[[float, Level], bool]
    what: str
    advice: str


LOWER = "Lower the learning rate, and go on from a checkpoint before these steps"
ADVANTAGES = "critic/advantages"  # the larger of /min and /max
LIMITS = {
    "actor/grad_norm": Limit(
        "gradient",
        lambda value, of: value > 1000 or value > max(50 * of.start, 10),
        "the gradient norm {is} {value:,.3g}; at the start it was {start:.2g}",
        LOWER,
    ),
    "actor/entropy": Limit(
        "entropy",
        lambda value, of: value < min(0.02 * of.start, 1e-3),
        "the entropy {is} {value:.2g}: all samples of a prompt {are} nearly the same; at the start "
        "it was {start:.2g}",
        LOWER + ", or set actor.entropy_coeff",
    ),
    "actor/ppo_kl": Limit(
        "update",
        lambda value, of: value > 0.1 and value > 10 * of.usual,
        "one update changes the policy by a KL of {value:.2g}; before, it was {usual:.2g}",
        LOWER,
    ),
    "actor/kl_loss": Limit(
        "reference",
        lambda value, of: value > 0.1 and value > 10 * of.usual,
        "the KL to the reference policy {is} {value:.2g}, after {usual:.2g}",
        LOWER + ", or raise actor.kl_loss_coef",
    ),
    "actor/pg_clipfrac": Limit(
        "clipped",
        lambda value, of: value > max(5 * of.start, 0.5),
        "{value:.0%} of the tokens {are} clipped, and train nothing; at the start {start:.0%} were",
        LOWER,
    ),
    ADVANTAGES: Limit(
        "advantages",
        lambda value, of: value > 20 * of.start,
        "|A| {is} up to {value:,.3g}; at the start it was up to {start:.2g}",
        "Set algorithm.filter_groups.enable=True, or ++algorithm.gdpo.batch_norm=none with a "
        "lower learning rate, and look at the rewards for outliers",
    ),
    "response_length/clip_ratio": Limit(
        "length limit",
        lambda value, of: value > 0.5 and of.start < 0.25,
        "{value:.0%} of the responses {are} as long as the longest, so they {are} cut off or "
        "all alike; at the start {start:.0%} were",
        "Read some of them; raise data.max_response_length, or reward shorter answers",
    ),
    "response/aborted_ratio": Limit(
        "aborted",
        lambda value, _: value > 0.2,
        "{value:.0%} of the responses {are} empty: their rollouts were aborted",
        "Look in train.log for what the rollout servers said",
    ),
}


def broken_training(row: Row, memory: Memory) -> Iterator[Seen]:
    """A metric of verl that is far from what it was."""
    for name, limit in LIMITS.items():
        value = row.values.get(name, math.nan)
        if name == ADVANTAGES:
            value = max(abs(row.values.get(f"{name}/{end}", math.nan)) for end in ("min", "max"))
        if not math.isfinite(value):
            continue
        level = memory.level(name)
        level.add(value)
        holds = limit.is_broken(value, level)
        if not holds:
            level.near.append(value)
        numbers = {"value": value, "start": level.start, "usual": level.usual} if holds else {}
        yield Seen(limit.topic, holds, limit.what, limit.advice, numbers, HOLD)


def no_numbers(row: Row, _: Memory) -> Iterator[Seen]:
    """Rewards, gradients or losses that are NaN or infinite."""
    named = ("actor/grad_norm", "actor/entropy", "actor/pg_loss", "critic/score/mean")
    means = [key for key in row.values if (parts := _statistic(key)) and parts[2] == "mean"]
    looked_at = {name for name in (*named, *means) if name in row.values}
    bad = sorted(name for name in looked_at if not math.isfinite(row.values[name]))
    if looked_at:
        numbers = {"names": ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if bad[3:] else "")}
        yield Seen(
            "no number",
            bool(bad),
            "{names} {is} NaN or infinite",
            "Look for the first such step in train.log, and go on from a checkpoint before it",
            numbers,
            HOLD,
        )


def collapsed_rewards(row: Row, memory: Memory) -> Iterator[Seen]:
    """A reward that falls from a good level to almost nothing."""
    memory.has_names |= any("mean" in values for _, values in row.of_names())
    of_sources = {reward for reward, source in row.rewards if source}
    for (reward, source), values in row.rewards.items():
        if "mean" not in values or (reward == SCORE and memory.has_names):
            continue
        level = memory.level(f"{reward} {source}")
        if math.isfinite(values["mean"]):
            level.add_mean(values["mean"])
        of_all = row.rewards.get((reward, ""), {})
        level.low = min(level.low, of_all.get("min", math.inf))
        level.high = max(level.high, of_all.get("max", -math.inf))
        if not source and reward in of_sources:
            continue  # said of each data source
        fallen = level.best - level.recent
        height = level.best - (level.low if math.isfinite(level.low) else 0.0)
        is_sure = fallen > SURE_OF_COLLAPSE * level.noise and height > 0
        holds = is_sure and fallen > (1 - COLLAPSED) * height
        name = f"{reward} ({source})" if source else reward
        yield Seen(
            f"collapse {name}",
            holds,
            "{name} {is} {now:.3g}, and was {best:.3g}: almost all of it {is} lost",
            LOWER,
            {"name": name, "now": level.recent, "best": level.best},
            1,
        )


def constant_rewards(row: Row, memory: Memory) -> Iterator[Seen]:
    """A reward that is the same in all groups, and is not reached."""
    for name, values in row.of_names():
        if "varies" not in values:
            continue
        level, mean = memory.level(f"{name} "), values.get("mean", math.nan)
        top = level.low + AT_BOUND * (level.high - level.low)
        at_high = values.get("at_high", float(mean > (top if level.high > level.low else 0)))
        yield Seen(
            f"constant {name}",
            values["varies"] < CONSTANT and at_high < AT_BOUND,
            "{name} {is} {mean:.3g} and does not differ in any group: it trains nothing",
            "If no sample is good enough, use easier prompts, a supervised start, a finer reward, "
            "or more samples of a prompt. Otherwise look at its scorer",
            {"name": name, "mean": mean},
        )


def wrong_answers(row: Row, _: Memory) -> Iterator[Seen]:
    """Groups without any right answer drive the update: the rewards beside the main one do."""
    for name, values in row.of_names():
        if name in main_rewards() and {"update_all_low", "varies"} <= values.keys():
            share = values["update_all_low"]
            yield Seen(
                f"wrong answers {name}",
                share > DRIVEN and values["varies"] >= CONSTANT,
                "{share:.0%} of the update {come} from groups in which no sample has more than "
                "the lowest {name}: the other rewards drive it",
                "Set algorithm.filter_groups.enable=True with metric={name}, let the other "
                "rewards count only where {name} is met, or use easier prompts",
                {"share": share, "name": name},
            )


def lowered_rewards(row: Row, memory: Memory) -> Iterator[Seen]:
    """A reward that is below its best, while the advantage opposes it."""
    for name, values in row.of_names():
        if "correlation" in values:
            level = memory.level(f"{name} ")
            fallen = level.best - level.recent > SURE_OF_COLLAPSE * level.noise
            yield Seen(
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


def falling_validation(row: Row, memory: Memory) -> Iterator[Seen]:
    """Validation that falls while training does not: the training rows are learned by heart."""
    for (reward, source), values in row.rewards.items():
        levels = (memory.levels.get(f"{reward} {one}") for one in (source, ""))
        trained = next(filter(None, levels), None)
        if "validation" not in values or trained is None:
            continue
        name = f"{reward} ({source})"
        known = memory.validations.setdefault(name, Validations())
        known.add(row.step, values["validation"], trained)
        begin, sure = known.fall()
        rise = known.rise_of_training(begin)
        yield Seen(
            f"validation {name}",
            rise > -2 and sure > known.sure_enough(rise),
            "validation of {name} {fall} from {best:.3f} to {now:.3f} since step {since}, while "
            "training goes from {before:.3f} to {after:.3f}",
            "The policy may learn the training rows by heart; the checkpoint of step {since} may "
            "be the best one",
            known.numbers(begin) | {"name": name},
            2,
        )


RULES: tuple[Callable[[Row, Memory], Iterator[Seen]], ...] = (
    no_numbers,
    broken_training,
    collapsed_rewards,
    falling_validation,
    constant_rewards,
    wrong_answers,
    lowered_rewards,
)
