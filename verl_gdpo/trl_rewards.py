"""Our tasks as the `reward_funcs` of TRL's trainers, with GDPO as TRL computes it.

    from trl import GRPOConfig, GRPOTrainer
    from verl_gdpo.tasks import TASKS
    from verl_gdpo.trl_rewards import reward_funcs

    GRPOTrainer(
        model, reward_funcs(TASKS["gsm8k"]), train_dataset=rows,  # of `verl-gdpo data gsm8k`
        args=GRPOConfig(multi_objective_aggregation="normalize_then_sum", ...),
    )

For users of TRL alone: nothing in this package imports this module, which needs neither verl nor
TRL itself. Relies on how TRL 1.16 calls a reward function: with `completions`, `completion_ids`,
`trainer_state` and the columns of the rows, for a list of numbers; None is a missing reward.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from verl_gdpo.algorithm.values import value_or_error
from verl_gdpo.scoring.response import Response, Turn, arguments_for, given_thought
from verl_gdpo.tasks import Task, options_of
from verl_gdpo.tasks.tool_rl.call_formats import ARGUMENTS_KEY, XML_AND_BARE, call_format_of
from verl_gdpo.tasks.tool_rl.form import (
    NAME_KEY,
    PARAMETERS_KEY,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
)

# Where TRL puts what it read as the thought: in Qwen3's messages, and in those of LFM2.5
THOUGHT_KEYS = ("reasoning_content", "thinking")
CALLS_KEY = "tool_calls"


class Sample(NamedTuple):
    """A completion and what its scorer is told.

    ground_truth: not checked.
    response_tokens: how many tokens the completion has.
    step: of the training, from 1 on; None if the caller has no `trainer_state`.
    """

    data_source: str
    response: Response
    ground_truth: Any
    response_tokens: int
    step: int | None


def reward_funcs(*tasks: Task, prompt_end: str = "", **options: Any) -> list["RewardFunction"]:
    """Return one function for each reward of the tasks, in alphabetical order.

    A function has the name of its reward, under which TRL logs it. A completion is scored once,
    whichever function is asked first, and the completions of a batch are scored at the same time.
    A task scores the answer of a completion or all of it, as in verl: see `scoring/response.py`.
    The functions can be pickled, as a list.

    >>> from verl_gdpo.tasks import TASKS
    >>> functions = reward_funcs(TASKS["gsm8k"])
    >>> [function.__name__ for function in functions]
    ['correctness', 'format', 'integer']
    >>> rows = {"data_source": ["verl_gdpo/gsm8k"], "reward_model": [{"ground_truth": "72"}]}
    >>> answer = "<think>24 + 48</think>\\n<answer>72</answer>"
    >>> [function(completions=[answer], completion_ids=[[1, 2]], **rows) for function in functions]
    [[1.0], [1.0], [1.0]]

    Args:
        tasks: one or several of `verl_gdpo.tasks.TASKS`. A row is scored by the task of its
            `data_source`; a reward that only other tasks have is None.
        prompt_end: what the chat template writes behind the messages of a conversation, as far as
            it opens or closes the thought, such as "<think>\\n". TRL does not tell it.
        options: keyword arguments of the tasks' scorers, such as `normalize_numbers=True`.

    Raises:
        ValueError: no task; a bad option, or one that no task takes.
    """
    if not tasks:
        raise ValueError("TRL rewards: got no task; expected some of verl_gdpo.tasks.TASKS")
    taken: set[str] = set()
    for task in tasks:
        taken.update(options_of(task))
    unknown = options.keys() - taken
    if unknown:
        names = [task.name for task in tasks]
        raise ValueError(
            f"TRL rewards, tasks {names}: got the options {sorted(unknown)}; "
            f"expected some of {sorted(taken)}"
        )
    scoring = _Scoring(tasks, options, given_thought(prompt_end))
    return [RewardFunction(name, scoring) for name in scoring.reward_names]


class RewardFunction:
    """One reward as TRL calls it. Of a partial, TRL would log the name of the function inside."""

    def __init__(self, name: str, scoring: "_Scoring") -> None:
        self.__name__ = name
        self._scoring = scoring

    def __call__(self, **batch: Any) -> list[float | None]:
        """Return the reward of each completion, None where it does not apply.

        Args:
            batch: TRL's arguments. Of the rows' columns, `data_source` and `reward_model` are used,
                as `verl-gdpo data` writes them. A prompt that is a text says whether it opens or
                closes the thought; of messages, `prompt_end` of `reward_funcs` says it.

        Raises:
            ValueError: a column is missing, a completion is not one text, a row is of none of the
                tasks, its ground truth is bad, or its reward is not finite.
        """
        samples = _samples(batch, self._scoring)
        return [rewards.get(self.__name__) for rewards in self._scoring.rewards(samples)]


class _Scorer(NamedTuple):
    """What is needed of a task, and can be pickled; see `Task.score` and `Task.scores`."""

    score: Callable[..., Mapping[str, float | None]]
    scores: Literal["response", "answer"]
    options: Mapping[str, Any]


class _ScoredBatch(NamedTuple):
    samples: list[Sample]
    rewards: list[dict[str, float | None]]


class _Scoring:
    """Scores a batch once for all functions that are asked about it."""

    def __init__(
        self, tasks: Sequence[Task], options: Mapping[str, Any], given_by_template: str
    ) -> None:
        """Look up the scorers.

        Args:
            given_by_template: the opened or closed thought with which a conversation's prompt ends.
        """
        self.given_by_template = given_by_template
        self._scorers: dict[str, _Scorer] = {}  # {data source: how its rows are scored}
        names: set[str] = set()
        for task in tasks:
            own = {name: options[name] for name in options_of(task) if name in options}
            names.update(task.bounds(**own))
            scorer = _Scorer(task.score, task.scores, own)
            for source in task.data_sources:
                self._scorers[source] = scorer
        self.reward_names = sorted(names)
        self.call_format = options.get("call_format")  # None: none is named
        self._last = _ScoredBatch([], [])

    def rewards(self, samples: list[Sample]) -> list[dict[str, float | None]]:
        """Return the rewards of each sample; those of the latest batch are kept."""
        if samples != self._last.samples:
            # Most scorers that take long wait for another process.
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                rewards = list(threads.map(self._score, range(len(samples)), samples))
            self._last = _ScoredBatch(samples, rewards)
        return self._last.rewards

    def _score(self, number: int, sample: Sample) -> dict[str, float | None]:
        source = sample.data_source
        try:
            if source not in self._scorers:
                raise ValueError(f"expected a data_source among {sorted(self._scorers)}")
            scorer = self._scorers[source]
            text, told = arguments_for(scorer, sample.response)
            scored = scorer.score(
                text,
                sample.ground_truth,
                response_tokens=sample.response_tokens,
                step=sample.step,
                **told,
                **scorer.options,
            )
            rewards = {}
            for name, value in scored.items():
                # TRL would take NaN for a missing reward.
                rewards[name] = value_or_error(value, f"reward {name!r} ")
            return rewards
        except (TypeError, ValueError) as error:
            where = f"TRL rewards, completion {number} (data_source {source!r})"
            raise ValueError(f"{where}: {error}") from error


def _samples(batch: Mapping[str, Any], scoring: _Scoring) -> list[Sample]:
    for column in ("data_source", "reward_model"):
        if column not in batch:
            raise ValueError(
                f"TRL rewards: the rows have no column {column!r}; expected rows of `verl-gdpo "
                "data`, or the columns data_source='verl_gdpo/gsm8k' (for example) and "
                f"reward_model={{'ground_truth': ...}}; got {sorted(batch)}"
            )
    tokens = [len(ids) for ids in batch["completion_ids"]]
    responses = _responses(batch, tokens, scoring)
    step = None
    state = batch.get("trainer_state")
    if state is not None:
        # verl, for which the scorers are written, calls the first step 1.
        step = state.global_step + 1
    ground_truths = []
    for reward_model in batch["reward_model"]:
        # A row without a ground truth is refused by its scorer, whose message names the row.
        ground_truths.append((reward_model or {}).get("ground_truth"))
    rows = zip(batch["data_source"], responses, ground_truths, tokens, strict=True)
    return [Sample(source, response, truth, count, step) for source, response, truth, count in rows]


def _responses(
    batch: Mapping[str, Any], tokens: Sequence[int], scoring: _Scoring
) -> list[Response]:
    """Return the completions of a batch.

    Args:
        tokens: how many of them each completion has.
    """
    # A caller who is not TRL may leave out the prompts.
    prompts = batch.get("prompts") or [None] * len(tokens)
    responses = []
    rows = zip(batch["completions"], prompts, tokens, strict=True)
    for number, (completion, prompt, count) in enumerate(rows):
        given = scoring.given_by_template
        if isinstance(prompt, str):
            given = given_thought(prompt)
        turn = Turn(_text(number, completion, scoring.call_format), given)
        responses.append(Response((turn,), count))
    return responses


def _text(number: int, completion: Any, call_format: str | None) -> str:
    """Return what the model wrote: a text, or the one message of a conversation."""
    if isinstance(completion, str):
        return completion
    text = None
    if len(completion) == 1:
        text = _text_of_message(completion[0], call_format)
    if text is None:
        raise ValueError(
            f"TRL rewards, completion {number}: got {str(completion)[:200]}; expected a text, or "
            f"one message with role, content and, where TRL has read them, one of {THOUGHT_KEYS} "
            f"and {CALLS_KEY}. A scorer reads the text that was generated"
        )
    return text


def _text_of_message(message: Mapping[str, Any], call_format: str | None) -> str | None:
    """Return the text of a message, of which TRL may have read the thought and the calls.

    TRL has removed the tags, the white space at them, and the order of content and calls. They are
    written again as the tasks ask for them, and in the order of Qwen3's template: the thought, the
    content, the calls. None for another message.
    """
    content = message.get("content")
    known = {"role", "content", *THOUGHT_KEYS, CALLS_KEY}
    if "role" not in message or not isinstance(content, str) or not message.keys() <= known:
        return None
    parts = []
    if content:
        parts.append(content)
    calls = message.get(CALLS_KEY)
    if calls:
        parts.append(_written(calls, call_format))
    for key in THOUGHT_KEYS:
        thought = message.get(key)
        if thought is None:
            continue
        # A thought below which nothing stands may have been cut off, so it is left open.
        closing = THINK_CLOSE if parts else ""
        parts.insert(0, f"{THINK_OPEN}{thought}{closing}")
    return "\n".join(parts)


def _written(calls: Sequence[Mapping[str, Any]], call_format: str | None) -> str:
    """Return calls that TRL has read, as the model's template writes them.

    Of calls in XML and of bare JSON, TRL keeps the arguments alone. Of JSON in tags it keeps each
    key that the model wrote, so that a call with a wrong key stays wrong.
    """
    functions = [call.get("function", call) for call in calls]
    try:
        if call_format in XML_AND_BARE and all(map(_has_arguments, functions)):
            return _written_by_name(functions, call_format)
        blocks = []
        for function in functions:
            written = json.dumps(function, ensure_ascii=False)
            blocks.append(f"{TOOL_CALL_OPEN}\n{written}\n{TOOL_CALL_CLOSE}")
        return "\n".join(blocks)
    except RecursionError:  # the model's JSON is nested too deep to be written again
        return ""


def _has_arguments(function: Mapping[str, Any]) -> bool:
    return NAME_KEY in function and isinstance(function.get(ARGUMENTS_KEY), Mapping)


def _written_by_name(functions: Sequence[Mapping[str, Any]], call_format: str) -> str:
    calls = []
    for function in functions:
        calls.append({NAME_KEY: function[NAME_KEY], PARAMETERS_KEY: function[ARGUMENTS_KEY]})
    return call_format_of(call_format).write(calls)
