"""What GDPO would change for the rewards of a run: shares, preferences, and weights.

GRPO and GDPO are those of the paper, with the run's rewards, weights and conditions, and GDPO
without its step over the batch, which only scales. What is computed is of the run's first steps.
Nothing here says what to train with. workshop/experiments/RESULTS.md counts how often the intervals
hold the truth.
Shape suffixes: B samples, K rewards, G groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import optimize, stats

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
from verl_gdpo.algorithm.zero import SAME_SHARE, SOLVED, Bools, Floats, or_0
from verl_gdpo.scoring.function_list import KEY, entries_of
from verl_gdpo.terminal import printable, render, wrapped

TITLE = "What would GDPO change?"
CAPTION = "How much of the update comes from each reward"
HEADER = ("reward", "range", "GRPO", "GRPO by range", "GDPO")
LEGEND = (
    "GRPO by range is GRPO on rewards that are divided by their ranges. Below 0%, a reward pulls "
    "against the others. In brackets: an interval of 95%."
)

GRPO, GDPO = verl_grpo_settings(GdpoSettings()), GdpoSettings(batch_norm="none")
FIRST_STEPS = 30  # later ones show another policy
FEWEST = 4  # groups with a signal that an interval needs

# of a step: the rewards of all rows after their conditions, which rows count, and their group ids
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
        size_G, part_GK = self.squares_G / size, self.products_GK / size
        mean_K = (part_GK.sum(0) + 1) / (count + 2)
        apart_GK = part_GK - np.outer(size_G, mean_K)
        square_K = (apart_GK**2).sum(0) + mean_K**2 + (1 - mean_K) ** 2
        error_K = np.sqrt(square_K / ((count + 2) * (count + 1)))
        return np.stack(stats.t.interval(0.95, count - 1, mean_K, error_K))


class Evidence:
    """What the first steps show together. A step may lack rewards that others have.

    Rewards of weight 0 are left out. A weight that follows a schedule counts with its mean.

    Args:
        settings: of the run. Bounds of rewards replace what the steps show of their ranges.
    """

    def __init__(self, steps: Sequence[StepRewards], settings: GdpoSettings) -> None:
        self.settings = settings
        self.has_rubric = any(step[0].criteria for step in steps)
        weights = pd.DataFrame([step[0].weights for step in steps]).mean().loc[lambda w: w != 0]
        tables = pd.concat([_table(*step) for step in steps], keys=range(len(steps)))
        values = tables.sort_index()[weights.index]
        self.group_B = values.groupby(level=(0, 1)).ngroup().to_numpy(copy=True)
        self.weights_K = weights.to_numpy()
        # copies: torch warns of what it may not write to
        arrays = (table.to_numpy(copy=True) for table in (values.fillna(0.0), values.notna()))
        self.rewards = RewardMatrix(weights.to_dict(), *arrays)
        self.ranges = self.rewards.ranges(settings)

    @cached_property
    def updates(self) -> list[Update]:
        """Under GRPO, under GRPO on rewards divided by their ranges, and under GDPO."""
        by_range_K = [size or 1.0 for size in self.ranges.values()]
        arms = (GRPO, 1.0), (GRPO, by_range_K), (GDPO, 1.0)
        return [self._update(*self._contributions(*arm)) for arm in arms]

    @cached_property
    def changed_preferences(self) -> Floats:
        """Of the pairs of samples of one prompt: three shares in which GDPO and GRPO differ.

        GDPO prefers one sample and GRPO the other; GDPO alone prefers one; GRPO alone does.
        """
        of_rewards = self.rewards.values_BK, self.rewards.present_BK, self.weights_K, self.group_B
        estimators, counts = advantages_without_eps(*of_rewards), np.zeros(4)
        for apart in range(1, int(np.bincount(self.group_B).max())):  # two of the sorted samples
            there = self.group_B[apart:] == self.group_B[:-apart]
            gdpo, grpo = (np.sign(S_B[apart:] - S_B[:-apart])[there] for S_B in estimators)
            kinds = gdpo * grpo < 0, (grpo == 0) & (gdpo != 0), (gdpo == 0) & (grpo != 0)
            counts += [*np.count_nonzero(kinds, axis=1), len(gdpo)]
        return np.asarray(counts[:3] / max(counts[3], 1))

    def keeping_weights(self) -> tuple[Floats, bool]:
        """Return weights under which GDPO has the shares that GRPO has with the run's weights.

        The reward with the largest factor keeps its weight, and so does one that never varies.

        Returns: the weights, and whether they keep the shares. If none are found, they repeat the
        spreads: some shares below 0 exist under no weights, and the search ends at some others.
        """
        centred = [within_groups(value_B, self.group_B) for value_B in self.rewards.values_BK.T]
        spread_K, weights_K = np.linalg.norm(centred, axis=1), self.weights_K.copy()
        varies_K = spread_K > 0
        if not varies_K.any():
            return weights_K, True
        c_BK = self._contributions(GDPO)[0][:, varies_K]
        square_KK, target_K = c_BK.T @ c_BK, self.updates[0].share_K[varies_K]

        def missed(log_K: Floats) -> Floats:
            part_K = np.exp(log_K) * (square_KK @ np.exp(log_K))
            return np.asarray(part_K / (part_K.sum() or 1.0) - target_K)

        start_K = np.log(spread_K[varies_K])
        solution = optimize.least_squares(missed, start_K, xtol=SOLVED, ftol=SOLVED, gtol=SOLVED)
        is_kept = bool(np.abs(solution.fun).max() < SAME_SHARE)
        factor_K = np.exp(solution.x if is_kept else start_K)
        weights_K[varies_K] *= factor_K / factor_K.max()
        return weights_K, is_kept

    def _contributions(self, settings: GdpoSettings, divisor_K: Any = 1.0) -> tuple[Floats, Floats]:
        """c_BK and S_B, with weights that are divided."""
        weights_K = self.weights_K / divisor_K
        rewards = replace(self.rewards, weights=dict(zip(self.ranges, weights_K, strict=True)))
        scalars = scalars_of(rewards, self.group_B >= 0, self.group_B, settings)
        z_BK, S_B, values_BK = scalars.z_BK.numpy(), scalars.S_B.numpy(), rewards.values_BK
        return contributions(z_BK, S_B, values_BK, weights_K, self.group_B, settings), S_B

    def _update(self, c_BK: Floats, S_B: Floats) -> Update:
        S_B = or_0(S_B) * groups_with_signal(S_B, c_BK, self.group_B)[self.group_B]
        columns = (*(c_BK.T * S_B), S_B**2)
        sums = np.array([np.bincount(self.group_B, of) for of in columns], np.float64)
        return Update(sums[:-1].T, sums[-1])


def _table(rewards: RewardMatrix, counted_B: Bools, group_ids: Any) -> pd.DataFrame:
    """A column for each reward, NaN where it does not apply; a row for each sample of a group."""
    values_BK = np.where(rewards.present_BK, rewards.values_BK, np.nan)
    return pd.DataFrame(values_BK, group_ids, [*rewards.weights])[counted_B]


class Description(NamedTuple):
    """What GDPO would change: a table of the rewards, sentences, and an override to paste."""

    rows: Sequence[Sequence[str]]  # under `HEADER`
    sentences: Sequence[str]  # the last one says what the weights of `line` do
    line: str

    def __str__(self) -> str:
        """Return it for a terminal."""
        lines = [f"{CAPTION}:", "", render(HEADER, self.rows), "", wrapped(LEGEND), ""]
        lines += [wrapped(printable(sentence)) for sentence in self.sentences]
        lines.append(printable(self.line))
        return "\n".join(lines)


def describe(evidence: Evidence, config: Any = None) -> Description:
    """Return the description of the first steps of a run, which has this configuration."""
    reversed, untied, tied = (f"{share:.1%}" for share in evidence.changed_preferences)
    orders = (
        f"Take two answers to the same prompt. In {reversed} of such pairs, GDPO prefers one and "
        f"GRPO the other; in {untied}, GDPO alone prefers one, and in {tied}, GRPO alone."
    )
    weights_K, is_kept = evidence.keeping_weights()
    keeps = "No weights keep the balance that GRPO gives now. These are the spreads of the rewards:"
    if is_kept:
        keeps = "To keep the balance that GRPO gives now, use these weights with GDPO:"
    columns = evidence.ranges.items(), *map(_shares, evidence.updates)
    rows = [[name, f"{size:.3g}", *of] for (name, size), *of in zip(*columns, strict=True)]
    sentences = [orders, keeps]
    if evidence.has_rubric:
        rubric = "A rubric counts here as one reward; GDPO normalises each of its criteria."
        sentences.insert(0, rubric)
    return Description(rows, sentences, _override(evidence, weights_K, config))


def _shares(update: Update) -> list[str]:
    """Each reward's share with its interval."""
    share_K, interval_2K = update.share_K.round(2) + 0.0, update.interval_2K  # no -0.0
    if interval_2K is None:
        return [f"{share:.0%} (too few groups)" for share in share_K]
    of_rewards = zip(share_K, *interval_2K.round(2) + 0.0, strict=True)
    return [f"{share:.0%} [{low:.0%}, {high:.0%}]" for share, low, high in of_rewards]


def _override(evidence: Evidence, weights_K: Floats, config: Any) -> str:
    """The override with other weights; what else the run sets of its rewards stays.

    Weights in the list of functions are taken out: a training refuses two that differ.
    """
    terms = dict(evidence.settings.rewards_as_written)
    for name, weight in zip(evidence.ranges, weights_K, strict=True):
        rounded, term = float(f"{weight:.3g}"), terms.get(name)
        terms[name] = {**term, "weight": rounded} if isinstance(term, Mapping) else rounded
    entries = {} if config is None else entries_of(config)
    listed = [f"'~{KEY}.{name}.weight'" for name, entry in entries.items() if "weight" in entry]
    return " ".join([*listed, line_of(REWARDS, terms)])
