"""The limits and rules that find what is wrong with a run, by a step and by what is usual.

What happens to what they see is in `findings.py`.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from verl_gdpo.tools.run_folder.folder import SCORE, SCORE_IN_VALIDATION, VALIDATION_KEY

HOLD = 5  # steps, for what breaks at once
USUAL = 20  # values that make a usual level
RECENT = 5  # values that make a present level
SPAN = 10  # values whose median is compared with a limit, for what may change slowly
LONG = 30  # values whose mean is compared, for what a mini-batch of small runs shows by chance
CONSTANT = 0.05  # share of groups in which a reward still differs
SURE_OF_CONSTANT = 2.0  # standard errors of that share
AT_BOUND = 0.9  # share of samples
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean
IGNORED = 0.05  # of the part that a reward would have if all that differ had the same
SHORTER, LONGER = 0.4, 2.45  # than when the reward was best
LOST = 0.15  # of a reward's range, while the length changes
VALIDATIONS = 24  # that make a trend
FALL, RISE = 0.075, 0.05  # of a reward's range: of validation, and of training meanwhile
SURE_OF_TREND = 3.5  # standard deviations of the slope


class Symptom(NamedTuple):
    """What a rule sees at one step."""

    topic: str
    holds: bool
    what: str
    advice: str
    hold: int = HOLD


class Level:
    """What is usual for one metric of a run. It does not grow with the steps."""

    def __init__(self) -> None:
        self.start = math.nan  # median of the first `USUAL` values
        self.window: deque[float] = deque(maxlen=LONG)
        # the best mean of `USUAL` values, their noise, and the length of responses then
        self.best, self.noise, self.length_at_best = -math.inf, 0.0, math.nan
        self.low, self.high = math.inf, -math.inf  # of a single sample; unknown is infinitely far

    def add(self, value: float) -> None:
        self.window.append(value)
        if len(self.window) == USUAL:
            self.start = statistics.median(self.window)

    def latest(self, count: int) -> Sequence[float]:
        """The last values, or NaN as long as there are fewer."""
        return [*self.window][-count:] if len(self.window) >= count else [math.nan] * count

    def mean(self, count: int = LONG) -> float:
        return sum(self.latest(count)) / count

    def error(self, mean: float) -> float:
        """Return the standard error of the mean of `LONG` values."""
        return math.sqrt(sum((value - mean) * (value - mean) for value in self.latest(LONG))) / LONG

    def add_mean(self, value: float, length: "Level") -> None:
        """Take the mean of a reward at a step, which `length` has seen already."""
        self.add(value)
        before = self.latest(USUAL + RECENT)[:USUAL]
        if (mean := sum(before) / USUAL) > self.best:
            self.best = mean
            self.length_at_best = statistics.median(length.latest(USUAL + RECENT)[:USUAL])
            squares = sum((a - b) * (a - b) for a, b in pairwise(before))
            self.noise = math.sqrt(squares / (2 * USUAL - 2))


LOWER = "Lower the learning rate, and go on from a checkpoint before these steps"


class Limit(NamedTuple):
    """When a metric of verl is broken, by its value, or the median of some, and by its start."""

    topic: str
    is_broken: Callable[[float, float], bool]
    what: str
    advice: str = LOWER


LENGTH = "response_length/mean"
# of one value; the other limits are of a median of `SPAN`
AT_ONCE = {"gradient", "aborted"}
TRAINED = {SCORE_IN_VALIDATION: SCORE}  # what training calls it
LIMITS = {
    "actor/grad_norm": Limit(
        "gradient",
        lambda value, start: value > 1000 or value > max(50 * start, 10),
        "the gradient norm is {value:,.3g}; at the start it was {start:.2g}",
    ),
    "actor/entropy": Limit(
        "entropy",
        lambda value, start: value < 0.115 * start,
        "the entropy is {value:.2g}, and was {start:.2g}: the samples of a prompt become alike",
        LOWER + ", or set actor.entropy_coeff",
    ),
    "actor/ppo_kl": Limit(
        "update",
        lambda value, start: value > max(10 * start, 0.1),
        "one update changes the policy by a KL of {value:.2g}; at the start it was {start:.2g}",
    ),
    "actor/kl_loss": Limit(
        "reference",
        lambda value, start: value > max(10 * start, 1.2),
        "the KL to the reference policy is {value:.2g}; at the start it was {start:.2g}",
        LOWER + ", or raise actor.kl_loss_coef",
    ),
    "actor/pg_clipfrac": Limit(
        "clipped",
        lambda value, _: value > 0.5,
        "{value:.0%} of the tokens are clipped, and train nothing",
    ),
    "response_length/clip_ratio": Limit(
        "length limit",
        lambda value, _: value > 0.5,
        "{value:.0%} of the responses are as long as the longest: they are cut off or all alike",
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


def fallen_rewards(values: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that falls to almost nothing, or that falls while the length changes."""
    length = levels[LENGTH]
    if math.isfinite(tokens := values.get(LENGTH, math.nan)):
        length.add(tokens)
    now = statistics.median(length.latest(SPAN))
    for name, of_one in rewards.items():
        level = levels[name]
        if math.isfinite(mean := of_one.get("mean", math.nan)):
            level.add_mean(mean, length)
        level.low = min(level.low, of_one.get("min", math.inf))
        level.high = max(level.high, of_one.get("max", -math.inf))
        height = level.best - (level.low if math.isfinite(level.low) else 0.0)
        recent = level.mean(RECENT)
        fallen = level.best - recent
        yield Symptom(
            f"collapse {name}",
            height > 0 and fallen > max((1 - COLLAPSED) * height, SURE_OF_COLLAPSE * level.noise),
            f"{name} is {recent:.3g}, and was {level.best:.3g}: almost all of it is lost",
            LOWER,
        )
        then = level.length_at_best
        yield Symptom(
            f"length {name}",
            fallen > LOST * abs(level.high - level.low)
            and (now < SHORTER * then or now > LONGER * then),
            f"the responses have {now:.4g} tokens, and had {then:.4g} when {name} was best; since "
            f"then it fell from {level.best:.3g} to {recent:.3g}",
            f"Read some: another reward may pay for length alone. Give it the condition {name}",
        )


