"""Says what a person should know about a run, from its metrics alone.

The rules look at one step after the other, and keep a bounded memory, so that a step costs the same
at the end of a long run as at its start. What they look for has to hold for some steps in a row
before it is told, and counts as one streak until it has failed for as many. docs/metrics.md names
the rules, and `python -m workshop.findings` counts how often they are right.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from verl_gdpo.tools.run_folder import finding_rules as rules
from verl_gdpo.tools.run_folder.finding_rules import (
    LIMITS,
    Levels,
    Rewards,
    Symptom,
    Values,
)
from verl_gdpo.tools.run_folder.folder import SCORE, Metrics
from verl_gdpo.tools.run_folder.levels import Level

NAMED = 5  # metrics, in a message
GRADIENT = "actor/grad_norm"
ADVANTAGES = ("critic/advantages/min", "critic/advantages/max")
UPDATES = (GRADIENT, *ADVANTAGES)
STATISTICS = {"mean", "min", "max", "varies", "at_high", "share", "missing"}


@dataclass(frozen=True)
class Finding:
    """What is wrong, at which training steps, and what to do about it.

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
        if self.first == self.last:
            steps = f"step {self.first}"
        else:
            steps = f"steps {self.first} to {self.last}"
        if self.is_over:
            steps += ", over since then"
        return steps

    def __str__(self) -> str:
        return f"{self.what} ({self.steps}). {self.advice}."


@dataclass
class Streak:
    """The latest streak of steps in which a condition holds.

    It begins with `hold` steps in a row, and ends before `hold` steps in a row without it.
    """

    hold: int
    trues: int = 0
    falses: int = 0
    since: int = 0
    begun: int | None = None
    steps: tuple[int, int] | None = None  # the first and the last one
    symptom: Symptom | None = None  # at the last step of `steps`

    def add(self, step: int, symptom: Symptom) -> None:
        if not symptom.holds:
            self.trues = 0
            self.falses += 1
            if self.falses == self.hold:
                self.begun = None
            return
        if self.trues == 0:
            self.since = step if symptom.since is None else symptom.since
        self.trues += 1
        self.falses = 0
        if self.trues == self.hold and self.begun is None:
            self.begun = self.since
        if self.begun is not None:
            self.steps = (self.begun, step)
            self.symptom = symptom

    def finding(self) -> Finding | None:
        if self.steps is None or self.symptom is None:
            return None
        first, last = self.steps
        return Finding(
            topic=self.symptom.topic,
            what=self.symptom.what,
            first=first,
            last=last,
            advice=self.symptom.advice,
            is_over=self.begun is None,
        )


def rewards_of(values: Values) -> Rewards:
    """Return the statistics of each reward; of their sum, `SCORE`, only if there is no other."""
    rewards: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        parts = _statistic(key)
        if parts is not None:
            reward, statistic = parts
            rewards.setdefault(reward, {})[statistic] = value
    named = {name: of_one for name, of_one in rewards.items() if name != SCORE}
    return named or rewards


@lru_cache(maxsize=4096)
def _statistic(key: str) -> tuple[str, str] | None:
    """Return (reward, statistic) of a metric; None if it is of no reward."""
    prefix, _, rest = key.partition("/")
    reward, _, statistic = rest.rpartition("/")
    is_sum = prefix == "critic" and reward == SCORE
    # A name with a slash is of no reward: `gdpo/rollout/tool_seconds/mean` says what tools took.
    if not reward or "/" in reward or statistic not in STATISTICS:
        return None
    if prefix == "gdpo" or is_sum:
        return reward, statistic
    return None


def broken_training(step: int, values: Values, _: Rewards, levels: Levels) -> Iterator[Symptom]:
    """A metric of verl that is far from what it was."""
    for name, limit in LIMITS.items():
        value = values.get(name, math.nan)
        if not math.isfinite(value):
            continue
        level = levels[name]
        level.add(step, value)
        is_median = limit.topic not in rules.AT_ONCE
        if is_median:
            value = median(level.latest(rules.SPAN))
        holds = limit.is_broken(value, level.start)
        what = ""
        since = None
        if holds:
            what = limit.what.format(value=value, start=level.start)
            since = _first_broken(level, limit) if is_median else step
        yield Symptom(limit.topic, holds, what, limit.advice, since=since)


def _first_broken(level: Level, limit: rules.Limit) -> int:
    """Return the step of the median's values from which they are broken."""
    return level.first_of(rules.SPAN, lambda one: limit.is_broken(one, level.start))


def untrained_steps(_step: int, values: Values, _: Rewards, _levels: Levels) -> Iterator[Symptom]:
    """Steps that change nothing: the gradient, or every advantage, is 0."""
    size = {name: abs(values[name]) for name in UPDATES if name in values}
    if not size:
        # The values of a validation have no update.
        return
    has_no_gradient = size.get(GRADIENT, math.inf) <= rules.NOTHING
    has_no_advantage = all(size.get(name, math.inf) <= rules.NOTHING for name in ADVANTAGES)
    if has_no_advantage:
        what = "all advantages are 0: nothing is learned"
    else:
        what = "the gradient norm is 0: nothing is learned"
    yield Symptom(
        "untrained",
        has_no_gradient or has_no_advantage,
        what,
        "Look at the rewards in a dump: all samples of a prompt may have the same. If they "
        "differ, look at the learning rate and at what the loss counts",
        hold=rules.STILL,
    )


def no_numbers(_step: int, values: Values, _rewards: Rewards, _levels: Levels) -> Iterator[Symptom]:
    """Any logged number, of training or validation, that is NaN or infinite at any step."""
    bad = sorted(name for name, value in values.items() if not math.isfinite(value))
    shown = bad[:NAMED]
    if len(bad) > NAMED:
        shown.append(f"{len(bad) - NAMED} more")
    names = ", ".join(shown)
    yield Symptom(
        "no number",
        bool(bad),
        f"no finite number: {names}",
        "Look for the first such step in train.log, and go on from a checkpoint before it",
        hold=1,
    )


RULES: tuple[Callable[[int, Values, Rewards, Levels], Iterator[Symptom]], ...] = (
    no_numbers,
    broken_training,
    untrained_steps,
    rules.fallen_rewards,
    rules.traded_rewards,
    rules.constant_rewards,
    rules.ignored_rewards,
    rules.fallen_validations,
)


class FindingTracker:
    """Takes the steps of a run in their order, and says what they show up to now."""

    def __init__(self) -> None:
        self.levels: defaultdict[str, Level] = defaultdict(Level)
        self.streaks: dict[str, Streak] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step. Its validation may follow as another call for the same step."""
        rewards = rewards_of(values)
        for rule in RULES:
            for symptom in rule(step, values, rewards, self.levels):
                self.streaks.setdefault(symptom.topic, Streak(symptom.hold)).add(step, symptom)

    def findings(self) -> list[Finding]:
        """Return what is wrong, the latest first; what is over stands behind what is not."""
        findings = []
        for streak in self.streaks.values():
            finding = streak.finding()
            if finding is not None:
                findings.append(finding)
        findings.sort(key=lambda finding: (finding.is_over, -finding.last))
        return findings


def findings(metrics: Metrics) -> list[Finding]:
    """Return what the metrics {step: {name: value}} of a run show, if anything."""
    tracker = FindingTracker()
    for step, values in sorted(metrics.items()):
        tracker.add(step, values)
    return tracker.findings()
