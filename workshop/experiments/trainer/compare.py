"""What was compared in verl's trainer: settings, endpoints, and differences between arms.

The protocols were written before the runs, and say the same in words.
"""

from collections.abc import Callable, Mapping
from functools import cache
from statistics import fmean
from typing import NamedTuple

from workshop.experiments.differences import Difference
from workshop.experiments.results import EDITIONS, Run, Trained, read_trained


class Setting(NamedTuple):
    """A task with its rewards.

    ranges: {reward: what all of it adds to the score}; none where they depend on the prompt.
    primary: the share that decides.
    """

    title: str
    ranges: Mapping[str, float]
    primary: str = "small"


GSM8K = {"format": 1, "correctness": 1, "integer": 1}
MATHS = {"correctness": 1, "length": 1}
SETTINGS = {
    "20_to_1": Setting("ranges 20 and 1", {"small": 1, "large": 20}),
    "1_to_1": Setting("equal ranges", {"small": 1, "large": 1}),
    "by_prompt": Setting("ranges by prompt", {}),
    "tool_rl": Setting("ToolRL's rewards", {"small": 1, "large": 6}),
    "gsm8k": Setting("GSM8K's three", GSM8K, "correctness"),
    "gsm8k_again": Setting("GSM8K's three, eight new seeds", GSM8K, "correctness"),
    "maths": Setting("maths and length", MATHS, "correctness"),
    "maths_if_correct": Setting("length only if correct", MATHS, "length"),
    "tool_rl_seeds": Setting("ToolRL's rewards, again", {"format": 1, "correctness": 6}, "format"),
    "coding": Setting("coding's three", {"pass": 1, "length": 1, "bug": 1}, "length"),
    "20_to_1_long": Setting("ranges 20 and 1, 120 steps", {"small": 1, "large": 20}),
}
PROTOCOL = ("20_to_1", "1_to_1", "by_prompt", "tool_rl")
SECOND = ("gsm8k", "maths", "maths_if_correct", "tool_rl_seeds")
NAMES = {"gdpo": "GDPO", "grpo": "GRPO", "grpo_rescaled": "rescaled GRPO"}
RIVALS = ("grpo", "grpo_rescaled")
# (setting, rival) of the seven comparisons of the protocol, and of the eight of the second one;
# with equal ranges, rescaled GRPO is GRPO
COMPARISONS = tuple((s, r) for s in PROTOCOL for r in RIVALS if (s, r) != ("1_to_1", RIVALS[1]))
COMPARISONS_2 = tuple((setting, rival) for setting in SECOND for rival in RIVALS)
LEVEL = 1 - 0.05 / len(COMPARISONS)
# an interval within this, on both sides of 0, is no difference that matters
MATTERS, MATTERS_2 = 0.05, 0.02

Endpoint = Callable[[Trained], float]


def share(reward: str) -> Endpoint:
    """The share of a reward, mean over the training."""
    return lambda result: fmean(result.shares[reward])


def mean_of_all(result: Trained) -> float:
    """The mean of the shares of all rewards."""
    return fmean(map(fmean, result.shares.values()))


def declared(setting: str) -> Endpoint:
    """The share of the score that was declared: the sum of the rewards, each with its range."""
    ranges = SETTINGS[setting].ranges
    return lambda result: (
        sum(size * fmean(result.shares[reward]) for reward, size in ranges.items())
        / sum(ranges.values())
    )


def endpoints(setting: str) -> dict[str, Endpoint | None]:
    """Of the first edition; None for what cannot be computed, as single prompts were not kept."""
    return {
        "small reward": share("small"),
        "large reward": share("large"),
        "mean of both": mean_of_all,
        "declared score": declared(setting) if SETTINGS[setting].ranges else None,
    }


@cache
def read_all() -> dict[Run, Trained]:
    """All runs, with the pilot."""
    return {run: result for path in EDITIONS.values() for run, result in read_trained(path).items()}


def seeds_of(setting: str) -> list[int]:
    runs = [run for run in read_all() if run.setting == setting and run.arm == "gdpo"]
    return sorted(run.seed for run in runs)


def mean_of(setting: str, arm: str) -> float:
    """What an arm earns of the reward that decides."""
    of_seed = share(SETTINGS[setting].primary)
    return fmean(of_seed(read_all()[Run(setting, arm, seed)]) for seed in seeds_of(setting))


def difference(
    setting: str, rival: str, endpoint: Endpoint | None = None, level: float = 0.95
) -> Difference:
    """GDPO minus `rival`, paired by seed; by default of the reward that decides."""
    of_run = endpoint or share(SETTINGS[setting].primary)
    runs = read_all()
    arms = [[of_run(runs[Run(setting, a, s)]) for s in seeds_of(setting)] for a in ("gdpo", rival)]
    return Difference(tuple(gdpo - other for gdpo, other in zip(*arms, strict=True)), level)


def bonferroni() -> dict[tuple[str, str], Difference]:
    """The comparisons of the first edition."""
    return {row: difference(*row, level=LEVEL) for row in COMPARISONS}


def holm() -> dict[tuple[str, str], Difference]:
    """The comparisons of the second edition, each at the level at which Holm tests it."""
    gains = {row: difference(*row) for row in COMPARISONS_2}
    return dict(zip(gains, at_holms_levels([*gains.values()]), strict=True))


def at_holms_levels(gains: list[Difference]) -> list[Difference]:
    tested, left = [*gains], len(gains)
    for place in sorted(range(len(gains)), key=lambda place: gains[place].p):
        tested[place] = Difference(gains[place].values, 1 - 0.05 / left)
        if gains[place].p < 0.05 / left:
            left -= 1  # of the others, none has a smaller p, so this stops at the first failure
    return tested


def verdict(gain: Difference, matters: float) -> str:
    """What the protocols call an interval."""
    is_small = gain.low > -matters and gain.high < matters
    if gain.low > 0 or gain.high < 0:
        return "difference, but none that matters" if is_small else "difference"
    return "no difference that matters" if is_small else "open"
