"""Scores a few rows with made-up responses, through the reward manager that training uses.

Some responses are right, some are wrong, some are garbage. So this finds a reward that is equal for
all of them, and a reward function that fails on one of them, before the first rollout.

Relies on verl 0.9 `verl.trainer.ppo.reward.load_reward_manager(config, tokenizer, ...)` and on the
data that `AgentLoopWorker._compute_score` passes to the manager's `run_single`.
"""

import asyncio
import logging
import re
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from verl_gdpo.algorithm.rows import BatchRows, RowKey
from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.algorithm.values import ERROR_KEY, value_or_error
from verl_gdpo.hooks.agent_loop import IS_VALIDATION
from verl_gdpo.hooks.configuration import has_own_scorer
from verl_gdpo.scoring import function_list
from verl_gdpo.tools.check.data_files import DataRow, Responses
from verl_gdpo.tools.check.made_up_responses import END, WORDS, Sample, make_samples
from verl_gdpo.tools.check.output import message_of
from verl_gdpo.tools.check.verl_questions import make_reward_manager, one_rollout

FIRST_STEP = 1  # verl counts its training steps from 1.
NO_SERVER = "127.0.0.1:9"  # It stands for the reward model's router, and refuses connections.
THREAD_NAME = "verl-gdpo check"
MOST_KINDS = 3  # So many kinds of failures are told of a data source.
# So many calls of a reward function that is not async; verl's workers make about as many.
AT_ONCE = 16

OUR_MANAGER = "reward manager gdpo, "  # The messages of `scorer_calls.describe` begin with it.


@dataclass(frozen=True)
class DryRun:
    """What the reward manager returned.

    samples: those of data sources whose samples were all scored.
    infos: verl's reward_extra_info of each of them.
    scores: verl's reward_score of each of them.
    problems: why others could not be scored.
    again: the same of some of the samples, which were scored a second time.
    """

    samples: Sequence[Sample]
    infos: Sequence[Mapping[str, Any]]
    scores: Sequence[Any]
    problems: Sequence[str]
    again: "DryRun | None" = None

    def rows(self) -> BatchRows:
        """The samples as a batch: those of one row are a group."""
        return BatchRows.of(
            keys=RowKey.of_uids(sample.uid for sample in self.samples),
            labels=[sample.label for sample in self.samples],
            infos=self.infos,
            sources=[sample.source for sample in self.samples],
            is_padding=[False] * len(self.samples),
            step=FIRST_STEP,
        )


class DaemonThreads(ThreadPoolExecutor):
    """Threads for which Python does not wait at its exit: a reward function may never return."""

    def __init__(self, at_once: int | None = None) -> None:
        threads = at_once or AT_ONCE
        super().__init__(threads)
        self._room = threading.Semaphore(threads)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            with self._room:
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
        return future


def score_rows(config: Any, rows: Sequence[DataRow], seconds: float, more: Responses) -> DryRun:
    """Score all samples of `rows` at once, as verl does.

    Args:
        more: responses to try too.
        seconds: how long to wait for the next answer before all that are missing are given up.

    Raises:
        ValueError: the configured reward manager or function does not exist.
    """
    all_rows = list(rows)
    all_rows.extend(row for row, _ in more if row)
    samples = make_samples(config, all_rows, more)
    repeated = _samples_to_repeat(config, samples)
    answers = _answers(config, all_rows, samples + repeated, seconds)
    first = _dry_run(samples, answers[: len(samples)], seconds)
    again = _dry_run(repeated, answers[len(samples) :], seconds)
    return replace(first, again=again)


