"""Compares each two samples of a group: what their rewards say, and what two estimators say.

Shape suffixes: B samples, K rewards.
"""

from dataclasses import astuple, dataclass

import numpy as np

from verl_gdpo.batch.advantages import Bools, Floats, Ints


@dataclass(frozen=True)
class Pairs:
    """Numbers of pairs of samples of a group that differ in a reward with a weight."""

    different: int = 0
    opposed: int = 0  # one reward prefers one of the two, another reward the other
    tied_grpo: int = 0
    tied_gdpo: int = 0
    turned: int = 0  # GRPO prefers one of the two, and GDPO the other

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_pairs(
    worth_BK: Floats, present_BK: Bools, grpo_B: Floats, gdpo_B: Floats, group_B: Ints
) -> Pairs:
    """Return the pairs of a step.

    Args:
        worth_BK: each reward times its weight; a reward that a sample of a pair lacks says nothing,
            and makes the two different.
        grpo_B, gdpo_B: advantages, rounded so that equal numbers are equal advantages.
    """
    order = np.argsort(group_B, kind="stable")
    group_B, worth_BK, present_BK = group_B[order], worth_BK[order], present_BK[order]
    grpo_B, gdpo_B = grpo_B[order], gdpo_B[order]
    counts = Pairs()
    for apart in range(1, int(np.bincount(group_B).max())):  # two rows of the sorted batch
        same = group_B[apart:] == group_B[:-apart]
        both = present_BK[apart:] & present_BK[:-apart]
        more = np.where(both, worth_BK[apart:] - worth_BK[:-apart], 0.0)[same]
        lacking = (present_BK[apart:] != present_BK[:-apart])[same].any(axis=1)
        different = (more != 0).any(axis=1) | lacking
        grpo, gdpo = ((A_B[apart:] - A_B[:-apart])[same] for A_B in (grpo_B, gdpo_B))
        counts += Pairs(
            different=int(different.sum()),
            opposed=int(((more > 0).any(axis=1) & (more < 0).any(axis=1)).sum()),
            tied_grpo=int((different & (grpo == 0)).sum()),
            tied_gdpo=int((different & (gdpo == 0)).sum()),
            turned=int((grpo * gdpo < 0).sum()),
        )
    return counts
