"""Differences between arms: draws are the unit, and intervals hold for all settings at once."""

from functools import cache

from workshop.experiments.differences import Difference
from workshop.experiments.results import read_simulated

OPTIMIZERS = ("one scale", "adam")
# dividing by equal ranges, or by a prompt's own that are the reward's, trains the same
TRAINED_AS = {"grpo_range": ("grpo",), "grpo_prompt_range": ("grpo_range", "grpo")}
MATTERS = 0.02  # a smaller difference counts as none


def settings() -> list[str]:
    return [*read_simulated()]


@cache
def gain(optimizer: str, setting: str, over: str = "grpo", arm: str = "gdpo") -> Difference:
    """`arm` minus `over`, the mean of all shares, draw by draw.

    The interval is as wide as the largest of the settings' independent t needs for 95 %.
    """
    outcomes = read_simulated()[setting]
    draws = [
        next(
            outcomes[optimizer, name]["shares"]
            for name in (wanted, *TRAINED_AS.get(wanted, ()))
            if (optimizer, name) in outcomes
        )
        for wanted in (arm, over)
    ]
    more = (one - other for one, other in zip(*draws, strict=True))
    return Difference(tuple(more), 0.95 ** (1 / len(settings())))