def constant_rewards(_: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that is the same in nearly all groups: not reached, or reached everywhere."""
    for name, of_one in rewards.items():
        if not math.isfinite(of_one.get("varies", math.nan)):
            continue
        level, mean = levels[name], of_one.get("mean", math.nan)
        levels[f"{name}/varies"].add(of_one["varies"])
        varies = levels[f"{name}/varies"].mean()
        top = level.low + AT_BOUND * (level.high - level.low)
        is_reached = of_one.get("at_high", float(mean > top)) > AT_BOUND
        verdict = "is reached, and trains nothing" if is_reached else "trains nothing"
        yield Symptom(
            f"constant {name}",
            varies + SURE_OF_CONSTANT * levels[f"{name}/varies"].error(varies) < CONSTANT,
            f"{name} is {mean:.3g} and differs in {varies:.1%} of the groups of {LONG} "
            f"steps: it {verdict}",
            "If it is solved, end its weight by a schedule, or use harder prompts. Else look at "
            "its scorer, or use easier prompts, a supervised start, or more samples of a prompt",
        )


def ignored_rewards(_: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that differs, and has had no part in the advantage since the start."""
    differs = {
        name: of_one["varies"] * (1 - of_one.get("missing", 0.0))
        for name, of_one in rewards.items()
        if math.isfinite(of_one.get("varies", math.nan) + of_one.get("share", math.nan))
    }
    total = sum(differs.values())
    if total <= 0:
        return
    for name in differs:
        share, least = levels[f"{name}/share"], levels[f"{name}/least"]
        share.add(rewards[name]["share"])
        least.add(IGNORED * differs[name] / total)
        varies = levels[f"{name}/varies"].mean()
        yield Symptom(
            f"ignored {name}",
            share.start < least.start and share.mean() < least.mean() and varies > 2 * CONSTANT,
            f"{name} differs in {varies:.0%} of the groups, and its share of the update is "
            f"{share.mean():.1%}: the updates ignore it",
            "Raise its weight. If another reward cancels it, make one the condition of the other",
        )


def fallen_validations(values: Values, _: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that falls in validation, over all data sources, while it rises in training."""
    tested: defaultdict[str, list[float]] = defaultdict(list)
    for key, value in values.items():
        match = VALIDATION_KEY.fullmatch(key) if key.startswith("val-") else None
        if match and math.isfinite(value):
            tested[TRAINED.get(match["reward"], match["reward"])].append(value)
    for name, means in tested.items():
        level, test, train = (levels[key] for key in (name, f"{name}/test", f"{name}/train"))
        if math.isfinite(trained := level.mean(RECENT)):
            test.add(sum(means) / len(means))
            train.add(trained)
        (change, noise), (rise, _noise) = trend(test), trend(train)
        of_range = abs(level.high - level.low)
        yield Symptom(
            f"validation {name}",
            -change > max(FALL * of_range, SURE_OF_TREND * noise) and rise > RISE * of_range,
            f"{name} fell by {-change:.3g} in {VALIDATIONS} validations, and rose by {rise:.3g} "
            "in training",
            "Use the checkpoint of the best validation, and train on more prompts",
            hold=1,
        )


def trend(level: Level) -> tuple[float, float]:
    """Return (rise of the line through the last validations, its standard error), or NaN."""
    values, n = level.latest(VALIDATIONS), VALIDATIONS
    middle, mean = (n - 1) / 2, sum(values) / n
    slope = 12 * sum((k - middle) * value for k, value in enumerate(values)) / (n * (n * n - 1))
    rests = [value - mean - slope * (k - middle) for k, value in enumerate(values)]
    noise = math.sqrt(sum(rest * rest for rest in rests) / (n - 2))
    return slope * (n - 1), noise * math.sqrt(12 * (n - 1) / (n * (n + 1)))
