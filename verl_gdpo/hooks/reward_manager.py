"""The reward manager `reward.reward_manager.name=gdpo`, which returns every reward by its name.

Relies on verl 0.9:
- `RewardManagerBase` in `verl.experimental.reward_loop.reward_manager.base`, with the coroutine
  `run_single(data) -> {"reward_score", "reward_extra_info"}`;
- the setting `transfer_queue.enable`, true under V1 alone, and the column `response_len` of `data`.
"""

import asyncio
import functools
import inspect
import logging
import math
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_gdpo.algorithm.matrix import not_the_sum, rewards_among, terms_among
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rubrics import Rubric
from verl_gdpo.algorithm.settings import GdpoSettings, WeightedSum
from verl_gdpo.algorithm.values import (
    ERROR_KEY,
    NOTES_KEY,
    RESPONSE_KEY,
    ROLLOUT_FACTS,
    RUBRIC_KEY,
    RowNames,
    as_json,
    check_name,
    is_internal,
    is_number,
    may_be_meant,
    plain_name,
    value_or_error,
)
from verl_gdpo.algorithm.zero import is_the_sum
from verl_gdpo.hooks.agent_loop import IS_VALIDATION, MASK_RUNS
from verl_gdpo.hooks.configuration import has_own_scorer, row_names
from verl_gdpo.hooks.refusal import raise_refusals
from verl_gdpo.hooks.shared_limits import counter_of_run
from verl_gdpo.scoring.function_list import (
    KEY,
    OF_GROUP,
    OF_RESPONSE,
    OF_STEP,
    algorithm_of,
    entries_of,
    is_asked,
    is_limited,
    task_of_entry,
    tasks_that_score,
    tells_validation_apart,
    validation_settings,
)
from verl_gdpo.scoring.limits import Limiter, check_limits
from verl_gdpo.scoring.own_copy import own_copy
from verl_gdpo.scoring.response import (
    PARTS,
    Response,
    ResponseReader,
    parts_taken_by,
    runs_of,
    thought_tags,
)
from verl_gdpo.scoring.reward_functions import ROUTER, ListedFunction, reward_functions, score_with
from verl_gdpo.scoring.scorer_calls import (
    NoAnswerError,
    Rows,
    SlowScoring,
    answer_of,
    call,
    call_of_task,
    describe,
    in_own_task,
    label_of,
)
from verl_gdpo.scoring.threads import ReservedThread, Threads
from verl_gdpo.tasks import TASK_BY_SOURCE, Task, options_for

logger = logging.getLogger(__name__)

# What a row has that verl's own managers hand to no function.
NOT_OF_VERL = (*PARTS, "prompt", OF_RESPONSE, OF_STEP)


class _Source(NamedTuple):
    """How rows of a data source are scored.

    task: None for the user's functions, and for rows that verl scores.
    options: of the task's scorer.
    names: None for the user's functions, which name their rewards themselves.
    """

    task: Task | None
    options: Mapping[str, Any]
    names: RowNames | None


class GdpoRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl is seen as Any
    """Decodes a response once, scores it, and returns named, finite Python floats.

    The scorer is the first of these that exists:
    1. the function of `reward.custom_reward_function.path`, or the list `reward.reward_functions`;
    2. our scorer for the row's `data_source`, with the options of `reward.reward_kwargs`;
    3. verl's default scorer.

    A custom function may be sync or async. It gets the same arguments as from verl and, if it names
    them, `answer_str` and `reasoning_str`; see `scoring/response.py`. `extra_info` also has
    `response_tokens`, the response's length in tokens, and `generated_tokens`, those of them that
    the policy wrote itself. It returns one number, which becomes the reward "acc", or
    {name: reward}, where the weighted sum replaces `score`, and values that are no numbers are only
    logged. None means that a reward does not apply, as one of built-in scorers that belongs to
    other data sources.

    If a sample cannot be scored, V1 trainers get the message under `ERROR_KEY` and stop the run:
    verl would go on after an exception. Other trainers get the exception.
    """

    # How many calls of a function that is not async run at once. `check` has more.
    threads_at_once: int | None = None

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any],
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        # A reward worker is a process of its own, where gdpo may be refused for another reason.
        raise_refusals()
        super().__init__(config, tokenizer, compute_score)
        self.settings = read_settings(algorithm_of(config))
        self._validation_settings = validation_settings(config, self.settings)
        self._tells_validation_apart = tells_validation_apart(config)
        self.is_custom = has_own_scorer(config)
        self.functions = reward_functions(config)
        self.limiter = Limiter(check_limits(config), counter_of_run)
        # Tasks, and functions of the list that no limit holds for, ask nobody.
        self.unlimited = Limiter(None)
        # {data source: how its rows are scored}; see `_source`.
        self._sources: dict[str, _Source] = {}
        # {scorer: its threads}; see `_threads_of`.
        self._threads: dict[str, Threads] = {}
        # The names of which the log speaks; see `_say_what_is_dropped`.
        self._told: set[str] = set()
        self.slow_scoring = SlowScoring()
        self._reader = ResponseReader(tokenizer, thought_tags(config))
        self._parts_of_custom = parts_taken_by(compute_score)
        # Without a dump, nobody would read the text that was scored.
        self._dumps = bool(config.trainer.get("rollout_data_dir"))
        # Tags of the tasks in the list, which may be special tokens.
        self._kept_by_list: list[str] = []
        for name, entry in entries_of(config).items():
            if "task" in entry:
                self._kept_by_list.extend(task_of_entry(f"{KEY}.{name}", entry).kept_tokens)
        # `trainer.use_v1` would not tell: it is also true for trainers that do not read it.
        self.reports_errors = bool(OmegaConf.select(config, "transfer_queue.enable"))
        # What functions may take of verl's router to a reward model, where there is one.
        self.router_kwargs: dict[str, Any] = {}
        if reward_router_address is not None:
            values = (reward_router_address, reward_model_tokenizer)
            self.router_kwargs.update(zip(ROUTER, values, strict=True))

    def cannot_score(self, sources: Iterable[str]) -> str:
        """Why this machine cannot score rows of these data sources; "" if it can."""
        try:
            # It returns remarks, which `check` shows. Here only what it raises counts.
            for name in sources:
                source = self._source(name)
                if source.task is not None:
                    source.task.missing(**source.options)
            if self.is_custom:
                for listed in tasks_that_score(self.config, sources):
                    listed.task.missing(**listed.options)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _source(self, name: str) -> _Source:
        """How rows of a data source are scored; a task is imported for its first row."""
        if name not in self._sources:
            self._sources[name] = self._new_source(name)
        return self._sources[name]

    def _new_source(self, name: str) -> _Source:
        if self.is_custom:
            return _Source(task=None, options={}, names=None)
        names = row_names(self.settings, name)
        task = TASK_BY_SOURCE.get(name)
        if task is None:
            return _Source(task=None, options={}, names=names)
        options = dict(self.config.reward.get("reward_kwargs") or {})
        return _Source(task, options_for(name, options), names)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score the last row of `data`, which holds the rows of a session; or all, for a group."""
        has_group = OF_GROUP in data[-1].non_tensor_batch
        # verl hands over all outputs of a session, and scores its last one.
        rows = [data[-1]]
        if has_group:
            rows = [data[place] for place in range(len(data))]
        # Only V1's workers send groups, so another trainer's row is all that there is.
        is_whole = has_group or not self.reports_errors
        group = Rows([self._row(row) for row in rows], is_whole=is_whole)
        scoring = []
        for place, row in enumerate(rows):
            scoring.append(self._run_row(row.non_tensor_batch, group, place))
        results = await asyncio.gather(*scoring)
        if has_group:
            # `compute_and_mark` in `agent_loop.py` gives each session its own result.
            return {"reward_score": 0.0, "reward_extra_info": results}
        return results[0]

    async def _run_row(self, fields: Mapping[str, Any], group: Rows, place: int) -> dict[str, Any]:
        """Score a row; on V1, a row that cannot be scored says why under `ERROR_KEY`."""
        # A cancellation by verl is no Exception, and passes.
        try:
            result = await self._score(fields, group, place)
            checked = call(self._checked, result, fields)
            if self._dumps:
                checked["reward_extra_info"].update(_for_dump(await group.rows[place]))
            return checked
        except Exception as error:
            message = describe(error, fields)
            logger.error("verl-gdpo: %s\n%s", message, traceback.format_exc())
            if not self.reports_errors:
                raise RuntimeError(message) from error
            return {"reward_score": 0.0, "reward_extra_info": {ERROR_KEY: message}}

    async def _row(self, row: Any) -> dict[str, Any]:
        """Return what functions may take of a row of `data`, under verl's names."""
        fields = row.non_tensor_batch
        response_ids = row.batch["responses"]
        length = fields.get("response_len")
        if length is None:
            # Outside of V1, the response is padded, and the mask tells its length.
            length = row.batch["attention_mask"][-len(response_ids) :].sum()
        length = int(length)
        read = functools.partial(
            self._decoded,
            _prompt_ids(row),
            response_ids[:length].tolist(),
            _mask_runs(row, length),
            self._kept_tokens(fields["data_source"]),
        )
        solution_str, response = await self.loop.run_in_executor(None, call, read)
        # The messages of the prompt are an array, which functions get as a list.
        prompt = list(fields.get("raw_prompt", ())) or None
        return {
            "data_source": fields["data_source"],
            "solution_str": solution_str,
            "ground_truth": (fields.get("reward_model") or {}).get("ground_truth"),
            "answer_str": response.answer,
            "reasoning_str": response.reasoning,
            "extra_info": self._extra_info(fields, length, response.generated_tokens),
            "prompt": prompt,
            OF_RESPONSE: response,
            OF_STEP: fields.get("global_steps"),
            **self.router_kwargs,
        }

    def _kept_tokens(self, data_source: str) -> Sequence[str]:
        """Return the tags that stay in the response of a row, if they are special tokens."""
        task = self._source(data_source).task
        if task is not None:
            return task.kept_tokens
        return self._kept_by_list

    def _decoded(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        runs: Sequence[int] | None,
        kept: Sequence[str],
    ) -> tuple[str, Response]:
        """Return a response as verl's managers decode it, and the same ready for scoring."""
        # Functions of the user get the text as verl gives it, and tasks the one that keeps tags.
        solution_str = self.tokenizer.decode(response_ids, skip_special_tokens=True)
        response = self._reader.read(
            prompt_ids, response_ids, runs, kept=kept, decoded=solution_str
        )
        return solution_str, response

    async def _score(self, fields: Mapping[str, Any], group: Rows, place: int) -> Any:
        """Return the scorer's unchecked result for one row."""
        row = await group.rows[place]
        label = label_of(fields)
        source = self._source(row["data_source"])
        # Where the user has functions, `_source` gives no row to a task.
        if source.task is not None:
            return await self._score_by_task(source.task, source.options, row, label)
        if self.functions:
            return await self._score_by_list(row, fields, group, place, label)
        return await self._score_by_function(row, label)

    async def _score_by_task(
        self,
        task: Task,
        options: Mapping[str, Any],
        row: Mapping[str, Any],
        label: str,
    ) -> Any:
        """Score a row by our scorer for its data source, and log what the scorer notes."""
        score = call_of_task(task, row, options)
        notes = None
        # Each call has notes of its own, because many calls of a scorer run at once.
        if task.notes is not None:
            notes = task.notes()
            score = functools.partial(score, notes=notes)
        threads = self._threads_of(f"task {task.name}", task)
        result = await self._run(label, threads, score, self.unlimited)
        if notes is None:
            return result
        return {**result, NOTES_KEY: notes.numbers()}

    async def _score_by_list(
        self,
        row: Mapping[str, Any],
        fields: Mapping[str, Any],
        group: Rows,
        place: int,
        label: str,
    ) -> dict[str, Any]:
        """Score a row by the functions of `reward.reward_functions`; some take its whole group."""
        run = functools.partial(self._run_listed, label)
        of_group = functools.partial(group.result, place)
        functions = self.functions
        if self._tells_validation_apart:
            is_validation = _is_of_validation(fields)
            functions = [
                each for each in functions if is_asked(each.entry, is_validation=is_validation)
            ]
        return await score_with(functions, run, {**row, OF_GROUP: of_group})

    async def _score_by_function(self, row: Mapping[str, Any], label: str) -> Any:
        """Score a row by the function of `reward.custom_reward_function`, or else by verl's own."""
        # verl's own managers hand over none of ours, and a function may not take them.
        taken = {name: value for name, value in row.items() if name not in NOT_OF_VERL}
        # A function may change what it gets, and the row is read again for the dump.
        taken["extra_info"] = own_copy(taken["extra_info"])
        for name in self._parts_of_custom:
            taken[name] = row[name]
        score = functools.partial(self.compute_score, **taken)
        threads = self._threads_of("the reward function")
        return await self._run(label, threads, score, self.limiter)

    async def _run(
        self, label: str, threads: Threads, score: functools.partial[Any], limiter: Limiter
    ) -> Any:
        """Call a scorer within limits: a coroutine function here, any other in a thread.

        It waits for a thread first, as nothing should wait once the limits allow a call.
        """
        # A coroutine function shares the event loop, as verl's own managers have it.
        if inspect.iscoroutinefunction(score.func):
            return await limiter.call(functools.partial(self._watched, label, score), label)
        thread = await threads.reserve()
        try:
            in_thread = functools.partial(self._in_thread, label, thread, score)
            return await limiter.call(in_thread, label)
        except NoAnswerError:
            # Nobody can end the function, so its thread is not used again until it returns.
            thread.mark_stuck(label)
            raise
        finally:
            thread.give_back()

    async def _in_thread(
        self, label: str, thread: ReservedThread, score: functools.partial[Any]
    ) -> Any:
        """Call a scorer in its thread, and await what it may return.

        If it is cancelled, it waits for the thread, which nobody can end.
        """
        answer = thread.start(functools.partial(call, score))
        try:
            result = await self.slow_scoring.wait(label, asyncio.shield(answer))
        except asyncio.CancelledError:
            await asyncio.wait({answer})
            # An exception for which nobody waits any more; asyncio would log it.
            answer.exception()
            raise
        # A function that is not async may return a coroutine, as one that wraps another does.
        if inspect.isawaitable(result):
            result = await self.slow_scoring.wait(label, result)
        return result

    async def _run_listed(
        self, label: str, function: ListedFunction, score: functools.partial[Any]
    ) -> Any:
        """Call a function of the list; no two of them share threads."""
        own_label = f"{label}, function {function.name}"
        limiter = self.unlimited
        if is_limited(function.entry):
            limiter = self.limiter
        if function.takes_limits:
            # It keeps within the limits itself, and waits for them once for each of its requests.

            async def within_limits(ask: Callable[[], Awaitable[Any]]) -> Any:
                watched = functools.partial(self._watched, own_label, ask)
                return await limiter.call(watched, own_label)

            return await answer_of(in_own_task(lambda: score(within_limits=within_limits)))
        # A function that hangs must not take the threads of another.
        threads = self._threads_of(f"function {function.name}")
        return await self._run(own_label, threads, score, limiter)

    async def _watched(self, label: str, scoring: Callable[[], Awaitable[Any]]) -> Any:
        """Await a scorer, and let the log name its sample if it hangs."""
        return await self.slow_scoring.wait(label, scoring())

    def _extra_info(
        self, fields: Mapping[str, Any], length: int, generated_tokens: int
    ) -> dict[str, Any]:
        """Return the `extra_info` of verl's own managers, with the response's length in tokens.

        Args:
            generated_tokens: how many of these the policy wrote itself.
        """
        # The first two are for rows that came without our agent loop workers.
        extra_info = {
            "tool_seconds": 0.0,
            "is_validation": False,
            **(fields.get("extra_info") or {}),
            **(fields.get("tool_extra_fields") or {}),
            "num_turns": fields.get("__num_turns__"),
            "rollout_reward_scores": fields.get("reward_scores", {}),
            "experiment_name": self.config.trainer.experiment_name,
            "response_tokens": length,
            "generated_tokens": generated_tokens,
        }
        # verl's own managers find it under this name in the `meta_info` of a batch; a column of
        # the rows goes first.
        extra_info.setdefault("validate", extra_info["is_validation"])
        extra_info.pop(MASK_RUNS, None)
        return extra_info

    def _checked(self, result: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result for verl: the rewards as finite floats, and their weighted sum.

        Raises:
            ValueError: a reward is missing, is not a finite number, or contradicts the `score`.
        """
        info = self._named(result, fields["data_source"])
        settings = self.settings
        if self._tells_validation_apart and _is_of_validation(fields):
            settings = self._validation_settings
        # Without names in the configuration, each number that a scorer returns is a reward.
        are_named = settings.rewards is not None
        if not are_named and _is_lone_score(info):
            info["acc"] = info["score"]
        terms = self._terms_of(info, settings)
        for name in terms.names:
            info[name] = value_or_error(info[name], f"reward {name!r} ")
        if not are_named and self.is_custom:
            _check_sum(info, terms)
        score = terms.score(info, fields.get("global_steps"))
        value_or_error(score, "the weighted sum of the rewards ")
        # Values that Ray cannot send would fail the session, and the trainer would not notice.
        plain = {name: as_json(value, name) for name, value in info.items()}
        return {"reward_score": score, "reward_extra_info": {**plain, "score": score}}

    def _named(self, result: Any, data_source: str) -> dict[str, Any]:
        """Return what a scorer returned, under the names that the run has for it.

        Raises:
            ValueError: it returned None, or a name that no value can have.
        """
        if result is None:
            raise ValueError("the scorer returned None; expected a number or {name: reward}")
        returned: Mapping[Any, Any] = {"acc": result}
        if isinstance(result, Mapping):
            returned = result
        elif not is_number(result):
            raise ValueError(
                f"the scorer returned {reprlib.repr(result)} ({type(result).__name__}); "
                "expected a number or {name: reward}"
            )
        info = {plain_name(name): value for name, value in returned.items()}
        # A function of the user's alone is the only one whose keys nobody has looked at.
        is_alone = self.is_custom and not self.functions
        for name in list(info):
            if is_alone or not is_internal(name):
                check_name(name)
            if name.startswith(RUBRIC_KEY):
                # The value of a rubric is the sum of its criteria, None where none applies.
                rubric = Rubric.of([info[name]], self.settings.rubric_weights)
                score = float(rubric.score_N[0])
                info[name.removeprefix(RUBRIC_KEY)] = None if math.isnan(score) else score
        names = self._source(data_source).names
        if names is None:
            return info
        return names.named(info)

    def _terms_of(self, info: Mapping[str, Any], settings: GdpoSettings) -> WeightedSum:
        """Return the weighted sum over the rewards of a row.

        Raises:
            ValueError: a configured reward is missing, or there is no reward at all.
        """
        # What is a reward is decided as the trainer will decide it for the batch: this row is one.
        columns = {name: [value] for name, value in info.items()}
        if settings.rewards is not None:
            return terms_among(columns, settings)
        if not rewards_among(columns):
            raise ValueError(f"the scorer returned no number: {reprlib.repr(info)}")
        terms = terms_among(columns, settings)
        self._say_what_is_dropped({name: info[name] for name in info if name not in terms})
        return terms

    def _say_what_is_dropped(self, info: Mapping[str, Any]) -> None:
        """Log once what is no number, and likely meant as a reward.

        If another row has a number under the name, the trainer refuses the batch.
        """
        for name, value in info.items():
            if name in self._told or not may_be_meant(value):
                continue
            self._told.add(name)
            what = f"{name!r} as {value!r}, which is no number, so it is no reward"
            logger.warning("verl-gdpo: the scorer returned %s. Return a float", what)

    def _threads_of(self, scorer: str, task: Task | None = None) -> Threads:
        """The threads of a scorer, which no other has: one that waits holds up no other."""
        if scorer not in self._threads:
            at_once = self.threads_at_once
            if task is not None and task.programs is not None:
                # This worker may have all cores for the programs, so as many run as there are.
                at_once = task.programs.at_once()
            self._threads[scorer] = Threads(scorer, at_once, self.limiter.timeout)
        return self._threads[scorer]


def _prompt_ids(row: Any) -> list[int]:
    """Return the tokens of a row's prompt, without padding; none where nobody sent them."""
    # verl's own managers read no prompt, so an agent loop worker of the user's may send none.
    if "prompts" not in row.batch:
        return []
    prompt_ids = row.batch["prompts"]
    length = row.non_tensor_batch.get("prompt_len")
    if length is None:
        # Outside of V1, the prompt is padded, and the mask tells which tokens are its own.
        is_own = row.batch["attention_mask"][: len(prompt_ids)].bool()
        own: list[int] = prompt_ids[is_own].tolist()
        return own
    unpadded: list[int] = prompt_ids[: int(length)].tolist()
    return unpadded


def _mask_runs(row: Any, length: int) -> Sequence[int] | None:
    """Return the runs of a row's response mask, see `runs_of`; None where nobody sent one.

    Args:
        length: of the response in tokens.
    """
    of_loop = row.non_tensor_batch.get("tool_extra_fields") or {}
    runs: Sequence[int] | None = of_loop.get(MASK_RUNS)
    if runs is None and "response_mask" in row.batch:
        runs = runs_of(row.batch["response_mask"][:length].tolist())
    return runs


def _is_of_validation(fields: Mapping[str, Any]) -> bool:
    """Return whether a row is one of a validation.

    Raises:
        ValueError: nobody has said so.
    """
    of_loop = fields.get("tool_extra_fields") or {}
    # To guess would score a row by the functions of the other kind.
    if IS_VALIDATION not in of_loop:
        raise ValueError(
            f"{KEY}.NAME.validation: the sample came without {IS_VALIDATION!r}, which only verl's "
            "agent loop workers send. Leave out the key, or agent_loop_manager_class"
        )
    return bool(of_loop[IS_VALIDATION])


def _for_dump(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was scored; nothing if it is the text that verl decodes and dumps itself.

    A validation goes without it, because verl wants the same columns for all of its samples.
    """
    kept = row[OF_RESPONSE].for_dump(row["solution_str"])
    if kept is None or row["extra_info"]["is_validation"]:
        return {}
    return {RESPONSE_KEY: kept}


def _is_lone_score(info: Mapping[str, Any]) -> bool:
    """Whether `score` is the only number, which becomes the reward "acc", like a bare number.

    Beside a None it is a sum: the None is a reward that does not apply to this sample.
    """
    for name, value in info.items():
        is_reward = name != "score" and name not in ROLLOUT_FACTS and not is_internal(name)
        if is_reward and (value is None or is_number(value)):
            return False
    return is_number(info.get("score"))


def _check_sum(info: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for a `score` that is not the sum of the rewards."""
    # A `score` that is text is only logged, and contradicts nothing.
    if not is_number(info.get("score")):
        return
    own = float(info["score"])
    values = {name: info[name] for name in names}
    total = sum(value or 0.0 for value in values.values())
    if not is_the_sum(own, total):
        raise ValueError(not_the_sum(own, values))
