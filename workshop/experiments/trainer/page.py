"""What the template of docs/in_verls_trainer.md asks for.

It says the words, and the data the numbers.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from statistics import fmean, median, stdev, variance

from scipy import stats

from workshop.benchmarks.step_model import FLOPS_SHARES, GPUS, TOOL_RL, seconds
from workshop.experiments.differences import Difference, seeds_needed, signed
from workshop.experiments.results import EDITIONS, Run, read_trained
from workshop.experiments.template import template_beside
from workshop.experiments.trainer import compare
from workshop.experiments.trainer.compare import (
    MATTERS,
    MATTERS_2,
    PILOT_SEED,
    PROTOCOL,
    SECOND,
    bonferroni,
    holm,
    read_all,
    seeds_of,
    verdict,
)

GPU_STEPS, GPU_RUNS = 105, 15  # of recipes/task/tool_rl.yaml; three arms with five seeds
UNTIL, LAST = (30, 60, 90, 120), 10  # a number of the long training is the mean of so many steps
FIVE = 5  # steps at the beginning and at the end of a pilot
LONG = "20_to_1_long"
# the step at which the format reached 0.8, in five runs of somebody else with ToolRL's rewards
RERUN = {"gdpo": (18, 19, 75, 16, 65), "grpo": (37, 43, 34, 31, 31)}


def render() -> str:
    return template_beside(__file__).render(page=sys.modules[__name__], compare=compare)


def tested(setting: str, rival: str) -> tuple[Difference, str]:
    """A comparison of either protocol, and its verdict."""
    if setting in PROTOCOL:
        gain = bonferroni()[setting, rival]
        return gain, verdict(gain, MATTERS)
    gain = holm()[setting, rival]
    return gain, verdict(gain, MATTERS_2)


def checked(setting: str, rival: str, expected: str, digits: int = 2) -> str:
    """A difference, of which the template says something that is true for one verdict.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """
    gain, said = tested(setting, rival)
    if said != expected:
        raise ValueError(f"page.md.jinja says {expected!r} of {setting}, {rival}: it is {said!r}")
    return gain.text(digits)


def held(setting: str, rival: str, low: float, high: float) -> str:
    """A difference, and what its whole interval says of an expectation."""
    gain, _ = tested(setting, rival)
    said = "**missed**" if gain.high < low or high < gain.low else "open"
    if low <= gain.low and gain.high <= high:
        said = "as expected"
    return f"{gain.text()} | {said}"


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


def minutes() -> float:
    """Of a run of the first edition."""
    return median(result.seconds / 60 for result in read_trained(EDITIONS[1]).values())


def twice() -> Iterator[tuple[Run, str, float, float]]:
    """(run, reward, its shares on two machines) of a run that was made again."""
    for run, first in read_trained(EDITIONS[2], replaced=True).items():
        for reward, curve in first.shares.items():
            yield run, reward, fmean(curve), fmean(read_all()[run].shares[reward])


def at_ends(arm: str, seed: int) -> list[float]:
    """Of the long training: the small reward up to each of these ends, and the large one."""
    curves = read_all()[Run(LONG, arm, seed)].shares
    small = [fmean(curves["small"][step - LAST : step]) for step in UNTIL]
    return [*small, fmean(curves["large"][-LAST:])]


def gains_at_ends(seed: int) -> list[float]:
    arms = zip(at_ends("gdpo", seed), at_ends("grpo", seed), strict=True)
    return [gdpo - grpo for gdpo, grpo in arms]


def gain_at(place: int) -> str:
    """Of the long training, the mean of the seeds."""
    return signed(fmean(gains_at_ends(seed)[place] for seed in seeds_of(LONG)), 2)


def piloted() -> Iterator[tuple[str, str, str]]:
    """(setting, reward, the numbers of its line) of each pilot."""
    for setting in (*SECOND, "coding"):
        pilot = read_all()[Run(setting, "grpo", PILOT_SEED)]
        for reward, curve in pilot.shares.items():
            parts = (pilot.spread[reward][:FIVE], curve[:FIVE], curve[-FIVE:])
            varies = f"{100 * fmean(pilot.varies[reward]):.0f} %"
            yield setting, reward, " | ".join([varies, *(f"{fmean(part):.3f}" for part in parts)])


def gpu_rows() -> Iterator[str]:
    """What the runs should take on GPUs: computed."""
    for gpu in GPUS:
        steps = [sum(seconds(TOOL_RL, gpu, 8, share).values()) for share in FLOPS_SHARES]
        best, worst = (step * GPU_STEPS / 3600 for step in steps)
        row = f"{steps[0]:.0f} to {steps[1]:.0f} s | {best:.1f} to {worst:.1f} h"
        yield f"8 x {gpu.name} | {row} | {GPU_RUNS * best:.0f} to {GPU_RUNS * worst:.0f} h"


def rerun() -> dict[str, float]:
    """Of the runs of somebody else: GRPO minus GDPO, with a 95 % interval (Welch).

    "detectable" is the difference that two times five such runs find with 80 % power, at 95 %.
    """
    grpo, gdpo = RERUN["grpo"], RERUN["gdpo"]
    welch = stats.ttest_ind(grpo, gdpo, equal_var=False)
    interval = welch.confidence_interval(0.95)
    error = ((variance(grpo) + variance(gdpo)) / len(grpo)) ** 0.5
    detectable = float(stats.t.ppf([0.975, 0.8], welch.df).sum()) * error
    return {
        **{"more": fmean(grpo) - fmean(gdpo), "low": float(interval.low)},
        **{"high": float(interval.high), "detectable": detectable},
        **{"grpo": stdev(grpo), "gdpo": stdev(gdpo)},
    }


def needed(setting: str, rival: str) -> tuple[float, list[int]]:
    """The spread of a comparison, and the seeds that it would take to find three effects."""
    spread = tested(setting, rival)[0].spread
    return spread, [seeds_needed(effect, spread) for effect in (0.02, 0.05, 0.1)]
