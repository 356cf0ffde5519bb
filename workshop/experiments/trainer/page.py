"""What the template of docs/evidence.md asks for, of the two experiments in verl's trainer.

It says the words, and the data the numbers.
"""

import math
from collections import Counter
from collections.abc import Iterator
from statistics import fmean

import torch
from scipy import stats

from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from workshop.experiments.bandit.simulate import GRPO
from workshop.experiments.differences import Difference, seeds_needed
from workshop.experiments.results import EDITIONS, Run, Trained, read_trained
from workshop.experiments.trainer import compare
from workshop.experiments.trainer.compare import (
    MATTERS,
    MATTERS_2,
    PILOT_SEED,
    PROTOCOL,
    RIVALS,
    bonferroni,
    difference,
    holm,
    read_all,
    seeds_of,
    verdict,
)

UNTIL, LAST = (30, 60, 90, 120), 10  # a number of the long training is the mean of so many steps
FIVE = 5  # steps at the beginning and at the end of a run
LONG = "20_to_1_long"
MeanSpread = tuple[float, float]  # of five runs
RERUN_SCORES = {  # of zhaihaotian/DARA with ToolRL's rewards: of GRPO and of GDPO
    "1.5B, format": ((81.01, 5.18), (97.11, 1.00)),
    "1.5B, average": ((48.46, 0.36), (50.37, 1.12)),
    "3B, format": ((88.76, 1.22), (96.57, 0.77)),
    "3B, average": ((52.57, 0.44), (53.66, 0.96)),
}


def tested(setting: str, rival: str) -> tuple[Difference, str]:
    """A comparison of either protocol, and its verdict."""
    if setting in PROTOCOL:
        gain = bonferroni()[setting, rival]
        return gain, verdict(gain, MATTERS)
    gain = holm().get((setting, rival)) or difference(setting, rival)  # one is tested alone
    return gain, verdict(gain, MATTERS_2)


def checked(setting: str, rival: str, expected: str, digits: int = 2) -> str:
    """A difference, of which the template says something that is true for one verdict.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """
    gain, said = tested(setting, rival)
    if said != expected:
        raise ValueError(
            f"evidence.md.jinja says {expected!r} of {setting}, {rival}: it is {said!r}"
        )
    return gain.text(digits)


def held(setting: str, rival: str) -> str:
    """What a protocol expected, and what the whole interval says of it."""
    if (setting, rival) not in compare.EXPECTED:
        return "nothing | "
    return outcome(tested(setting, rival)[0], *compare.EXPECTED[setting, rival])


def outcome(gain: Difference, low: float, high: float) -> str:
    """The bounds that were expected, and what the whole interval says of it."""
    held = "**missed**" if gain.high < low or high < gain.low else "open"
    if low <= gain.low and gain.high <= high:
        held = "as expected"
    return f"{bounds(low, high)} | {held}"


def bounds(low: float, high: float) -> str:
    """What was expected, in words; a share above 1 is no bound."""
    if low == -high:
        return f"within {high}"
    if low == -math.inf:
        return f"{high:+} or less"
    return f"{low:+} or more" if high >= 1 else f"{low:+} to {high:+}"


def without_difference(matters: float) -> int:
    """How many comparisons of the second edition would be no difference that matters."""
    return [verdict(gain, matters) for gain in holm().values()].count("no difference that matters")


def verdicts() -> str:
    """How many comparisons of the second edition have each verdict."""
    said = Counter(tested(*row)[1] for row in compare.COMPARISONS_2)
    parts = [f"{number} {name}" for name, number in said.most_common()]
    return f"of {sum(said.values())} comparisons, {', '.join(parts)}"


def runs_of(edition: int) -> int:
    """How many were compared."""
    return sum(run.seed != PILOT_SEED for run in read_trained(EDITIONS[edition]))


def starts() -> tuple[float, float]:
    """The least and the greatest share of a reward in a starting policy's samples."""
    shares = [share for result in read_trained(EDITIONS[1]).values() for share in result.start]
    return min(shares), max(shares)


def twice() -> Iterator[tuple[Run, str, float, float]]:
    """(run, reward, its shares on two machines) of a run that was made again."""
    for run, first in read_trained(EDITIONS[2], replaced=True).items():
        for reward, curve in first.shares.items():
            yield run, reward, fmean(curve), fmean(read_all()[run].shares[reward])


def at_ends(arm: str, seed: int) -> list[float]:
    """Of the long training: the small reward up to each of these ends."""
    curve = read_all()[Run(LONG, arm, seed)].shares["small"]
    return [fmean(curve[step - LAST : step]) for step in UNTIL]


def last_steps(result: Trained) -> float:
    """The small reward, mean over the last steps."""
    return fmean(result.shares["small"][-FIVE:])


def spreads(setting: str) -> list[float]:
    """Of each reward in the first steps of the pilot: what rescaled GRPO divides by."""
    pilot = read_all()[Run(setting, "grpo", PILOT_SEED)]
    return [fmean(of[:FIVE]) for of in pilot.spread.values()]


def tie(*divisors: float) -> float:
    """GRPO's advantage of a right but long answer; 2 of 16 are such, and 14 wrong but short."""
    rewards = torch.tensor([[1.0, 0]] * 2 + [[0, 1.0]] * 14)
    weights = [1 / divisor for divisor in divisors]
    return float(compute_gdpo_scalars(rewards, [0] * 16, weights=weights, **GRPO).A_B[0])


def steps_alike(setting: str) -> list[int]:
    """The steps of each seed until GRPO and rescaled GRPO earned something different."""
    curves = [
        [read_all()[Run(setting, arm, s)].shares for arm in RIVALS] for s in seeds_of(setting)
    ]
    return [
        min(
            next(step for step, (x, y) in enumerate(zip(one[k], other[k], strict=True)) if x != y)
            for k in one
        )
        for one, other in curves
    ]


def welch(one: MeanSpread, other: MeanSpread) -> tuple[float, float, float]:
    """Of five runs of each: one minus the other, and its 95 % interval."""
    errors = [spread**2 / 5 for _, spread in (one, other)]
    error, df = sum(errors) ** 0.5, sum(errors) ** 2 / sum(each**2 / 4 for each in errors)
    up = float(stats.t.ppf(0.975, df)) * error
    return (more := one[0] - other[0]), more - up, more + up


def needed(setting: str, rival: str) -> str:
    """The seeds that it would take to find two effects."""
    spread = tested(setting, rival)[0].spread
    return " / ".join(str(seeds_needed(effect, spread)) for effect in (0.02, 0.05))
