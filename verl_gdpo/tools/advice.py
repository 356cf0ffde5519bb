"""What GDPO would change for the rewards of a run: shares, preferences, and weights to use with it.

GRPO and GDPO are those of the paper, with the run's rewards, weights and conditions, and GDPO
without its step over the batch, which only scales. What is computed is of the run's first steps.
Which weights are right depends on what the ranges mean, which no dump says; so it is said when to
use which. workshop/experiments/RESULTS.md counts how often the intervals hold the truth.
Shape suffixes: B samples, K rewards, G groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.metrics import (
    advantages_without_eps,
    contributions,
    groups_with_signal,
    verl_grpo_settings,
    within_groups,
)
from verl_gdpo.algorithm.read_settings import REWARDS, line_of
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.zero import SAME_SHARE, Bools, Floats, or_0
from verl_gdpo.scoring.function_list import KEY, entries_of
from verl_gdpo.terminal import printable, render, wrapped
from verl_gdpo.tools.share_weights import factors_with_shares

TITLE = "What would GDPO change?"
CAPTION = "How much of the update comes from each reward"
HEADER = ("reward", "range", "GRPO", "GRPO by range", "GDPO")
LEGEND = (
    "GRPO by range is GRPO on rewards that are divided by their ranges. Below 0%, a reward pulls "
    "against the others. In brackets: an interval of 95%."
)
# The numbers are what the answer earned in the setting `bonus` of workshop/experiments/bandit.
WEIGHTS = (
    "If a small range is meant, as of a bonus, use the spreads as weights; else keep yours. A "
    "simulated bonus that spoils the answer left 0.95 of the answers right with the spreads, 0.88 "
    "with GRPO, 0.64 with GRPO's balance, and 0.06 with weights of 1."
)

GRPO = verl_grpo_settings(GdpoSettings())
GDPO = GdpoSettings(batch_norm="none")
# Later steps show another policy.
FIRST_STEPS = 30
# So many groups with a signal are needed for an interval.
FEWEST = 4

# The rewards of all rows of a step after their conditions, which rows count, and their group ids.
StepRewards = tuple[RewardMatrix, Bools, Any]


class Update(NamedTuple):
    """What each group adds to the update: sums over its samples, 0 in a group without a signal."""

    products_GK: Floats  # of each reward's contribution and S
    squares_G: Floats  # of S

    @property
    def share_K(self) -> Floats:
        """Each reward's share of the update; 0 without any signal."""
        return np.asarray(self.products_GK.sum(0) / (self.squares_G.sum() or 1.0))

    @property
    def interval_2K(self) -> Floats | None:
        """The ends of a 95 % interval of each share; None with fewer groups than `FEWEST`.

        A group without a signal is not counted. A share is a mean over groups, so the interval is
        Student's. A reward that varies in few groups can look certain by chance. So two more groups
        of mean size are counted: the reward has the whole update of one, and nothing of the other.
        """
        count = np.count_nonzero(self.squares_G)
        if count < FEWEST:
            return None
        size = self.squares_G.sum() / count
        size_G = self.squares_G / size
        part_GK = self.products_GK / size
        mean_K = (part_GK.sum(0) + 1) / (count + 2)
        apart_GK = part_GK - np.outer(size_G, mean_K)
        square_K = (apart_GK**2).sum(0) + mean_K**2 + (1 - mean_K) ** 2
        error_K = np.sqrt(square_K / ((count + 2) * (count + 1)))
        return np.stack(stats.t.interval(0.95, count - 1, mean_K, error_K))


class KeepingWeights(NamedTuple):
    """Weights for GDPO, and what they keep of GRPO's shares."""

    weights_K: Floats
    share_K: Floats  # under GDPO with these weights
    missed: float  # the largest difference from a share under GRPO

    @property
    def is_kept(self) -> bool:
        return self.missed < SAME_SHARE


