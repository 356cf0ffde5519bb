"""Scores a few rows with made-up responses, through the reward manager that training uses.

Some responses are right, some are wrong, some are garbage. So this finds a reward that is equal for
all of them, and a reward function that fails on one of them, before the first rollout.

Relies on verl 0.9 `verl.trainer.ppo.reward.load_reward_manager(config, tokenizer, ...)` and on the
data that `AgentLoopWorker._compute_score` passes to the manager's `run_single`.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from verl_gdpo.batch.rows import ERROR_KEY
from verl_gdpo.rewards import TASK_OF
from verl_gdpo.tools.check.data import Row
from verl_gdpo.tools.check.findings import message_of

FIRST_STEP = 1  # verl counts its training steps from 1
END = 0x110000  # the end-of-turn token; its number is one above the last character
NO_SERVER = "127.0.0.1:9"  # in place of the reward model's router; it refuses connections
GARBAGE = "?" * 8
THREAD_NAME = "verl-gdpo check"


@dataclass(frozen=True)
class Sample:
    row: int
    kind: str
    response: str
    label: str
    source: str


@dataclass(frozen=True)
class DryRun:
    samples: Sequence[Sample]
    infos: Sequence[Mapping[str, Any]]  # verl's reward_extra_info of each sample
    problems: Sequence[str]  # samples that could not be scored, which are not in `infos`


class Characters:
    """Replaces the policy's tokenizer: each character is a token."""

    @staticmethod
    def encode(text: str) -> list[int]:
        return [*map(ord, text), END]

    @staticmethod
    def decode(ids: Any, **_options: Any) -> str:
        return "".join(chr(i) for i in ids.tolist() if i != END)


class DaemonThreads(ThreadPoolExecutor):
    """Threads for which Python does not wait at its exit: a reward function may never return."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
        return future


def make_samples(rows: Sequence[Row]) -> list[Sample]:
    """Return a sample for each row and each of its made-up responses."""
    texts = [_good_response(row) for row in rows]
    samples = []
    for number, row in enumerate(rows):
        same = [i for i, other in enumerate(rows) if other.source == row.source]
        foreign = next((texts[i] for i in same if texts[i] not in (texts[number], "")), "")
        for kind, response in made_up_responses(texts[number], foreign).items():
            label = f"{row.label}, response {kind!r}"
            samples.append(Sample(number, kind, response, label, row.source))
    return samples


def made_up_responses(truth: str, foreign: str) -> dict[str, str]:
    """Return {kind: response}; a response that equals an earlier one is left out.

    Args:
        truth: a good response to the row; "" if none is known.
        foreign: a good response to another row; "" if there is none.
    """
    middle = len(truth) // 2
    changed = "#" if truth[middle : middle + 1] != "#" else "_"
    candidates = {
        "ground truth": truth,
        "another row's": foreign,
        "one character off": truth and truth[:middle] + changed + truth[middle + 1 :],
        "cut in half": truth[:middle],
        "without tags": re.sub(r"</?\w+>", "", truth),
        "garbage": GARBAGE,
    }
    kinds: dict[str, str] = {}
    for kind, response in candidates.items():
        if response and response not in kinds.values():
            kinds[kind] = response
    return {**kinds, "empty": ""}


def score_rows(config: Any, rows: Sequence[Row], seconds: float) -> DryRun:
    """Score all samples of `rows`, up to the first sample that takes longer than `seconds`.

    Raises:
        ValueError: the configured reward manager or function does not exist.
    """
    samples = make_samples(rows)
    infos: list[Mapping[str, Any]] = []
    failures: dict[str, list[str]] = {}
    # this filter is never removed, because a late answer is logged after this function ends
    logging.getLogger("verl_gdpo.verl_hooks.reward_manager").addFilter(_is_not_ours)
    with _event_loop() as loop:
        manager = _load_manager(deepcopy(config))
        for sample in samples:
            data = _as_verl_gives_it(config, rows[sample.row].fields, sample)
            try:
                info = _run(loop, manager.run_single(data), seconds)
            except (Exception, SystemExit) as error:
                failures.setdefault(sample.source, []).append(_describe(error, sample))
                continue
            if info is None:
                late = f"{sample.label}: the reward function gave no answer within {seconds:g} s"
                return DryRun(samples, infos, [late])
            infos.append(info)
    problems = [
        f"{reasons[0]} ({len(reasons)} of {len(samples)} responses failed)"
        for reasons in failures.values()
    ]
    return DryRun(samples, infos, problems)


def _load_manager(config: Any) -> Any:
    from verl_gdpo.verl_hooks.for_check import make_reward_manager

    server = {}
    if config.reward.reward_model.enable:
        server = {"reward_router_address": NO_SERVER, "reward_model_tokenizer": Characters()}
    try:
        return make_reward_manager(config, Characters(), **server)
    except Exception as error:
        reward = config.reward
        raise ValueError(
            f"reward.reward_manager.name={reward.reward_manager.name}, "
            f"reward.custom_reward_function.path={reward.custom_reward_function.path}: "
            f"{message_of(error)}"
        ) from error


def _as_verl_gives_it(config: Any, fields: Mapping[str, Any], sample: Sample) -> Any:
    """Return one rollout, as verl's agent loop passes it to a reward manager."""
    from verl_gdpo.verl_hooks.for_check import one_rollout

    extra_info = dict(fields.get("extra_info") or {})
    columns = {
        **fields,
        "raw_prompt": fields[config.data.prompt_key],
        "extra_info": extra_info,
        "index": extra_info.get("index", 0),
        "uid": sample.label,
        "__num_turns__": 2,
        "tool_extra_fields": {},
    }
    if config.trainer.get("use_v1", False):
        columns["global_steps"] = FIRST_STEP
    return one_rollout([END], Characters.encode(sample.response), columns)


def _run(loop: Any, coroutine: Any, seconds: float) -> Mapping[str, Any] | None:
    """Return the coroutine's reward_extra_info, or None if it takes too long.

    The coroutine runs in a thread, because nothing can stop a function that blocks its event loop.
    """
    outcome: Future[Any] = DaemonThreads().submit(loop.run_until_complete, coroutine)
    if outcome in wait([outcome], timeout=seconds).not_done:
        outcome.add_done_callback(lambda _: loop.close())
        return None
    info: Mapping[str, Any] = outcome.result().get("reward_extra_info", {})
    if ERROR_KEY in info:
        raise ValueError(info[ERROR_KEY])
    return info


def _good_response(row: Row) -> str:
    """Return the good response of the row's task, else the ground truth, or "" if it is no text."""
    truth = (row.fields.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, str):
        return ""
    task = TASK_OF.get(row.source)
    return task.good_response(truth) if task else truth


def _describe(error: BaseException, sample: Sample) -> str:
    text = str(error)
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
