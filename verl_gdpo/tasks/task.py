"""The record that describes a task to the reward manager, `check`, data preparation and reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rewards = Mapping[str, float | None]


def _nothing(*_args: Any, **_options: Any) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Evaluation:
    """How `verl-gdpo evaluate` scores the answers to the rows of a task.

    columns: {column of the table: function of the rewards}. With none, each reward is one.
    options: of the scorer, whatever a run has.
    max_tokens: the limit of an answer, unless a run or --max-tokens has another.
    """

    columns: Mapping[str, Callable[[Mapping[str, Any]], float]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 1024


@dataclass(frozen=True)
class Programs:
    """What the reward manager needs of a scorer that runs programs, which takes one more keyword.

    at_once: `at_once()` returns how many programs this machine runs at a time.
    notes: `notes()` returns what the scorer fills in for the log: the keyword `notes`. Its
        `numbers()` are logged.
    """

    at_once: Callable[[], int]
    notes: Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """One task: its rows, its rewards and its answers.

    name: the NAME in `recipes/task/NAME.yaml` and `verl-gdpo data NAME`.
    data_sources: values of verl's column `data_source`; data preparation writes the first one.
    score: `score(response, ground_truth, *, response_tokens, step, **options)` returns
        {reward: value}. A bad response gets a low score, a bad ground truth raises ValueError. A
        value is None where the reward does not apply to the row.
    bounds: `bounds(**options)` returns {reward: (lowest, highest)}. The rewards of `score` stay
        within these bounds during a whole run with these options.
    reward_names: all rewards that `score` may return, under any options.
    good_response: `good_response(ground_truth)` returns a response with the highest rewards.
        `check` scores it and damaged copies of it.
    system_prompt: the instructions that data preparation puts before each question. With None, each
        row has its own.
    verl_names: {name of a reward in verl's own scorer for these rows: our name}.
    labels: `labels(ground_truth)` returns texts such as ["calls: 2"]; the report of the data counts
        how many rows have each text.
    missing: `missing(**options)` returns what this machine cannot give to `score`, for `check` to
        say. It raises OSError where the machine cannot score at all.
    programs: see `Programs`; None for a scorer that runs none.
    main_reward: the reward that says whether an answer is right, which `evaluate` shows first.
    rows: the module whose `SOURCES` (`preparation/sources.py`) says where rows come from. Only data
        preparation imports it. Without one, they are files of questions and answers.
    evaluation: see `Evaluation`.
    origin: the distribution that has the task; the registry sets it.
    """

    name: str
    data_sources: tuple[str, ...]
    score: Callable[..., Rewards]
    bounds: Callable[..., Mapping[str, tuple[float, float]]]
    reward_names: tuple[str, ...]
    good_response: Callable[[str], str]
    system_prompt: str | None
    verl_names: Mapping[str, str] = field(default_factory=dict)
    labels: Callable[[str], Sequence[str]] = _nothing
    missing: Callable[..., Sequence[str]] = _nothing
    programs: Programs | None = None
    main_reward: str = ""
    rows: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)
    origin: str = "verl-gdpo"

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Score an empty response, to find a bad ground truth before training.

        Raises:
            TypeError, ValueError: the ground truth is bad.
        """
        self.score("", ground_truth, response_tokens=0)
