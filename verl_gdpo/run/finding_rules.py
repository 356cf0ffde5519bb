"""The rules that find what is wrong with a run; each looks at one step, and at what is usual.

What happens to what they see is in `findings.py`.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from verl_gdpo.run.folder import SCORE

HOLD = 5  # steps, for what is broken
NAMED = 5  # metrics, in a message
LONG = 20  # steps, for what a mini-batch of small runs shows by chance
USUAL = 20  # values that make a usual level
RECENT = 5  # values that make a present level
CONSTANT = 0.01  # share of groups in which a reward still differs
AT_BOUND = 0.9  # share of samples
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean


class Symptom(NamedTuple):
    """What a rule sees at one step."""

    topic: str
    holds: bool
    what: str
    advice: str
    hold: int


class Level:
    """What is usual for one metric of a run. It does not grow with the steps."""

    def __init__(self) -> None:
        self.start = math.nan  # median of the first `USUAL` values
        self.near: deque[float] = deque(maxlen=USUAL)  # the latest values that were not broken
        self.window: deque[float] = deque(maxlen=USUAL + RECENT)
        self.best, self.noise = -math.inf, 0.0  # the best mean of `USUAL` values, and their noise
        self.recent = math.nan  # the mean of the `RECENT` values after them
        self.low, self.high = math.inf, -math.inf  # of a single sample

    def add(self, value: float) -> None:
        self.window.append(value)
        if len(self.window) == USUAL and math.isnan(self.start):
            self.start = statistics.median(self.window)

    @property
    def usual(self) -> float:
        return statistics.median(self.near) if len(self.near) == USUAL else math.nan

    def add_mean(self, value: float) -> None:
        """Take the mean of a reward at a step."""
        self.add(value)
        if len(self.window) < USUAL + RECENT:
            return
        values = [*self.window]
        before, self.recent = values[:USUAL], sum(values[USUAL:]) / RECENT
        if (mean := sum(before) / USUAL) > self.best:
            self.best = mean
            squares = [(a - b) * (a - b) for a, b in pairwise(before)]
            self.noise = math.sqrt(sum(squares) / len(squares) / 2)


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
        "the gradient norm is {value:,.3g}; at the start it was {start:.2g}",
        LOWER,
    ),
    "actor/entropy": Limit(
        "entropy",
        lambda value, of: value < min(0.02 * of.start, 1e-3),
        "the entropy is {value:.2g}, so all samples of a prompt are nearly the same; at the start "
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
        "the KL to the reference policy is {value:.2g}, after {usual:.2g}",
        LOWER + ", or raise actor.kl_loss_coef",
    ),
    "actor/pg_clipfrac": Limit(
        "clipped",
        lambda value, of: value > max(5 * of.start, 0.5),
        "{value:.0%} of the tokens are clipped, and train nothing; at the start {start:.0%} were",
        LOWER,
    ),
    ADVANTAGES: Limit(
        "advantages",
        lambda value, of: value > 20 * of.start,
        "|A| is up to {value:,.3g}; at the start it was up to {start:.2g}",
        "Set algorithm.filter_groups.enable=True, or ++algorithm.gdpo.batch_norm=none with a "
        "lower learning rate, and look at the rewards for outliers",
    ),
    "response_length/clip_ratio": Limit(
        "length limit",
        lambda value, of: value > 0.5 and of.start < 0.25,
        "{value:.0%} of the responses are as long as the longest, so they are cut off or "
        "all alike; at the start {start:.0%} were",
        "Read some of them; raise data.max_response_length, or reward shorter answers",
    ),
    "response/aborted_ratio": Limit(
        "aborted",
        lambda value, _: value > 0.2,
        "{value:.0%} of the responses are empty: their rollouts were aborted",
        "Look in train.log for what the rollout servers said",
    ),
}

Values = Mapping[str, float]  # of one step
Rewards = Mapping[str, Values]  # {reward: {statistic: value}} of one step
Levels = Mapping[str, Level]  # makes a level for a new name
STATISTICS = {"mean", "min", "max", "varies", "at_high"}


def rewards_of(values: Values) -> Rewards:
    """Return the statistics of each reward; of their sum, `SCORE`, only if there is no other."""
    rewards: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        if parts := _statistic(key):
            rewards.setdefault(parts[0], {})[parts[1]] = value
    named = {name: of_one for name, of_one in rewards.items() if name != SCORE}
    return named or rewards


@lru_cache(maxsize=4096)
def _statistic(key: str) -> tuple[str, str] | None:
    """Return (reward, statistic) of a metric."""
    prefix, _, rest = key.partition("/")
    reward, _, last = rest.rpartition("/")
    is_of_reward = reward and (prefix == "gdpo" or (prefix, reward) == ("critic", SCORE))
    return (reward, last) if is_of_reward and last in STATISTICS else None


def broken_training(values: Values, _: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A metric of verl that is far from what it was."""
    for name, limit in LIMITS.items():
        value = values.get(name, math.nan)
        if name == ADVANTAGES:
            value = max(abs(values.get(f"{name}/{end}", math.nan)) for end in ("min", "max"))
        if not math.isfinite(value):
            continue
        level = levels[name]
        level.add(value)
        holds = limit.is_broken(value, level)
        if not holds:
            level.near.append(value)
        what = limit.what.format(value=value, start=level.start, usual=level.usual) if holds else ""
        yield Symptom(limit.topic, holds, what, limit.advice, HOLD)