class Evidence:
    """What the first steps show together. A step may lack rewards that others have.

    Rewards of weight 0 are left out. A weight that follows a schedule counts with its mean.

    Args:
        settings: of the run. Bounds of rewards replace what the steps show of their ranges.
    """

    def __init__(self, steps: Sequence[StepRewards], settings: GdpoSettings) -> None:
        self.settings = settings
        self.has_rubric = any(rewards.criteria for rewards, _, _ in steps)
        mean_weights = pd.DataFrame([rewards.weights for rewards, _, _ in steps]).mean()
        weights = mean_weights[mean_weights != 0]
        tables = [_table(rewards, counted_B, ids) for rewards, counted_B, ids in steps]
        # The rows of a group stand together: they have its step and its id as their index.
        of_steps = pd.concat(tables, keys=range(len(steps))).sort_index()
        values = of_steps[weights.index]
        # Arrays are copied, because torch warns of those that it may not write to.
        self.group_B = values.groupby(level=(0, 1)).ngroup().to_numpy(copy=True)
        self.weights_K = weights.to_numpy()
        values_BK = values.fillna(0.0).to_numpy(copy=True)
        present_BK = values.notna().to_numpy(copy=True)
        self.rewards = RewardMatrix(weights.to_dict(), values_BK, present_BK)
        self.ranges = self.rewards.ranges(settings)

    @cached_property
    def updates(self) -> list[Update]:
        """Under GRPO, under GRPO on rewards divided by their ranges, and under GDPO."""
        range_K = [size or 1.0 for size in self.ranges.values()]
        of_grpo = self._contributions(GRPO)
        of_grpo_by_range = self._contributions(GRPO, range_K)
        arms = (of_grpo, of_grpo_by_range, self.of_gdpo)
        return [self._update(c_BK, S_B) for c_BK, S_B in arms]

    @cached_property
    def of_gdpo(self) -> tuple[Floats, Floats]:
        """What each reward adds to the advantage under GDPO, c_BK, and their sum S_B."""
        return self._contributions(GDPO)

    @cached_property
    def changed_preferences(self) -> Floats:
        """Of the pairs of samples of one prompt: three shares in which GDPO and GRPO differ.

        GDPO prefers one sample and GRPO the other; GDPO alone prefers one; GRPO alone does.
        """
        S_of_gdpo_B, S_of_grpo_B = advantages_without_eps(
            self.rewards.values_BK, self.rewards.present_BK, self.weights_K, self.group_B
        )
        opposite = 0
        gdpo_alone = 0
        grpo_alone = 0
        pairs = 0
        # The samples of a group stand together. So each pair of them is found once, by how far its
        # two samples are apart.
        largest_group = int(np.bincount(self.group_B).max())
        for apart in range(1, largest_group):
            is_pair = self.group_B[apart:] == self.group_B[:-apart]
            gdpo = np.sign(S_of_gdpo_B[apart:] - S_of_gdpo_B[:-apart])[is_pair]
            grpo = np.sign(S_of_grpo_B[apart:] - S_of_grpo_B[:-apart])[is_pair]
            opposite += np.count_nonzero(gdpo * grpo < 0)
            gdpo_alone += np.count_nonzero((gdpo != 0) & (grpo == 0))
            grpo_alone += np.count_nonzero((gdpo == 0) & (grpo != 0))
            pairs += len(gdpo)
        return np.array([opposite, gdpo_alone, grpo_alone]) / max(pairs, 1)

    @property
    def can_be_balanced(self) -> bool:
        """Whether GDPO counts two rewards, so that weights can change their shares."""
        return int(np.count_nonzero(self.counts_K)) > 1

    @cached_property
    def counts_K(self) -> Bools:
        """Whether a reward has a part in the update under GDPO.

        One that applies to a single sample of each group has none: nothing is compared. GRPO takes
        it as 0 in the other samples, and so compares.
        """
        c_BK, _ = self.of_gdpo
        return np.asarray((self.spread_K > 0) & c_BK.any(axis=0))

    def spread_weights(self) -> Floats:
        """Return the run's weights times the spread of each reward, so that GDPO counts these.

        The largest factor is 1. A reward that never varies keeps its weight.
        """
        largest = self.spread_K.max() or 1.0
        factor_K = np.where(self.spread_K > 0, self.spread_K / largest, 1.0)
        return np.asarray(self.weights_K * factor_K)

    def keeping_weights(self) -> KeepingWeights | None:
        """Return weights under which GDPO has the shares that GRPO has with the run's weights.

        The reward with the largest factor keeps its weight, and so does one that GDPO does not
        count. Some shares exist under no weights: then these are the nearest that were found. None
        if GRPO updates nothing.
        """
        counts_K = self.counts_K
        of_grpo_K = self.updates[0].share_K
        if not of_grpo_K.any():
            return None
        square_KK, target_K = self.equations()
        # GRPO counts a reward by its spread.
        found = factors_with_shares(square_KK, target_K, near_K=self.spread_K[counts_K])
        weights_K = self.weights_K.copy()
        weights_K[counts_K] *= found.factor_K
        share_K = np.zeros(len(self.weights_K))
        share_K[counts_K] = found.share_K
        # No weight gives a share to a reward that GDPO does not count.
        missed = float(np.abs(share_K - of_grpo_K).max())
        return KeepingWeights(weights_K, share_K, missed)

    def equations(self) -> tuple[Floats, Floats]:
        """Return Q of GDPO and the shares under GRPO, for `factors_with_shares`.

        They are of the rewards that GDPO counts, of which the shares add up to 1.
        """
        all_c_BK, _ = self.of_gdpo
        c_BK = all_c_BK[:, self.counts_K]
        target_K = self.updates[0].share_K[self.counts_K]
        if target_K.sum() > 0:
            target_K = target_K / target_K.sum()
        return c_BK.T @ c_BK, target_K

    @cached_property
    def spread_K(self) -> Floats:
        """The root of each reward's squares within groups."""
        centred = [within_groups(value_B, self.group_B) for value_B in self.rewards.values_BK.T]
        return np.asarray(np.linalg.norm(centred, axis=1))

    def _contributions(self, settings: GdpoSettings, divisor_K: Any = 1.0) -> tuple[Floats, Floats]:
        """Return c_BK and S_B, with weights that are divided."""
        weights_K = self.weights_K / divisor_K
        rewards = replace(self.rewards, weights=dict(zip(self.ranges, weights_K, strict=True)))
        every_B = np.ones(len(self.group_B), bool)
        scalars = scalars_of(rewards, every_B, self.group_B, settings)
        z_BK = scalars.z_BK.numpy()
        S_B = scalars.S_B.numpy()
        c_BK = contributions(z_BK, S_B, rewards.values_BK, weights_K, self.group_B, settings)
        return c_BK, S_B

    def _update(self, c_BK: Floats, S_B: Floats) -> Update:
        """Return the sums over each group, of which those without a signal are 0."""
        signal_G = groups_with_signal(S_B, c_BK, self.group_B)
        S_or_0_B = or_0(S_B) * signal_G[self.group_B]
        products_KG = [np.bincount(self.group_B, c_B * S_or_0_B) for c_B in c_BK.T]
        squares_G = np.bincount(self.group_B, S_or_0_B**2)
        return Update(np.array(products_KG).T, np.asarray(squares_G, np.float64))


