"""Statistics of each reward over the samples and the groups of a step, also by data source.

Shape suffixes: B samples, K rewards, G groups. Samples are the rows that count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.algorithm.advantages import Statistics, of_units, unit, within_groups
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Bools, Floats, Ints, with_slack

MOST_SOURCES = 16  # with more, only means are told by data source


@dataclass(frozen=True)
class RewardsOfStep:
    """The rewards of the samples of one step, after their conditions."""

    names: Sequence[str]
    values_BK: Floats
    present_BK: Bools
    group_B: Ints  # numbered from 0
    bounds: Mapping[str, Bounds]

    def statistics(self) -> Statistics:
        """Return {"<reward>/<statistic>": value} over the samples and groups that have the reward.

        `std` has ddof 0. Only `missing` is a share of all samples.
        """
        found: Statistics = {}
        for k, name in enumerate(self.names):
            present = self.values_BK[self.present_BK[:, k], k]
            of_one: Statistics = {"missing": 1 - self.present_BK[:, k].mean()}
            if len(present):
                there_G, states = self._of_groups[k]
                of_one |= {what: is_so_G[there_G].mean() for what, is_so_G in states.items()}
                of_one |= {what: getattr(present, what)() for what in ("mean", "std", "min", "max")}
            if len(present) and name in self.bounds:
                low, high, slack = with_slack(self.bounds[name])
                of_one["at_low"] = (present <= low + slack).mean()
                of_one["at_high"] = (present >= high - slack).mean()
            found |= {f"{name}/{what}": value for what, value in of_one.items()}
        return found

    def correlations(self) -> Statistics:
        """Return the correlation within groups of each pair of rewards."""
        complete = np.flatnonzero(self.present_BK.all(axis=0)).tolist()
        whole = {k: unit(within_groups(self.values_BK[:, k], self.group_B)) for k in complete}
        found: Statistics = {}
        for pair in combinations(range(len(self.names)), 2):
            if whole.keys() >= {*pair}:
                x_B, y_B = (whole[k] for k in pair)
            else:  # a group's mean is over the samples that have both
                both_B = self.present_BK[:, pair].all(axis=1)
                there_BK, group_B = self.values_BK[both_B], self.group_B[both_B]
                x_B, y_B = (unit(within_groups(there_BK[:, k], group_B)) for k in pair)
            j, k = pair
            found[f"{self.names[j]}/correlation_with_{self.names[k]}"] = of_units(x_B, y_B)
        return found

    def updates_from_low(self, A_B: Floats) -> Statistics:
        """Return {"<reward>/update_all_low": share of the squares of A from groups all low}."""
        square_G = np.bincount(self.group_B, A_B**2)
        if not square_G.any():
            return {}
        return {
            f"{name}/update_all_low": square_G[there_G & low_G].sum() / square_G.sum()
            for name, (there_G, states) in zip(self.names, self._of_groups, strict=True)
            if there_G.any() and (low_G := states.get("groups_all_low")) is not None
        }

    def by_source(self, sources: "Sources") -> Statistics:
        """Return {"<reward>/<statistic>/<source>": value} of the rewards that a source has."""
        found: Statistics = {}
        for k, (there_G, states) in enumerate(self._of_groups):
            columns = {"mean": sources.of_samples(self.values_BK[:, k], self.present_BK[:, k])}
            columns |= {what: sources.of_groups(so_G, there_G) for what, so_G in states.items()}
            for what, of_each in columns.items():
                found |= {f"{self.names[k]}/{what}/{name}": x for name, x in of_each.items()}
        return found

    @cached_property
    def _of_groups(self) -> list[tuple[Bools, dict[str, Bools]]]:
        """Of each reward, which groups have it, and {statistic: in which groups it holds}.

        Without declared bounds, high and low are the highest and the lowest value of the step. If
        all its values are equal, nothing says which of the two they are.
        """
        order = np.argsort(self.group_B, kind="stable")
        starts = np.flatnonzero(np.diff(self.group_B[order], prepend=-1))
        values_BK, present_BK = self.values_BK[order], self.present_BK[order]
        high_GK = np.maximum.reduceat(np.where(present_BK, values_BK, -np.inf), starts)
        low_GK = np.minimum.reduceat(np.where(present_BK, values_BK, np.inf), starts)
        found = []
        for name, high_G, low_G in zip(self.names, high_GK.T, low_GK.T, strict=True):
            there_G = np.isfinite(high_G)
            states = {"varies": high_G > low_G}
            seen = low_G.min(), high_G.max()
            if name in self.bounds or seen[0] < seen[1]:
                low, high, slack = with_slack(self.bounds.get(name, seen))
                states["groups_all_high"] = low_G >= high - slack
                states["groups_all_low"] = high_G <= low + slack
            found.append((there_G, states))
        return found


@dataclass(frozen=True)
class Sources:
    """The data sources of a step; the samples of a group share one."""

    names: Sequence[str]
    source_B: Ints  # their numbers
    source_G: Ints

    @classmethod
    def of(cls, sources: Sequence[str], group_B: Ints) -> "Sources":
        """Return them, given the source of each sample."""
        names, source_B = np.unique(np.array(sources, dtype=object), return_inverse=True)
        source_G = np.empty(group_B.max() + 1, dtype=np.int64)
        source_G[group_B] = source_B
        return cls(names.tolist(), source_B, source_G)

    def of_samples(self, value_B: npt.NDArray[Any], there_B: Bools) -> dict[str, float]:
        """Return {source: mean over its samples that are there}."""
        return self._means(self.source_B[there_B], value_B[there_B])

    def of_groups(self, value_G: npt.NDArray[Any], there_G: Bools) -> dict[str, float]:
        """Return {source: mean over its groups that are there}; empty if sources are many."""
        if len(self.names) > MOST_SOURCES:
            return {}
        return self._means(self.source_G[there_G], value_G[there_G])

    def _means(self, source_X: Ints, value_X: npt.NDArray[Any]) -> dict[str, float]:
        count = np.bincount(source_X, minlength=len(self.names))
        total = np.bincount(source_X, value_X, minlength=len(self.names))
        return {name: total[i] / count[i] for i, name in enumerate(self.names) if count[i]}
