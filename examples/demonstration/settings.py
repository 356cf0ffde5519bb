"""The settings of the demonstration: a task of the recipes each, with its arms and what to see."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Setting(NamedTuple):
    """What is trained, and what is said of it.

    arms: the keys of each arm.
    first: the arms that are trained unless others are named.
    small: the reward that GRPO or GDPO is meant to lose, by which examples are chosen.
    facts: what the tables show.
    is_toy: whether a tiny policy is made, whose arms train side by side; or else a real model.
    """

    task: str
    arms: Mapping[str, Sequence[str]]
    first: Sequence[str]
    small: str
    facts: str
    is_toy: bool = True


GRPO, GDPO = ["estimator=grpo"], ["estimator=gdpo"]


def harm(task: str, weights: Mapping[str, float], facts: str) -> Setting:
    """Return a setting that GDPO harms, with weights that undo it.

    weights: beside an answer of 1, of five steps of GRPO with seed 0: the spreads of the rewards,
        and in `noise` weights that keep GRPO's shares. `verl-gdpo replay` prints both.
    """
    kept = [f"reward.reward_functions.{name}.weight={weight}" for name, weight in weights.items()]
    flat = "--allow-flat"  # no made-up response has the words in their places
    arms = {"grpo": [*GRPO, flat], "gdpo": [*GDPO, flat], "gdpo_kept": [*GDPO, *kept, flat]}
    listed = ", ".join(f"{name} {weight}" for name, weight in weights.items())
    undone = f"gdpo_kept has weights that replay prints: answer 1, {listed}."
    return Setting(task, arms, [*arms], "answer", f"{facts}\n{undone}")


SETTINGS = {
    "judge": Setting(
        "demonstration",
        {
            "grpo": GRPO,
            "gdpo": GDPO,
            # dividing by hand: the judge counts from 0 to 1
            "grpo_by_range": [*GRPO, "reward.reward_functions.judge.weight=0.01"],
        },
        ["grpo", "gdpo"],
        "format",
        """Of GRPO's sum, the judge is nearly all: a format of 0 or 1 is less than its noise of 10.
GDPO normalises each reward by itself. Dividing the judge by 100 by hand does nearly the same:
./run_demo.sh arms=grpo,gdpo,grpo_by_range. Time does not help GRPO: after 150 steps, it had no
format left. workshop/experiments/RESULTS.md has all seeds.""",
    ),
    "bonus": harm(
        "bonus",
        {"bonus": 0.0505},
        """The word "old" is worth 0.05 beside an answer of 1, and is wrong for most places.
GDPO lets the small bonus count as much as the answer.""",
    ),
    "length": harm(
        "length",
        {"length": 0.0544},
        """A word of the frame costs a third of 0.05, and an answer of 1 needs two of them.
GDPO lets the small cost count as much as the answer.""",
    ),
    "noise": harm(
        "noise",
        {"noise_1": 0.239, "noise_2": 0.257, "noise_3": 0.29},
        """Three rewards are chance, with a standard deviation of 0.02 beside an answer of 1.
GDPO lets each of them count as much as the answer.""",
    ),
    "sentences": Setting(
        "sentences",
        {
            "grpo": GRPO,
            "gdpo": GDPO,
            # dividing by hand: the length counts from 0 to 1
            "grpo_by_range": [*GRPO, "reward.reward_functions.length.weight=0.01"],
        },
        ["grpo", "gdpo"],
        "words",
        """The length is worth 0 to 100, the words 0 to 1, and both have a weight of 1.
Of GRPO's sum, the length is nearly all. GDPO normalises each reward by itself. The arm
grpo_by_range divides the length by 100 by hand.""",
        is_toy=False,
    ),
}