def _table(rewards: RewardMatrix, counted_B: Bools, group_ids: Any) -> pd.DataFrame:
    """Return a column for each reward, NaN where it does not apply, and a row for each sample.

    The index is the group of the sample.
    """
    values_BK = np.where(rewards.present_BK, rewards.values_BK, np.nan)
    table = pd.DataFrame(values_BK, index=group_ids, columns=list(rewards.weights))
    return table[counted_B]


class Choice(NamedTuple):
    """Weights to use with GDPO."""

    sentence: str  # what they are for, or why there are none
    line: str = ""  # the override that sets them, to paste; "" where there are none


class Description(NamedTuple):
    """What GDPO would change: a table of the rewards, sentences, and weights to choose from.

    `WEIGHTS` says which of the weights to choose.
    """

    rows: Sequence[Sequence[str]]  # under `HEADER`
    sentences: Sequence[str]
    choices: Sequence[Choice]

    def __str__(self) -> str:
        """Return it for a terminal."""
        lines = [f"{CAPTION}:", "", render(HEADER, self.rows), "", wrapped(LEGEND), ""]
        for sentence in self.sentences:
            lines.append(wrapped(printable(sentence)))
        if any(choice.line for choice in self.choices):
            lines.append(wrapped(WEIGHTS))
        for choice in self.choices:
            lines.append(wrapped(printable(choice.sentence)))
            if choice.line:
                lines.append(printable(choice.line))
        return "\n".join(lines)


