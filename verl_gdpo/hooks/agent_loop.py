"""Carries what was returned for each rollout out of verl's agent loop workers, as it was returned.

Relies on verl 0.9 `AgentLoopWorker`:
- the coroutine `_compute_score(outputs, ...)`, which leaves out the reward manager if an agent loop
  has set `reward_score` itself. verl then copies `extra_fields["reward_extra_info"]` of the last
  output to the others of its session, and raises KeyError if there is none.
- `_run_agent_loop(sampling_params, trajectory, ...)` runs a session in a task of its own, and
  `trajectory["validate"]` says whether it is one of a validation;
- `AgentLoopWorkerTQ._run_prompt(prompt, ...)` makes the tasks of all sessions of a prompt before one
  of them starts, and does not end before them; each gets its `session_id`;
- `RewardLoopWorker.compute_score(data)` hands `data` to the manager's `run_single`;
- `_postprocess(inputs, ...)`, which makes the legacy trainers' batch. It has a column for each key
  of the first sample, and raises if another sample lacks the key or has a list of another length.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_gdpo.algorithm.samples import AGENT_SCORE_KEY
from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.extend import Function, attach, record_of
from verl_gdpo.hooks.function_list import compares_groups
from verl_gdpo.hooks.reward_functions import OF_GROUP, Sample

# in the `extra_info` of a reward function
TOOL_SECONDS, IS_VALIDATION = "tool_seconds", "is_validation"
_validates: ContextVar[bool] = ContextVar("verl_gdpo_validates", default=False)
_group: ContextVar["_Group | None"] = ContextVar("verl_gdpo_group", default=None)
INFO = "reward_extra_info"  # verl's name for what was returned beside the score


class _Group:
    """The sessions of a prompt, for functions that compare them.

    Each waits until all have a response or have ended. A session that failed is left out, and so is
    one that its agent loop scored.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()  # sessions without a response
        self._samples: dict[int, Sample] = {}
        self._is_complete = asyncio.Event()
        self._scoring: asyncio.Future[dict[int, Any]] | None = None

    @asynccontextmanager
    async def session(self, number: int) -> AsyncIterator[None]:
        self._running.add(number)
        try:
            await asyncio.sleep(0)  # until each has begun, as verl makes all their tasks at once
            yield
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        self._running.discard(number)
        if not self._running:
            self._is_complete.set()

    async def results(self, number: int, sample: Sample, workers: Any) -> dict[str, Any]:
        """Return {function: its result} for the sample, from one call of a reward worker."""
        self._samples[number] = sample
        self._end(number)
        await self._is_complete.wait()
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._ask(random.choice(workers)))
        return (await asyncio.shield(self._scoring))[number]

    async def _ask(self, worker: Any) -> dict[int, Any]:
        numbers = sorted(self._samples)
        results = await worker.compute_score.remote([self._samples[each] for each in numbers])
        return dict(zip(numbers, results, strict=True))


async def run_prompt(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Let the sessions of a prompt meet if a function compares them."""
    _group.set(_Group() if _is_for_us(self) and compares_groups(self.config) else None)
    await original(self, *args, **kwargs)


async def run_and_note(
    original: Function, self: Any, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note whether this session is one of a validation, as long as it runs, and its group."""
    token, group = _validates.set(bool(trajectory["validate"])), _group.get()
    try:
        async with group.session(kwargs["session_id"]) if group else nullcontext():
            return await original(self, sampling_params, trajectory, *args, **kwargs)
    finally:
        _validates.reset(token)


async def compute_and_mark(
    original: Function, self: Any, outputs: Any, kwargs: dict[str, Any], **more: Any
) -> None:
    """Mark a session that an agent loop scored itself, and tell the reward manager of others.

    Its last output then has a `reward_extra_info`, with the score under `AGENT_SCORE_KEY`.
    """
    score, fields, is_for_us = outputs[-1].reward_score, outputs[-1].extra_fields, _is_for_us(self)
    if is_for_us:
        fields[TOOL_SECONDS] = sum(output.metrics.tool_calls for output in outputs)
        fields[IS_VALIDATION] = _validates.get()
    if score is None and (group := _group.get()):
        columns = {"__num_turns__": outputs[-1].num_turns, "tool_extra_fields": fields}
        sample = Sample({**kwargs, **columns}, np.array(outputs[-1].response_ids))
        workers = self.reward_loop_worker_handles
        kwargs = {**kwargs, OF_GROUP: await group.results(kwargs["session_id"], sample, workers)}
    await original(self, outputs, kwargs, **more)
    for name in (TOOL_SECONDS, IS_VALIDATION):  # no columns of the batch
        fields.pop(name, None)
    if score is not None and is_for_us:
        info = fields.get(INFO) or {}
        named = {name: value for name, value in info.items() if name != "score"}
        fields[INFO] = {**named, AGENT_SCORE_KEY: score}


def postprocess_without_columns(
    original: Function, self: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make one column of dicts: see `legacy.py`."""
    if not _is_for_us(self):
        return original(self, inputs, *args, **kwargs)
    infos = np.empty(len(inputs), dtype=object)
    infos[:] = [each.extra_fields.get(INFO) or {} for each in inputs]
    for each in inputs:
        each.extra_fields[INFO] = {}
    data = original(self, inputs, *args, **kwargs)
    data.non_tensor_batch[INFO] = infos
    return data


def _is_for_us(worker: Any) -> bool:
    """Whether the worker's run has gdpo; asked once, as verl may run a manager's file for it."""
    config, is_ours = record_of(worker) or (None, False)
    if config is not worker.config:
        estimator = OmegaConf.select(worker.config, "algorithm.adv_estimator")
        is_ours = estimator == "gdpo" or runs_gdpo_manager(worker.config)
        attach(worker, (worker.config, is_ours))
    return bool(is_ours)
