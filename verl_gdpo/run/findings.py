"""Says what a person should know about a run, from its metrics alone.

A condition has to hold for `HOLD` training steps in a row before it is said, and counts as one
stretch until it has failed for as many. docs/tools.md lists the rules, and their tests hold what
they find in runs with one planted fault, and nothing in healthy ones.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from verl_gdpo.rewards import MAIN_REWARDS
from verl_gdpo.run.folder import (
    Metrics,
    curve,
    of_each_reward,
    training_rewards,
    validation_rewards,
)

HOLD = 5  # steps; for things that a mini-batch of small runs shows by chance, twice as many
CONSTANT = 0.01  # share of groups in which a reward still differs
AT_BOUND = 0.9  # share of samples
SILENT = 0.8  # share of groups
UNUSED = 1e-3  # share of the squared contributions
DRIVEN = 0.5  # share of the squared advantages
CONFLICT = -0.5  # correlation within groups
LOWERED = -0.1  # correlation of a reward's contribution with the advantage
FOLLOWS_LENGTH = 0.3  # correlation of advantage and length
LENGTH_CHANGE = 1.3  # times as long, or as short
BLOWN_UP = 0.25  # batch norm's std, as a share of what it was at the start
VALIDATION_FALL = 0.1  # of the range over which validation has moved

# the metrics that the rules read
READ = re.compile(
    r"gdpo/(no_signal|batch_norm_std|length_correlation|.+/mean(/.+)?"
    r"|.+/(varies|at_low|at_high|energy|update_all_low|correlation|correlation_with_.+))"
    r"|critic/advantages/(min|max)|response_length/mean|val-(aux|core)/.+/mean@\d+"
)

Curve = Mapping[int, float]


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

    @property
    def steps(self) -> str:
        return f"steps {self.first} to {self.last}"

    def __str__(self) -> str:
        return f"{self.what} ({self.steps}). {self.advice}."


def findings(metrics: Metrics) -> list[Finding]:
    """Return what the metrics show, in the order of `RULES`; empty for a healthy run.

    Args:
        metrics: {step: {name: value}}, with the `gdpo/` metrics of docs/metrics.md. A rule whose
            metrics are not there finds nothing.
    """
    return [finding for rule in RULES for finding in rule(metrics)]


def stretch(holds: Mapping[int, bool], hold: int = HOLD) -> tuple[int, int] | None:
    """Return (first, last) step of the latest stretch in which a condition holds.

    A stretch begins with `hold` steps in a row, and ends before `hold` steps in a row without it.
    """
    found, begun, run_of_true, run_of_false = None, None, 0, 0
    recent: list[int] = []
    for step, true in sorted(holds.items()):
        recent = [*recent, step][-hold:]
        run_of_true, run_of_false = (run_of_true + 1, 0) if true else (0, run_of_false + 1)
        if run_of_true == hold and begun is None:
            begun = recent[0]
        if run_of_false == hold:
            begun = None
        if true and begun is not None:
            found = begun, step
    return found


def constant_rewards(metrics: Metrics) -> Iterator[Finding]:
    """A reward that differs in hardly any group: reached everywhere, nowhere, or constant."""
    for name, varies in of_each_reward(metrics, "varies").items():
        steps = stretch({step: value < CONSTANT for step, value in varies.items()})
        if steps is None:
            continue
        at_high, at_low = (
            of_each_reward(metrics, bound).get(name, {}).get(steps[1], 0.0)
            for bound in ("at_high", "at_low")
        )
        mean = training_rewards(metrics).get(name, {}).get(steps[1], math.nan)
        why, advice = "trains nothing", "Look at its scorer: other rewards may include it"
        if at_high >= AT_BOUND:
            why = f"is reached by {at_high:.0%} of the samples, and trains nothing more"
            advice = "Nothing has to be done; a schedule can end its weight"
        elif at_low >= AT_BOUND:
            why = f"is at its lowest value in {at_low:.0%} of the samples, and trains nothing"
            advice = (
                "No sample shows the policy what is wanted: use easier prompts, a supervised "
                "start, a finer reward, or more samples of a prompt"
            )
        yield Finding(
            f"constant {name}",
            f"{name} (mean {mean:.3g}) is the same in every group: it {why}",
            *steps,
            advice,
        )


def unused_rewards(metrics: Metrics) -> Iterator[Finding]:
    """A reward that differs within groups and has no part in the advantage."""
    energies = of_each_reward(metrics, "energy")
    for name, varies in of_each_reward(metrics, "varies").items():
        energy = energies.get(name, {})
        holds = {
            s: energy[s] < UNUSED and value > 10 * CONSTANT
            for s, value in varies.items()
            if s in energy
        }
        if steps := stretch(holds):
            yield Finding(
                f"unused {name}",
                f"{name} differs in {varies[steps[1]]:.0%} of the groups, but has no part in the "
                "advantage",
                *steps,
                f"Look at algorithm.gdpo.rewards.{name}: its weight, schedule and condition",
            )


def silent_groups(metrics: Metrics) -> Iterator[Finding]:
    silent = curve(metrics, "gdpo/no_signal")
    if steps := stretch({step: value >= SILENT for step, value in silent.items()}):
        yield Finding(
            "silent groups",
            f"{silent[steps[1]]:.0%} of the groups have no signal: their rollouts train nothing",
            *steps,
            "Set algorithm.filter_groups.enable=True, or use prompts of other difficulty, more "
            "samples of a prompt, or a higher temperature",
        )


def blown_up_advantages(metrics: Metrics) -> Iterator[Finding]:
    """The batch step scales what is left of the signal up to a standard deviation of 1.

    Where nothing is left, the spread is 0, and so are the advantages.
    """
    spread = curve(metrics, "gdpo/batch_norm_std")
    early = sorted(list(spread.values())[:HOLD])
    usual = early[len(early) // 2] if len(early) == HOLD else 0.0
    if steps := stretch({step: 0 < value < BLOWN_UP * usual for step, value in spread.items()}):
        ends = [metrics[steps[1]].get(f"critic/advantages/{end}", 0.0) for end in ("min", "max")]
        yield Finding(
            "blown up",
            f"batch norm multiplies the few groups with signal by {usual / spread[steps[1]]:.1f} "
            f"times as much as at the start; |A| is up to {max(map(abs, ends)):.1f}",
            *steps,
            "Set algorithm.filter_groups.enable=True, or ++algorithm.gdpo.batch_norm=none with a "
            "lower learning rate",
        )


def wrong_answers(metrics: Metrics) -> Iterator[Finding]:
    """Groups without any right answer drive the update: the rewards beside the main one do."""
    varies = of_each_reward(metrics, "varies")
    for name, shares in of_each_reward(metrics, "update_all_low").items():
        holds = {
            step: share > DRIVEN and varies.get(name, {}).get(step, 0.0) >= CONSTANT
            for step, share in shares.items()
        }
        if name in MAIN_REWARDS and (steps := stretch(holds, 2 * HOLD)):
            yield Finding(
                f"wrong answers {name}",
                f"{shares[steps[1]]:.0%} of the update come from groups in which no sample has "
                f"more than the lowest {name}: the other rewards drive it",
                *steps,
                f"Set algorithm.filter_groups.enable=True with metric={name}, let the other "
                f"rewards count only where {name} is met, or use easier prompts",
            )


def conflicts(metrics: Metrics) -> Iterator[Finding]:
    names = [*of_each_reward(metrics, "varies")]
    for a, b in combinations(names, 2):
        both = curve(metrics, f"gdpo/{a}/correlation_with_{b}") or curve(
            metrics, f"gdpo/{b}/correlation_with_{a}"
        )
        if steps := stretch({step: value < CONFLICT for step, value in both.items()}, 2 * HOLD):
            yield Finding(
                f"conflict {a} {b}",
                f"{a} and {b} oppose each other: correlation {both[steps[1]]:.2f}",
                *steps,
                "Give one of them a larger weight, or a condition that lets it count only where "
                "the other is met",
            )


def lowered_rewards(metrics: Metrics) -> Iterator[Finding]:
    for name, values in of_each_reward(metrics, "correlation").items():
        if steps := stretch({step: value < LOWERED for step, value in values.items()}, 2 * HOLD):
            yield Finding(
                f"lowered {name}",
                f"training lowers {name}: its part of the advantage has the correlation "
                f"{values[steps[1]]:.2f} with the whole",
                *steps,
                "The other rewards oppose it; raise its weight, or give them a condition",
            )


def drifting_length(metrics: Metrics) -> Iterator[Finding]:
    follows = curve(metrics, "gdpo/length_correlation")
    lengths = curve(metrics, "response_length/mean")
    for sign, word in ((1, "longer"), (-1, "shorter")):
        holds = {step: sign * value > FOLLOWS_LENGTH for step, value in follows.items()}
        steps = stretch(holds, 2 * HOLD)
        if steps is None or not {*steps} <= lengths.keys():
            continue
        before, after = (lengths[step] for step in steps)
        shorter, longer = (before, after)[::sign]
        if longer > LENGTH_CHANGE * shorter:
            yield Finding(
                f"length {word}",
                f"responses get {word}, because the advantage follows the length (correlation "
                f"{follows[steps[1]]:.2f}): {before:.0f} to {after:.0f} tokens",
                *steps,
                "If this is not meant, find the reward that follows the length with `verl-gdpo "
                "report`, or add a length reward that counts only where the answer is correct",
            )


def falling_validation(metrics: Metrics) -> Iterator[Finding]:
    training = training_rewards(metrics)
    for name, values in validation_rewards(metrics).items():
        steps, scores = zip(*sorted(values.items()), strict=True)
        best = scores.index(max(scores))
        fall, moved = scores[best] - scores[-1], max(scores) - min(scores)
        learned = training.get(name.partition(" (")[0], {})
        if len(scores) - best < 3 or best == 0 or fall <= VALIDATION_FALL * moved:
            continue  # two validations after the best one, which is not the first
        since = [value for step, value in learned.items() if step > steps[best]]
        until = [value for step, value in learned.items() if step <= steps[best]][-HOLD:]
        if min(map(len, (since, until))) and _mean(since[-HOLD:]) > _mean(until):
            yield Finding(
                f"validation {name}",
                f"validation of {name} falls while training rises: {scores[best]:.3f} to "
                f"{scores[-1]:.3f}",
                steps[best],
                steps[-1],
                "The policy learns the training rows by heart; the checkpoint of step "
                f"{steps[best]} may be the best one",
            )


def repeated_rewards(metrics: Metrics) -> Iterator[Finding]:
    """A reward that is another one, or the sum of all others: it counts them twice."""
    means = training_rewards(metrics)
    for name, values in means.items():
        others = [other for other in means if other != name]
        candidates = [[other] for other in others if other < name]
        candidates += [others] if len(others) > 1 else []
        for parts in candidates:
            holds = {
                step: _is_sum(value, step, [means[part] for part in parts])
                for step, value in values.items()
            }
            if (steps := stretch(holds)) and all(holds.values()) and len({*values.values()}) > 1:
                yield Finding(
                    f"repeated {name}",
                    f"{name} equals {' + '.join(parts)} at every step: the same thing counts twice",
                    *steps,
                    "Give one of them the weight 0 in algorithm.gdpo.rewards",
                )


def _is_sum(value: float, step: int, parts: list[dict[int, float]]) -> bool:
    total = sum(part.get(step, math.nan) for part in parts)
    return math.isclose(value, total, rel_tol=1e-6, abs_tol=1e-9)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


RULES: tuple[Callable[[Metrics], Iterator[Finding]], ...] = (
    repeated_rewards,
    unused_rewards,
    constant_rewards,
    silent_groups,
    blown_up_advantages,
    wrong_answers,
    conflicts,
    lowered_rewards,
    drifting_length,
    falling_validation,
)
