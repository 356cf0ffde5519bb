"""The limits and rules that find what is wrong with a run, by a step and by what is usual.

What happens to what they see is in `findings.py`.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from verl_gdpo.tools.run_folder.folder import SCORE, SCORE_IN_VALIDATION, VALIDATION_KEY
from verl_gdpo.tools.run_folder.levels import LONG, RECENT, Level, Trade

HOLD = 5  # steps, for what breaks at once
SPAN = 10  # values whose median is compared with a limit, for what may change slowly
CONSTANT = 0.05  # share of groups in which a reward still differs
SURE_OF_CONSTANT = 2.0  # standard errors of that share
AT_BOUND = 0.9  # share of samples
COLLAPSED = 0.1  # of the way from the lowest reward of a sample to the best level of the run
SURE_OF_COLLAPSE = 3.0  # standard deviations of a single step's mean
IGNORED = 0.05  # of the part that a reward would have if all that differ had the same
SHORTER = 0.4  # than when the reward was best
LONGER = 2.45  # the same
LOST = 0.15  # of a reward's range, while the length changes
RISE = 0.05  # of a reward's range, in training, while it falls in validation
STILL = 10  # steps that train nothing
NOTHING = 1e-8  # the gradient norm, or the largest advantage, of such a step
TRADED = 0.19  # of a reward's range: what it loses
GAINED = 0.17  # of a reward's range: what it gains while another loses
GAIN_OF_LOSS = 0.7  # what another gains of its own range, as a part of what is lost
SURE_OF_LOSS = 5.5  # standard deviations of a difference of two blocks
SURE_OF_GAIN = 3.0  # the same
FEW = 8  # rewards: of more, one rises by chance while another falls


class Trend(NamedTuple):
    """How far a reward has to fall over so many validations: large falls take few of them."""

    validations: int
    fall: float  # of a reward's range
    errors: float  # standard errors of the slope


# Fewer validations know their own noise less: these are quantiles of Student's t. Each is where
# about the same share of the healthy runs is told.
TRENDS = (
    Trend(24, 0.075, 3.5),
    Trend(16, 0.10, 5.8),
    Trend(10, 0.15, 7.9),
    Trend(7, 0.20, 12.0),
)
VALIDATIONS = max(trend.validations for trend in TRENDS)


class Symptom(NamedTuple):
    """What a rule sees at one step."""

    topic: str
    holds: bool
    what: str
    advice: str
    hold: int = HOLD
    since: int | None = None  # the step at which what is seen began, if that is before this step


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


def fallen_rewards(
    step: int, values: Values, rewards: Rewards, levels: Levels
) -> Iterator[Symptom]:
    """A reward that falls to almost nothing, or that falls while the length changes."""
    length = levels[LENGTH]
    tokens = values.get(LENGTH, math.nan)
    if math.isfinite(tokens):
        length.add(step, tokens)
    length_now = statistics.median(length.latest(SPAN))
    for name, of_one in rewards.items():
        level = levels[name]
        mean = of_one.get("mean", math.nan)
        if math.isfinite(mean):
            level.add_mean(step, mean, length)
        level.low = min(level.low, of_one.get("min", math.inf))
        level.high = max(level.high, of_one.get("max", -math.inf))
        yield _collapse(name, level)
        yield _fall_with_length(name, level, length_now)


def _collapse(name: str, level: Level) -> Symptom:
    """Return the symptom of a reward that falls to almost nothing."""
    height = level.best
    if math.isfinite(level.low):
        height -= level.low
    recent = level.mean(RECENT)
    least = max((1 - COLLAPSED) * height, SURE_OF_COLLAPSE * level.noise)
    return Symptom(
        f"collapse {name}",
        height > 0 and level.best - recent > least,
        f"{name} is {recent:.3g}, and was {level.best:.3g}: almost all of it is lost",
        LOWER,
        since=level.worse_since,
    )


def _fall_with_length(name: str, level: Level, length_now: float) -> Symptom:
    """Return the symptom of a reward that falls while the length changes.

    length_now: of the responses, in tokens.
    """
    recent = level.mean(RECENT)
    is_lost = level.best - recent > LOST * abs(level.high - level.low)
    length_then = level.length_at_best
    is_other = length_now < SHORTER * length_then or length_now > LONGER * length_then
    return Symptom(
        f"length {name}",
        is_lost and is_other,
        f"the responses have {length_now:.4g} tokens, and had {length_then:.4g} when {name} was "
        f"best; since then it fell from {level.best:.3g} to {recent:.3g}",
        f"Read some: another reward may pay for length alone. Give it the condition {name}",
        since=level.worse_since,
    )


def constant_rewards(step: int, _: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that is the same in nearly all groups: not reached, or reached everywhere."""
    for name, of_one in rewards.items():
        if not math.isfinite(of_one.get("varies", math.nan)):
            continue
        differs = levels[f"{name}/varies"]
        differs.add(step, of_one["varies"])
        varies = differs.mean()
        holds = varies + SURE_OF_CONSTANT * differs.error(varies) < CONSTANT
        since = None
        if holds:
            since = differs.first_of(LONG, lambda share: share < CONSTANT)

        level = levels[name]
        mean = of_one.get("mean", math.nan)
        top = level.low + AT_BOUND * (level.high - level.low)
        # A reward without declared bounds has no share of samples at its upper one.
        at_high = of_one.get("at_high", float(mean > top))
        verdict = "trains nothing"
        if at_high > AT_BOUND:
            verdict = "is reached, and trains nothing"
        yield Symptom(
            f"constant {name}",
            holds,
            f"{name} is {mean:.3g} and differs in {varies:.1%} of the groups of {LONG} "
            f"steps: it {verdict}",
            "If it is solved, end its weight by a schedule, or use harder prompts. Else look at "
            "its scorer, or use easier prompts, a supervised start, or more samples of a prompt",
            since=since,
        )


