"""Scores a few rows with made-up responses, through the reward manager that training uses.

Some responses are right, some are wrong, some are garbage. So this finds a reward that is equal for
all of them, and a reward function that fails on one of them, before the first rollout.

Relies on verl 0.9 `verl.trainer.ppo.reward.load_reward_manager(config, tokenizer, ...)` and on the
data that `AgentLoopWorker._compute_score` passes to the manager's `run_single`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from verl_gdpo.algorithm.samples import ERROR_KEY, value_or_error
from verl_gdpo.hooks.verl_questions import make_reward_manager, one_rollout
from verl_gdpo.tools.check.data_files import DataRow
from verl_gdpo.tools.check.output import message_of
from verl_gdpo.tools.check.sample_responses import END, WORDS, Sample, make_samples

FIRST_STEP = 1  # verl counts its training steps from 1
NO_SERVER = "127.0.0.1:9"  # in place of the reward model's router; it refuses connections
THREAD_NAME = "verl-gdpo check"
AT_ONCE = 16  # calls of a reward function that is not async; verl's workers make about as many


@dataclass(frozen=True)
class DryRun:
    samples: Sequence[Sample]
    infos: Sequence[Mapping[str, Any]]  # verl's reward_extra_info of each sample
    scores: Sequence[Any]  # verl's reward_score of each sample
    problems: Sequence[str]  # samples that could not be scored, which are not in `infos`


class DaemonThreads(ThreadPoolExecutor):
    """Threads for which Python does not wait at its exit: a reward function may never return."""

    def __init__(self, at_once: int | None = None) -> None:
        super().__init__(at_once or AT_ONCE)
        self._room = threading.Semaphore(at_once or AT_ONCE)

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


def score_rows(config: Any, rows: Sequence[DataRow], seconds: float) -> DryRun:
    """Score all samples of `rows` at once, as verl does.

    Args:
        seconds: how long to wait for the next answer before all that are missing are given up.

    Raises:
        ValueError: the configured reward manager or function does not exist.
    """
    samples = make_samples(config, rows)
    # this filter is never removed, because a late answer is logged after this function ends
    logging.getLogger("verl_gdpo.hooks.reward_manager").addFilter(_is_not_ours)
    with _event_loop() as loop:
        manager = _load_manager(deepcopy(config))
        scorings = [
            manager.run_single(_as_verl_gives_it(config, rows[sample.row].fields, sample))
            for sample in samples
        ]
        answers = _answers(loop, scorings, seconds)
    if None in answers:
        late = (
            f"{samples[answers.index(None)].label}: the reward function gave no answer within "
            f"{seconds:g} s ({answers.count(None)} of {len(samples)} answers are missing). If it "
            f"takes longer: --seconds {2 * seconds:g}"
        )
        return DryRun(samples, [], [], [late])
    infos: list[Mapping[str, Any]] = []
    scores: list[Any] = []
    failures: dict[str, list[str]] = {}
    for sample, answer in zip(samples, answers, strict=True):
        try:
            result = _checked(answer)
        except (Exception, SystemExit) as error:
            failures.setdefault(sample.source, []).append(_describe(error, sample))
            continue
        infos.append(result.get("reward_extra_info", {}))
        scores.append(result["reward_score"])
    problems = [
        f"{reasons[0]} ({len(reasons)} of {len(samples)} responses failed)"
        for reasons in failures.values()
    ]
    return DryRun(samples, infos, scores, problems)


def _answers(
    loop: asyncio.AbstractEventLoop, scorings: Sequence[Coroutine[Any, Any, Any]], seconds: float
) -> list[Any]:
    """Return what each coroutine returned or raised, None where `seconds` bring no answer.

    They run in a thread, because nothing can stop a function that blocks its event loop.
    """
    arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    async def score(place: int, scoring: Coroutine[Any, Any, Any]) -> None:
        try:
            arrived.put((place, await scoring))
        except BaseException as error:  # SystemExit would end the loop
            arrived.put((place, error))

    async def score_all() -> None:
        await asyncio.gather(*(score(place, each) for place, each in enumerate(scorings)))

    ended: Future[Any] = DaemonThreads().submit(loop.run_until_complete, score_all())
    answers: list[Any] = [None] * len(scorings)
    try:
        for _ in scorings:
            place, answer = arrived.get(timeout=seconds)
            answers[place] = answer
        wait([ended])
    except Empty:
        loop.call_soon_threadsafe(lambda: [t.cancel() for t in asyncio.all_tasks(loop)])
        ended.add_done_callback(lambda _: loop.close())
    return answers


def _load_manager(config: Any) -> Any:
    server = {}
    if config.reward.reward_model.enable:
        server = {"reward_router_address": NO_SERVER, "reward_model_tokenizer": WORDS}
    try:
        manager = make_reward_manager(config, WORDS, **server)
    except Exception as error:
        reward = config.reward
        raise ValueError(
            f"reward.reward_manager.name={reward.reward_manager.name}, "
            f"reward.custom_reward_function.path={reward.custom_reward_function.path}: "
            f"{message_of(error)}"
        ) from error
    manager.make_threads = DaemonThreads  # of ours; others take the loop's
    return manager


def _as_verl_gives_it(config: Any, fields: Mapping[str, Any], sample: Sample) -> Any:
    """Return one rollout, as verl's agent loop passes it to a reward manager."""
    extra_info = dict(fields.get("extra_info") or {})
    columns = {
        **fields,
        "raw_prompt": fields[config.data.prompt_key],
        "extra_info": extra_info,
        "index": extra_info.get("index", 0),
        "uid": sample.label,
        "__num_turns__": 2,
        "tool_extra_fields": {},
        "global_steps": FIRST_STEP,
    }
    return one_rollout([END], WORDS.encode(sample.response), columns)


def _checked(answer: Any) -> Mapping[str, Any]:
    """Return the manager's result; raise what it raised, or ValueError for an error in it."""
    if isinstance(answer, BaseException):
        raise answer
    result: Mapping[str, Any] = answer
    if error := result.get("reward_extra_info", {}).get(ERROR_KEY):
        raise ValueError(error)
    _check_score(result["reward_score"])
    return result


def _check_score(score: Any) -> None:
    """Raise ValueError for a score that verl cannot train on; its own managers pass it on."""
    if score is None:
        raise ValueError("the score is None; expected a number")
    try:
        value_or_error(score)
    except ValueError as error:
        raise ValueError(f"the score {error}") from None


def _describe(error: BaseException, sample: Sample) -> str:
    text = str(error)
    if isinstance(error, KeyError) and error.args == ("score",):
        return (
            f"{sample.label}: the reward function's dict lacks `score`, which verl's own managers "
            "need. With reward.reward_manager.name=gdpo, its numbers are the rewards"
        )
    return text if sample.label in text else f"{sample.label}: {message_of(error)}"


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop and make it current, because verl's managers use the current loop."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        if not loop.is_running():  # after a time-out, it may still be running
            loop.close()


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Return whether a log line comes from outside the dry run, which reports its own results."""
    return record.threadName != THREAD_NAME
