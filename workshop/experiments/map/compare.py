"""Differences between arms: draws are the unit, and intervals hold for all settings at once."""

from functools import cache

from workshop.experiments.differences import Difference
from workshop.experiments.results import read_simulated

OPTIMIZERS = ("one scale", "adam")
# dividing by equal ranges, or by a prompt's own that are the reward's, trains the same
TRAINED_AS = {"grpo_range": ("grpo",), "grpo_prompt_range": ("grpo_range", "grpo")}
FIRST_ARMS = ("gdpo", "grpo", *TRAINED_AS)  # the others have a table of their own
MATTERS = 0.02  # a smaller difference counts as none
MORE, LESS = ("more", "a little more"), ("less", "a little less")
VERDICTS = (*MORE, "no difference", "open", *reversed(LESS))


def settings() -> list[str]:
    return [*read_simulated()]


def other_arms() -> list[str]:
    """The estimators of the last table."""
    arms = [arm for optimizer, arm in read_simulated()[settings()[0]] if optimizer == "adam"]
    return [arm for arm in arms if arm not in FIRST_ARMS]


@cache
def gain(
    optimizer: str, setting: str, over: str = "grpo", arm: str = "gdpo", field: str = "shares"
) -> Difference:
    """`arm` minus `over`, draw by draw.

    The interval is as wide as the largest of the settings' independent t needs for 95 %.
    """
    outcomes = read_simulated()[setting]
    draws = [
        next(
            outcomes[optimizer, name][field]
            for name in (wanted, *TRAINED_AS.get(wanted, ()))
            if (optimizer, name) in outcomes
        )
        for wanted in (arm, over)
    ]
    more = (one - other for one, other in zip(*draws, strict=True))
    return Difference(tuple(more), 0.95 ** (1 / len(settings())))


def verdict(one: Difference) -> str:
    if not any(one.values):
        return "no difference"  # one training
    for sign, words in ((1, MORE), (-1, LESS)):
        if min(sign * one.low, sign * one.high) > 0:
            return words[0] if sign * one.mean >= MATTERS else words[1]
    return "no difference" if max(-one.low, one.high) < MATTERS else "open"


def joint(setting: str, over: str = "grpo", arm: str = "gdpo") -> str:
    """The verdict of both optimisers, the weaker of two; where they disagree, it is open."""
    one, other = (verdict(gain(name, setting, over, arm)) for name in OPTIMIZERS)
    for words in (MORE, LESS):
        if one in words and other in words:
            return words[max(words.index(one), words.index(other))]
    return one if one == other else "open"