def no_numbers(values: Values, _rewards: Rewards, _levels: Levels) -> Iterator[Symptom]:
    """Any logged number, of training or validation, that is NaN or infinite at any step."""
    bad = sorted(name for name, value in values.items() if not math.isfinite(value))
    names = ", ".join([*bad[:NAMED], *([f"{len(bad) - NAMED} more"] if bad[NAMED:] else [])])
    yield Symptom(
        "no number",
        bool(bad),
        f"no finite number: {names}",
        "Look for the first such step in train.log, and go on from a checkpoint before it",
        hold=1,
    )


def collapsed_rewards(_: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that falls from a good level to almost nothing."""
    for name, of_one in rewards.items():
        if "mean" not in of_one:
            continue
        level = levels[name]
        if math.isfinite(of_one["mean"]):
            level.add_mean(of_one["mean"])
        level.low = min(level.low, of_one.get("min", math.inf))
        level.high = max(level.high, of_one.get("max", -math.inf))
        height = level.best - (level.low if math.isfinite(level.low) else 0.0)
        fallen = level.best - level.recent
        is_sure = height > 0 and fallen > SURE_OF_COLLAPSE * level.noise
        yield Symptom(
            f"collapse {name}",
            is_sure and fallen > (1 - COLLAPSED) * height,
            f"{name} is {level.recent:.3g}, and was {level.best:.3g}: almost all of it is lost",
            LOWER,
            1,
        )


def constant_rewards(_: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that is the same in all groups, and is not reached."""
    for name, of_one in rewards.items():
        if "varies" not in of_one:
            continue
        level, mean = levels[name], of_one.get("mean", math.nan)
        top = level.low + AT_BOUND * (level.high - level.low)
        at_high = of_one.get("at_high", float(mean > (top if level.high > level.low else 0)))
        yield Symptom(
            f"constant {name}",
            of_one["varies"] < CONSTANT and at_high < AT_BOUND,
            f"{name} is {mean:.3g} and does not differ in any group: it trains nothing",
            "If no sample is good enough, use easier prompts, a supervised start, a finer reward, "
            "or more samples of a prompt. Otherwise look at its scorer",
            LONG,
        )


RULES: tuple[Callable[[Values, Rewards, Levels], Iterator[Symptom]], ...] = (
    no_numbers,
    broken_training,
    collapsed_rewards,
    constant_rewards,
)
