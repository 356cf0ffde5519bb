"""Recomputes the advantages of one step of a rollout dump, under any settings.

Shape suffix: B rows of the step's dump, with padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.advantage.equation_inputs import VERL_EPS
from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.rows import RewardRows
from verl_gdpo.run.dump_reader import reward_rows
from verl_gdpo.tools.replay.arms import Arm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """The data of one step that every arm needs."""

    number: int
    rewards: RewardRows
    group_ids: npt.NDArray[Any]
    tokens_B: Ints | None  # number of trained tokens; None in a dump of verl itself
    logged_B: Floats | None  # None in a dump of verl itself
    score_B: Floats  # the sum that verl trained on; only read without `logged_B`

    @classmethod
    def of(cls, number: int, rows: Sequence[Mapping[str, Any]]) -> "Step":
        """Return the step.

        Raises:
            ValueError: an advantage, or the score of a dump without them, is no finite number.
        """
        has_advantages = any(row["advantage"] is not None for row in rows)
        has_tokens = all(row["trained_tokens"] is not None for row in rows)
        return cls(
            number=number,
            rewards=reward_rows(rows, number),
            group_ids=np.array([row["group"] for row in rows]),
            tokens_B=np.array([row["trained_tokens"] for row in rows], dtype=np.int64)
            if has_tokens
            else None,
            logged_B=_finite(rows, "advantage") if has_advantages else None,
            score_B=np.zeros(len(rows)) if has_advantages else _finite(rows, "score"),
        )

    @property
    def trained_B(self) -> npt.NDArray[np.bool_]:
        """The rows that have an advantage; of a dump of verl itself, all that are not padding."""
        has_tokens_B = True if self.tokens_B is None else self.tokens_B > 0
        result: npt.NDArray[np.bool_] = has_tokens_B & ~self.rewards.is_padding_B
        return result

    def of_score(self, normalize_by_std: bool) -> Floats:
        """Return the advantages of verl's grpo on the score of the dump."""
        return self._of_sessions(self._grpo(self.score_B, normalize_by_std))

    def advantages(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return each row's advantage as a dump holds it: 0 for padding and without trained tokens.

        Raises:
            ValueError: the arm's estimator is neither gdpo nor grpo.
        """
        counted_B = self.rewards.counted_B
        if arm.estimator == "gdpo":
            if self.tokens_B is None and arm.settings.batch_norm == "token":
                raise ValueError(
                    f"{arm.name} normalises over tokens (batch_norm=token), and verl's own dump "
                    "does not say how many a rollout has; train with verl-gdpo to have them"
                )
            tokens_B = None if self.tokens_B is None else torch.from_numpy(self.tokens_B)
            scalars = scalars_of(rewards, counted_B, self.group_ids, arm.settings, tokens_B)
            A_B = scalars.A_B.numpy()
        elif arm.estimator == "grpo":
            scores_B = rewards.values_BK @ np.array(list(rewards.weights.values()))
            A_B = self._grpo(scores_B, arm.settings.normalize_by_std)
        else:
            raise ValueError(f"adv_estimator={arm.estimator}: replay only computes gdpo and grpo")
        return self._of_sessions(A_B)

    def _grpo(self, scores_B: Floats, normalize_by_std: bool) -> Floats:
        counted_B = self.rewards.counted_B
        A_B = np.zeros(len(scores_B))
        group_B = group_numbers(self.group_ids[counted_B])
        A_B[counted_B] = verl_grpo(scores_B[counted_B], group_B, normalize_by_std)
        return A_B

    def _of_sessions(self, A_B: Floats) -> Floats:
        """The advantage of a session in each of its rows."""
        result: Floats = np.where(self.trained_B, A_B[self.rewards.session_B], 0.0)
        return result


def _finite(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """A column of a dump."""
    values_B = np.array([row[key] for row in rows], dtype=np.float64)
    for row in np.flatnonzero(~np.isfinite(values_B)).tolist():
        what = "logged advantage" if key == "advantage" else key
        raise ValueError(
            f"{rows[row]['uid']}: the {what} is {rows[row][key]}; expected a finite number"
        )
    return values_B


def verl_grpo(scores_B: Floats, group_B: Ints, normalize_by_std: bool) -> Floats:
    """Return A_B of verl's own `grpo`, with the same float32 operations.

    So we get the numbers that verl trains with. A constant score that float32 cannot hold can leave
    a residue of about 0.1, and the sample of a group of one keeps its score. One difference
    remains: a dump does not keep the order of a group's rows, which can change the last bit of its
    mean.

    Args:
        group_B: the group of each row, numbered 0, 1, ...

    Source: `compute_grpo_outcome_advantage` of verl 0.9.
    """
    order = np.argsort(group_B, kind="stable")
    size_G = torch.from_numpy(np.bincount(group_B))
    scores = torch.from_numpy(scores_B[order].astype(np.float32))
    groups = torch.split(scores, size_G.tolist())
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    mean_G = torch.stack([torch.mean(group) if len(group) > 1 else zero for group in groups])
    std_G = torch.stack([torch.std(group) if len(group) > 1 else one for group in groups])
    result = scores - mean_G.repeat_interleave(size_G)
    if normalize_by_std:
        result = result / (std_G + VERL_EPS).repeat_interleave(size_G)
    A_B = np.empty(len(scores_B))
    A_B[order] = result.numpy()
    return A_B


def group_numbers(group_ids: npt.NDArray[Any]) -> Ints:
    """Return the group number of each row, (B,) int64."""
    index: Ints = np.unique(group_ids, return_inverse=True)[1].astype(np.int64)
    return index