def ignored_rewards(step: int, _: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that differs, and has had no part in the advantage since the start."""
    differs = {}
    for name, of_one in rewards.items():
        if math.isfinite(of_one.get("varies", math.nan) + of_one.get("share", math.nan)):
            differs[name] = of_one["varies"] * (1 - of_one.get("missing", 0.0))
    total = sum(differs.values())
    if total <= 0:
        return
    for name in differs:
        share = levels[f"{name}/share"]
        least = levels[f"{name}/least"]
        share.add(step, rewards[name]["share"])
        least.add(step, IGNORED * differs[name] / total)
        varies = levels[f"{name}/varies"].mean()
        was_ignored = share.start < least.start
        is_ignored = share.mean() < least.mean()
        yield Symptom(
            f"ignored {name}",
            was_ignored and is_ignored and varies > 2 * CONSTANT,
            f"{name} differs in {varies:.0%} of the groups, and its share of the update is "
            f"{share.mean():.1%}: the updates ignore it",
            "Raise its weight. If another reward cancels it, make one the condition of the other",
            since=share.steps[0],
        )


def traded_rewards(step: int, _: Values, rewards: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that falls while another one rises, whatever the length does."""
    if len(rewards) > FEW:
        return
    ended = []
    for name, of_one in rewards.items():
        mean = of_one.get("mean", math.nan)
        if math.isfinite(mean) and levels[name].add_to_block(step, mean):
            ended.append(name)
    for name in ended:
        level = levels[name]
        _update_trade(name, ended, levels)
        topic = f"traded {name}"
        if level.trade is None:
            yield Symptom(topic, False, "", "", hold=1)
            continue
        trade = level.trade
        yield Symptom(
            topic,
            True,
            f"{name} fell from {trade.before:.3g} to {level.blocks[-1].mean:.3g}, while "
            f"{trade.gained} rose from {trade.gained_from:.3g} to {trade.gained_to:.3g}",
            f"Read some responses: {trade.gained} may pay for what {name} loses. Give it the "
            f"condition {name}, or lower its weight",
            hold=1,
            since=trade.since,
        )


def _update_trade(name: str, ended: Sequence[str], levels: Levels) -> None:
    """Begin the trade of a reward whose block has ended, or end it where the reward is back."""
    level = levels[name]
    of_range = level.high - level.low
    if of_range <= 0:
        # What is logged of the reward does not fit together.
        return
    lost = max(TRADED * of_range, SURE_OF_LOSS * level.error_of_blocks())
    now = level.blocks[-1].mean
    if level.trade is not None:
        if now > level.trade.before - lost / 2:
            level.trade = None
        return
    was_lower = level.is_lower
    count = _blocks_of_loss(level, lost)
    level.is_lower = count > 0
    # A loss is judged once, over the shortest time in which it happened: what another reward gains
    # afterwards is not its price.
    if level.is_lower and not was_lower:
        level.trade = _trade(name, count, ended, levels)


def _blocks_of_loss(level: Level, lost: float) -> int:
    """Return in how many blocks, at least, a reward has lost so much; 0 if it has not."""
    for count in range(1, len(level.blocks)):
        if level.blocks[-1 - count].mean - level.blocks[-1].mean > lost:
            return count
    return 0


def _trade(name: str, count: int, ended: Sequence[str], levels: Levels) -> Trade | None:
    """Return the trade with the reward that gained most in these blocks, if that is enough."""
    trade = None
    fallen = levels[name]
    before = fallen.blocks[-1 - count].mean
    loss = before - fallen.blocks[-1].mean
    most = max(GAINED, GAIN_OF_LOSS * loss / (fallen.high - fallen.low))
    for other in ended:
        level = levels[other]
        if other == name or len(level.blocks) <= count or level.high <= level.low:
            continue
        first = level.blocks[-1 - count]
        last = level.blocks[-1]
        gain = last.mean - first.mean
        of_range = gain / (level.high - level.low)
        is_sure = gain > SURE_OF_GAIN * level.error_of_blocks()
        is_new = last.mean - _highest_until(level, count) > gain / 2
        if of_range > most and is_sure and is_new:
            most = of_range
            trade = Trade(
                since=fallen.blocks[-count].first,
                before=before,
                gained=other,
                gained_from=first.mean,
                gained_to=last.mean,
            )
    return trade


def _highest_until(level: Level, count: int) -> float:
    """Return the highest mean of a block before the last ones; to be back there is no gain."""
    kept = list(level.blocks)[:-count]
    return max(level.highest_before, max(block.mean for block in kept))


def fallen_validations(step: int, values: Values, _: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A reward that falls in validation, over all data sources, while it rises in training."""
    tested: defaultdict[str, list[float]] = defaultdict(list)
    for key, value in values.items():
        # Most metrics are of other kinds, and need no match.
        if not key.startswith("val-"):
            continue
        match = VALIDATION_KEY.fullmatch(key)
        if match and math.isfinite(value):
            reward = match["reward"]
            tested[TRAINED.get(reward, reward)].append(value)
    for name, means in tested.items():
        level = levels[name]
        test = levels[f"{name}/test"]
        train = levels[f"{name}/train"]
        trained = level.mean(RECENT)
        if math.isfinite(trained):
            test.add(step, sum(means) / len(means))
            train.add(step, trained)
        yield _fallen_validation(name, test, train, abs(level.high - level.low))


def _fallen_validation(name: str, test: Level, train: Level, of_range: float) -> Symptom:
    """Return the symptom of one reward: of the longest time over which it has fallen.

    Args:
        test: the means of the reward in validation.
        train: its level in training at the same times.
        of_range: the range of the reward.
    """
    topic = f"validation {name}"
    for count, fall, errors in TRENDS:
        change, noise = trend(test, count)
        rise, _ = trend(train, count)
        if -change > max(fall * of_range, errors * noise) and rise > RISE * of_range:
            return Symptom(
                topic,
                True,
                f"{name} fell by {-change:.3g} in {count} validations, and rose by {rise:.3g} in "
                "training",
                "Use the checkpoint of the best validation, and train on more prompts",
                hold=1,
                since=_best_step(test, count),
            )
    return Symptom(topic, False, "", "", hold=1)


def _best_step(level: Level, n: int) -> int:
    """Return the step of the highest of the last `n` values."""
    latest = list(zip(level.window, level.steps, strict=True))[-n:]
    _, step = max(latest)
    return step


def trend(level: Level, n: int) -> tuple[float, float]:
    """Return (rise of the line through the last `n` values, its standard error), or NaN."""
    values = level.latest(n)
    middle = (n - 1) / 2
    mean = sum(values) / n
    products = [(k - middle) * value for k, value in enumerate(values)]
    slope = 12 * sum(products) / (n * (n * n - 1))
    rests = [value - mean - slope * (k - middle) for k, value in enumerate(values)]
    noise = math.sqrt(sum(rest * rest for rest in rests) / (n - 2))
    return slope * (n - 1), noise * math.sqrt(12 * (n - 1) / (n * (n + 1)))
