"""Says what a person should know about a run, from its metrics alone.

A rule looks at one step after the other, and keeps a bounded memory, so that a step costs the same
at the end of a long run as at its start. What it looks for has to hold for some steps in a row
before it is said, and counts as one stretch until it has failed for as many. docs/tools.md lists
the rules, and docs/metrics.md says how often they are right (`python -m workshop.findings`).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from verl_gdpo.rewards import MAIN_REWARDS
from verl_gdpo.run.folder import SCORE, SCORE_IN_VALIDATION, TRAINING_KEY, VALIDATION_KEY, Metrics

HOLD = 5  # steps, for what is broken
LONG = 20  # steps, for what a mini-batch of small runs shows by chance
USUAL = 20  # values that make a usual level
RECENT = 5  # values that make a present level
CONSTANT = 0.01  # share of groups in which a reward still differs
AT_BOUND = 0.9  # share of samples
DRIVEN = 0.5  # share of the squared advantages
LOWERED = -0.1  # correlation of a reward's contribution with the advantage
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean
VALIDATIONS = 100  # the latest, that are remembered of a reward
FEWEST_FALLING = 6  # validations
SURE_OF_FALL = 3.8  # standard deviations, in two validations in a row; a trend is sought at each

NOW = {"is": "is", "are": "are", "differ": "differ", "come": "come", "fall": "falls"}
PAST = {"is": "was", "are": "were", "differ": "differed", "come": "came", "fall": "fell"}


@dataclass(frozen=True)
class Finding:
    """What was found, at which training steps, and what to do about it.

    `topic` stays the same while the numbers in `what` change.
    """

    topic: str
    what: str
    first: int
    last: int
    advice: str
    is_over: bool = False

    @property
    def steps(self) -> str:
        return f"steps {self.first} to {self.last}" + (", and not since" if self.is_over else "")

    def __str__(self) -> str:
        return f"{self.what} ({self.steps}). {self.advice}."


class Seen(NamedTuple):
    """What a rule sees at one step; `what` and `advice` are templates for `numbers`."""

    topic: str
    holds: bool
    what: str
    advice: str
    numbers: Mapping[str, object]
    hold: int = LONG


@dataclass
class Stretch:
    """The latest stretch of steps in which a condition holds.

    It begins with `hold` steps in a row, and ends before `hold` steps in a row without it.
    """

    hold: int
    trues: int = 0
    falses: int = 0
    since: int = 0
    begun: int | None = None
    found: tuple[int, int] | None = None
    seen: Seen | None = None  # at the last step of `found`

    def add(self, step: int, seen: Seen) -> None:
        if not seen.holds:
            self.trues, self.falses = 0, self.falses + 1
            if self.falses == self.hold:
                self.begun = None
            return
        self.since = self.since if self.trues else step
        self.trues, self.falses = self.trues + 1, 0
        if self.trues == self.hold and self.begun is None:
            self.begun = self.since
        if self.begun is not None:
            self.found, self.seen = (self.begun, step), seen

    def finding(self) -> Finding | None:
        if self.found is None or self.seen is None:
            return None
        is_over = self.begun is None
        words = {**(PAST if is_over else NOW), **self.seen.numbers}
        what, advice = (text.format_map(words) for text in (self.seen.what, self.seen.advice))
        return Finding(self.seen.topic, what, *self.found, advice, is_over)


class Level:
    """What is usual for one metric."""

    def __init__(self) -> None:
        self.start = math.nan  # median of the first `USUAL` values
        self.near: deque[float] = deque(maxlen=USUAL)  # the latest values that were not broken
        self.window: deque[float] = deque(maxlen=USUAL + RECENT)
        self.best, self.noise = -math.inf, 0.0  # the best mean of `USUAL` values, and their noise
        self.recent = math.nan  # the mean of the `RECENT` values after them
        self.low, self.high = math.inf, -math.inf  # of a single sample
        self.total, self.count = 0.0, 0

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
        self.total, self.count = self.total + value, self.count + 1
        if len(self.window) < USUAL + RECENT:
            return
        values = [*self.window]
        before, self.recent = values[:USUAL], _mean(values[USUAL:])
        if (mean := _mean(before)) > self.best:
            self.best = mean
            self.noise = math.sqrt(_mean([(a - b) * (a - b) for a, b in pairwise(before)]) / 2)


class Validations:
    """The latest validations of a reward, and the mean of training before each."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=VALIDATIONS)
        self.values: deque[float] = deque(maxlen=VALIDATIONS)
        self.trained: deque[float] = deque(maxlen=VALIDATIONS)
        self.until = 0.0, 0  # sum and number of training's values at the last validation

    def add(self, step: int, value: float, training: Level) -> None:
        total, count = training.total - self.until[0], training.count - self.until[1]
        if math.isfinite(value) and count:
            self.until = training.total, training.count
            self.steps.append(step)
            self.values.append(value)
            self.trained.append(total / count)

    def fall(self) -> tuple[int, float]:
        """Return (where the clearest fall begins that lasts until now, how sure it is).

        Both are of the trend of the values from there on, in standard deviations of its chance.
        """
        fewest = max(FEWEST_FALLING, len(self.values) // 3)
        falls = [(-rise, begin) for begin, rise in trends([*self.values], fewest)]
        sure, begin = max(falls, default=(0.0, 0))
        return begin, sure

    def rise_of_training(self, begin: int) -> float:
        tail = [*self.trained][begin:]
        return next((rise for at, rise in trends(tail, len(tail)) if at == 0), 0.0)

    def numbers(self, begin: int) -> dict[str, object]:
        values, trained = [*self.values][begin:], [*self.trained][begin:]
        ends = {
            "best": values[:3],
            "now": values[-3:],
            "before": trained[:3],
            "after": trained[-3:],
        }
        return {
            **{k: _mean(few or [math.nan]) for k, few in ends.items()},
            "since": [*self.steps, 0][begin],
        }


def trends(values: Sequence[float], fewest: int) -> Iterator[tuple[int, float]]:
    """Yield (begin, standard deviations by which the values rise) of each end of the values."""
    bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    # second differences, which a trend does not touch
    noise = math.sqrt(sum(bend * bend for bend in bends) / 6 / len(bends)) if bends else 0.0
    total = weighted = 0.0  # of the values from `begin` on; weighted by their index
    for begin in range(len(values) - 1, -1, -1):
        total, weighted = total + values[begin], weighted + begin * values[begin]
        count = len(values) - begin
        if count >= fewest and noise > 0:
            middle = (begin + len(values) - 1) / 2
            yield begin, (weighted - middle * total) / noise / math.sqrt((count**3 - count) / 12)


@dataclass
class Memory:
    """What the rules remember of a run; it does not grow with the steps."""

    levels: dict[str, Level] = field(default_factory=dict)
    validations: dict[str, Validations] = field(default_factory=dict)
    has_names: bool = False  # of rewards, so that their sum says nothing more
    unlike: set[tuple[str, ...]] = field(default_factory=set)  # rewards that are not the same
    changed: dict[str, set[float]] = field(default_factory=dict)

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


class Watch:
    """Takes the steps of a run in their order, and says what they show up to now."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.stretches: dict[str, Stretch] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step. Its validation may follow as another row of the same step."""
        row = Row.of(step, values)
        for rule in RULES:
            for seen in rule(row, self.memory):
                self.stretches.setdefault(seen.topic, Stretch(seen.hold)).add(step, seen)

    def findings(self) -> list[Finding]:
        """Return what was found, the latest first; what is over stands behind what is not."""
        found = [f for stretch in self.stretches.values() if (f := stretch.finding())]
        return sorted(found, key=lambda one: (one.is_over, -one.last))


def findings(metrics: Metrics) -> list[Finding]:
    """Return what the metrics {step: {name: value}} of a run show; empty for a healthy run."""
    watch = Watch()
    for step, values in sorted(metrics.items()):
        watch.add(step, values)
    return watch.findings()


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
        if name in MAIN_REWARDS and {"update_all_low", "varies"} <= values.keys():
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


def repeated_rewards(row: Row, memory: Memory) -> Iterator[Seen]:
    """A reward that is another one, or the sum of all others: it counts them twice."""
    means = {name: values["mean"] for name, values in row.of_names() if "mean" in values}
    for name, value in means.items():
        others = [other for other in means if other != name]
        candidates = [[other] for other in others if other < name]
        candidates += [others] if len(others) > 1 else []
        seen = memory.changed.setdefault(name, set())
        if len(seen) < 2 and math.isfinite(value):
            seen.add(value)
        for parts in candidates:
            key = (name, *parts)
            total = sum(means[part] for part in parts)
            if not math.isclose(value, total, rel_tol=1e-6, abs_tol=1e-9):
                memory.unlike.add(key)
            yield Seen(
                f"repeated {name} {' '.join(parts)}",
                key not in memory.unlike and len(seen) > 1,
                "{name} equals {sum} at every step: the same thing counts twice",
                "Give one of them the weight 0 in algorithm.gdpo.rewards",
                {"name": name, "sum": " + ".join(parts)},
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
        yield Seen(
            f"validation {name}",
            sure > SURE_OF_FALL and known.rise_of_training(begin) > -2,
            "validation of {name} {fall} from {best:.3f} to {now:.3f} since step {since}, while "
            "training goes from {before:.3f} to {after:.3f}",
            "The policy may learn the training rows by heart; the checkpoint of step {since} may "
            "be the best one",
            known.numbers(begin) | {"name": name},
            2,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


RULES: tuple[Callable[[Row, Memory], Iterator[Seen]], ...] = (
    no_numbers,
    broken_training,
    collapsed_rewards,
    falling_validation,
    constant_rewards,
    wrong_answers,
    lowered_rewards,
    repeated_rewards,
)