def describe(evidence: Evidence, config: Any = None) -> Description:
    """Return the description of the first steps of a run, which has this configuration."""
    grpo_K, by_range_K, gdpo_K = (_shares(update) for update in evidence.updates)
    shares_of_each = zip(grpo_K, by_range_K, gdpo_K, strict=True)
    rows = []
    for (name, size), shares in zip(evidence.ranges.items(), shares_of_each, strict=True):
        rows.append([name, f"{size:.3g}", *shares])

    sentences = []
    if evidence.has_rubric:
        sentences.append(
            "A rubric counts here as one reward; GDPO normalises each of its criteria."
        )
    opposite, gdpo_alone, grpo_alone = evidence.changed_preferences
    sentences.append(
        f"Take two answers to the same prompt. In {opposite:.1%} of such pairs, GDPO prefers one "
        f"and GRPO the other; in {gdpo_alone:.1%}, GDPO alone prefers one, and in "
        f"{grpo_alone:.1%}, GRPO alone."
    )
    return Description(rows, sentences, _choices(evidence, config))


def _choices(evidence: Evidence, config: Any) -> list[Choice]:
    """Return the weights to use with GDPO: what helped in our simulation comes first."""
    if not evidence.can_be_balanced:
        return [Choice("Fewer than two rewards vary here, so no weights change their shares.")]
    spreads = Choice(
        "The spreads of the rewards as weights, for small ranges that are meant:",
        _override(evidence, evidence.spread_weights(), config),
    )
    return [spreads, _balance(evidence, config)]


def _balance(evidence: Evidence, config: Any) -> Choice:
    """Return the weights that keep GRPO's shares; where none were found, only a sentence."""
    keeping = evidence.keeping_weights()
    if keeping is None:
        return Choice("GRPO updates nothing here, so there is no balance of it to keep.")
    if keeping.is_kept:
        return Choice(
            "To keep the balance that GRPO gives now, use these weights with GDPO:",
            _override(evidence, keeping.weights_K, config),
        )
    reached = []
    for name, share in zip(evidence.ranges, keeping.share_K, strict=True):
        # Adding 0 makes 0.0 of -0.0.
        percent = round(100 * share, 1) + 0.0
        reached.append(f"{name} {percent:.1f}%")
    return Choice(
        "No weights were found with which GDPO keeps the balance that GRPO gives now. The nearest "
        f"ones reach {', '.join(reached)}, and so miss it by up to {100 * keeping.missed:.2g} "
        "percentage points."
    )


def _shares(update: Update) -> list[str]:
    """Return each reward's share with its interval, as text."""
    # Adding 0 makes 0.0 of -0.0.
    share_K = update.share_K.round(2) + 0.0
    interval_2K = update.interval_2K
    if interval_2K is None:
        return [f"{share:.0%} (too few groups)" for share in share_K]
    low_K, high_K = interval_2K.round(2) + 0.0
    shown = []
    for share, low, high in zip(share_K, low_K, high_K, strict=True):
        shown.append(f"{share:.0%} [{low:.0%}, {high:.0%}]")
    return shown


def _override(evidence: Evidence, weights_K: Floats, config: Any) -> str:
    """Return the override with other weights; what else the run sets of its rewards stays.

    Weights in the list of functions are taken out: a training refuses two that differ.
    """
    terms = dict(evidence.settings.rewards_as_written)
    for name, weight in zip(evidence.ranges, weights_K, strict=True):
        rounded = float(f"{weight:.3g}")
        term = terms.get(name)
        if isinstance(term, Mapping):
            terms[name] = {**term, "weight": rounded}
        else:
            terms[name] = rounded

    overrides = []
    if config is not None:
        for name, entry in entries_of(config).items():
            if "weight" in entry:
                overrides.append(f"'~{KEY}.{name}.weight'")
    overrides.append(line_of(REWARDS, terms))
    return " ".join(overrides)
