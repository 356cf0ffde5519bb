"""The record that makes a task known: to the reward manager, `check`, data preparation, reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rewards = Mapping[str, float | None]


def _no_labels(_ground_truth: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Task:
    """One task: its rows, its rewards and its answers.

    name: as in `recipes/task/NAME.yaml` and `verl-gdpo data NAME`.
    data_sources: values of verl's column `data_source`; data preparation writes the first.
    score: `score(response, ground_truth, *, response_tokens, step, **options)` returns
        {reward: value}. A bad response gets a low score, a bad ground truth raises ValueError. A
        value is None where the reward does not apply to the row.
    bounds: `bounds(**options)` returns {reward: (lowest, highest)}, the values between which each
        reward of `score` lies over a whole run with these options.
    reward_names: every reward that `score` may return under some option.
    good_response: `good_response(ground_truth)` returns a response with full marks. `check` scores
        it and damaged copies of it.
    system_prompt: says how to answer, for data preparation; None: each row brings its own.
    verl_names: {name that verl's own scorer of these rows gives a reward: ours}.
    labels: what a report of the data counts, given a ground truth, such as ["calls: 2"].
    missing: what this machine cannot give to `score`, for `check` to say. Raises OSError where it
        cannot score at all.
    """

    name: str
    data_sources: tuple[str, ...]
    score: Callable[..., Rewards]
    bounds: Callable[..., Mapping[str, tuple[float, float]]]
    reward_names: tuple[str, ...]
    good_response: Callable[[str], str]
    system_prompt: str | None
    verl_names: Mapping[str, str] = field(default_factory=dict)
    labels: Callable[[str], Sequence[str]] = _no_labels
    missing: Callable[[], Sequence[str]] = tuple

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Score an empty response, to find a bad ground truth before training.

        Raises:
            TypeError, ValueError: what is wrong with it.
        """
        self.score("", ground_truth)