def _samples_to_repeat(config: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that are scored a second time: those of one row of each data source.

    Our own scorers give the same reward each time, and a judge may not.
    """
    if not has_own_scorer(config) or function_list.limited_functions(config):
        return []
    row_of_source: dict[str, int] = {}
    for sample in samples:
        row_of_source.setdefault(sample.source, sample.row)
    return [sample for sample in samples if sample.row == row_of_source[sample.source]]


def _dry_run(samples: Sequence[Sample], answers: Sequence[Any], seconds: float) -> DryRun:
    """Return what came of these samples; an answer is None if none came within `seconds`."""
    problems = []
    late = [sample for sample, answer in zip(samples, answers, strict=True) if answer is None]
    if late:
        problems.append(
            f"{late[0].label}: the reward function gave no answer within {seconds:g} s "
            f"({len(late)} of {len(samples)} answers are missing). If it takes longer: "
            f"--seconds {2 * seconds:g}"
        )
    # {data source: {kind of failure: the failures}}
    failures: dict[str, dict[str, list[str]]] = {sample.source: {} for sample in late}
    for sample, answer in zip(samples, answers, strict=True):
        if answer is None:
            continue
        reason = _why_unusable(answer)
        if reason:
            of_source = failures.setdefault(sample.source, {})
            of_source.setdefault(_kind(reason), []).append(f"{sample.label}: {reason}")
    for of_source in failures.values():
        for reasons in list(of_source.values())[:MOST_KINDS]:
            count = f"{len(reasons)} of {len(samples)} responses failed"
            problems.append(f"{reasons[0]} ({count})")
    scored = []
    infos = []
    scores = []
    for sample, answer in zip(samples, answers, strict=True):
        if sample.source not in failures:
            scored.append(sample)
            infos.append(answer.get("reward_extra_info", {}))
            scores.append(answer["reward_score"])
    return DryRun(scored, infos, scores, problems)


def _kind(reason: str) -> str:
    """Return what failures of one cause have in common: the line of code, or else the words."""
    place = re.search(r"\[[^\[\]]*:\d+\]", reason)
    if place:
        return place[0]
    return re.sub(r"\d+", "", reason)


def _answers(
    config: Any, rows: Sequence[DataRow], samples: Sequence[Sample], seconds: float
) -> list[Any]:
    """Return what the manager returned or raised, None where `seconds` bring no answer.

    Whatever fails here is an answer too, because None is told as a slow reward function.
    It runs in a thread, because nothing can stop a function that blocks its event loop.
    """
    # It is never removed, because a late answer is logged after this function ends.
    hides = "verl_gdpo.hooks.reward_manager"
    logging.getLogger(hides).addFilter(lambda record: record.threadName != THREAD_NAME)
    # (the place of a sample, None for all that are still missing; its answer)
    arrived: SimpleQueue[tuple[int | None, Any]] = SimpleQueue()
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    # verl's managers take the loop of their thread.
    asyncio.set_event_loop(loop)
    try:
        manager = _load_manager(deepcopy(config))
    except BaseException:
        loop.close()
        raise
    finally:
        asyncio.set_event_loop(None)

    async def score(place: int, sample: Sample) -> None:
        row = rows[sample.row].fields
        columns = {
            "raw_prompt": row[config.data.prompt_key],
            "uid": sample.uid,
            "global_steps": FIRST_STEP,
        }
        # As our part of verl's agent loop workers does, which runs with our manager alone.
        if function_list.tells_validation_apart(config):
            columns["tool_extra_fields"] = {IS_VALIDATION: rows[sample.row].is_validation}
        try:
            rollout = one_rollout([END], WORDS.encode(sample.response), row, **columns)
            answer = await manager.run_single(rollout)
            if not isinstance(answer, Mapping):
                got = reprlib.repr(answer)
                answer = ValueError(f"run_single returned {got}; expected {{reward_score: ...}}")
        except BaseException as error:
            # SystemExit would end the loop.
            answer = error
        arrived.put((place, answer))

    async def score_all() -> None:
        calls = [score(place, sample) for place, sample in enumerate(samples)]
        await asyncio.gather(*calls)

    def run() -> None:
        try:
            loop.run_until_complete(score_all())
        except BaseException as error:
            # Code of the user's has stopped the loop, or a task of its own has ended it.
            arrived.put((None, error))
        finally:
            loop.close()

    thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
    thread.start()
    answers: list[Any] = [None] * len(samples)
    try:
        for _ in samples:
            place, answer = arrived.get(timeout=seconds)
            if place is None:
                return [answer if each is None else each for each in answers]
            answers[place] = answer
        thread.join()
    except Empty:
        pass
    return answers


def _load_manager(config: Any) -> Any:
    server = {}
    if config.reward.reward_model.enable:
        server = {"reward_router_address": NO_SERVER, "reward_model_tokenizer": WORDS}
    try:
        manager = make_reward_manager(config, WORDS, **server)
    except SettingsError:
        # It has a message for each mistake, with the key.
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        reward = config.reward
        message = message_of(error)
        # Our messages name their key, and verl's do not.
        if not message.startswith("reward."):
            message = (
                f"reward.reward_manager.name={reward.reward_manager.name}, "
                f"reward.custom_reward_function.path={reward.custom_reward_function.path}: "
                f"{message}"
            )
        raise ValueError(message) from error
    # Our manager has threads of its own; others take the loop's.
    manager.threads_at_once = AT_ONCE
    return manager


def _why_unusable(answer: Any) -> str:
    """Say what the manager raised or reports, or that its score is no number; else ""."""
    if isinstance(answer, KeyError) and answer.args == ("score",):
        return (
            "the reward function's dict lacks `score`, which verl's own managers "
            "need. With reward.reward_manager.name=gdpo, its numbers are the rewards"
        )
    if isinstance(answer, BaseException):
        return _what_was_raised(answer)
    reported: str = answer.get("reward_extra_info", {}).get(ERROR_KEY, "")
    if reported:
        return reported
    # verl's own managers pass on what verl cannot train on.
    try:
        value = value_or_error(answer["reward_score"])
    except ValueError as error:
        return f"the score {error}"
    if value is None:
        return "the score is None; expected a number"
    return ""


def _what_was_raised(error: BaseException) -> str:
    text = str(error)
    # Our manager's message names the cause already.
    if not text.startswith(OUR_MANAGER):
        text = message_of(error)
    for name in ("response_tokens", "generated_tokens"):
        if name in text:
            text += f". Only reward.reward_manager.name=gdpo passes extra_info[{name!r}]"
    return text
