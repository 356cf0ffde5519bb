"""Carries what was returned for each rollout out of verl's agent loop workers, as it was returned.

Relies on verl 0.9 `AgentLoopWorker`:
- the coroutine `_compute_score(outputs, ...)`, which leaves out the reward manager if an agent loop
  has set `reward_score` itself. verl then copies `extra_fields["reward_extra_info"]` of the last
  output to the others of its session, and raises KeyError if there is none.
- `_run_agent_loop(sampling_params, trajectory, ...)` runs a session in a task of its own, and
  `trajectory["validate"]` says whether it is one of a validation;
- `AgentLoopWorkerTQ._run_prompt` makes a task of each session of a prompt, and hands all of them to
  `_settle_session_tasks(tasks)` before one has begun. A session calls `_compute_score` in its task;
- `_compute_score` sends all outputs to a reward worker, and keeps the answer in the last;
- `_postprocess(inputs, ...)`, which makes the legacy trainers' batch. It has a column for each key
  of the first sample, and raises if another sample lacks the key or has a list of another length.
"""

import asyncio
from contextvars import ContextVar
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_gdpo.algorithm.values import AGENT_SCORE_KEY
from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.extend import Function, attach, record_of
from verl_gdpo.scoring.function_list import KEY, OF_GROUP

# in the `extra_info` of a reward function
TOOL_SECONDS, IS_VALIDATION = "tool_seconds", "is_validation"
_validates: ContextVar[bool] = ContextVar("verl_gdpo_validates", default=False)
_groups: dict[Any, "_Sessions"] = {}  # {task of a session that runs: its group}
INFO = "reward_extra_info"  # verl's name for what was returned beside the score
IS_OURS = "gdpo_is_ours"  # a column of True beside a column `INFO` of ours; verl has its own


class _Sessions:
    """The sessions of a prompt, which are scored together once each has an output or has ended."""

    def __init__(self, tasks: Any) -> None:
        # None for a session that failed, or whose agent loop scored it
        self._last = {task: asyncio.get_running_loop().create_future() for task in tasks}
        self._scoring: asyncio.Future[list[Any]] | None = None
        for task, last in self._last.items():
            task.add_done_callback(lambda _, last=last: last.done() or last.set_result(None))

    async def result(self, output: Any, score: Function) -> Any:
        """Return this session's part of what `score` returns for the outputs of all."""
        own = asyncio.current_task()
        self._last[own].set_result(output)
        await asyncio.wait(self._last.values())
        outputs = {task: last.result() for task, last in self._last.items() if last.result()}
        self._scoring = self._scoring or asyncio.ensure_future(score([*outputs.values()]))
        return (await asyncio.shield(self._scoring))[[*outputs].index(own)]


async def settle(original: Function, tasks: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the sessions of a prompt know each other before one of them begins."""
    _groups.update(dict.fromkeys(tasks, _Sessions(tasks)))
    try:
        return await original(tasks, *args, **kwargs)
    finally:  # a task holds its outputs
        for task in tasks:
            _groups.pop(task, None)


async def run_and_note(
    original: Function, self: Any, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note whether this session is one of a validation, as long as it runs."""
    token = _validates.set(bool(trajectory["validate"]))
    try:
        return await original(self, sampling_params, trajectory, *args, **kwargs)
    finally:
        _validates.reset(token)


async def compute_and_mark(
    original: Function, self: Any, outputs: Any, kwargs: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """Mark a session that an agent loop scored itself, and tell the reward manager of others.

    Its last output then has a `reward_extra_info`, with the score under `AGENT_SCORE_KEY`.
    """
    if not _is_for_us(self):
        return await original(self, outputs, kwargs, *args, **more)
    score, fields = outputs[-1].reward_score, outputs[-1].extra_fields
    fields[TOOL_SECONDS] = sum(output.metrics.tool_calls for output in outputs)
    fields[IS_VALIDATION] = _validates.get()
    group = _groups.get(asyncio.current_task()) if score is None else None
    if group and _scores_groups(self.config):

        async def score_all(last: list[Any]) -> Any:
            await original(self, last, {**kwargs, OF_GROUP: True}, *args, **more)
            return last[-1].extra_fields[INFO]

        result = await group.result(outputs[-1], score_all)
        outputs[-1].reward_score, fields[INFO] = result["reward_score"], result[INFO]
    else:
        await original(self, outputs, kwargs, *args, **more)
    for name in (TOOL_SECONDS, IS_VALIDATION):  # no columns of the batch
        fields.pop(name, None)
    if score is not None:
        info = fields.get(INFO) or {}
        if AGENT_SCORE_KEY in info:
            raise ValueError(
                f"reward_extra_info has {AGENT_SCORE_KEY!r}, verl-gdpo's own; rename it"
            )
        named = {name: value for name, value in info.items() if name != "score"}
        fields[INFO] = {**named, AGENT_SCORE_KEY: score}
    return None


def _scores_groups(config: Any) -> bool:
    """Whether a function of the list scores the sessions of a prompt together."""
    functions = OmegaConf.select(config, KEY) or {}
    return any(each and each.get("group") for each in functions.values())


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
    data.non_tensor_batch[IS_OURS] = np.ones(len(inputs), dtype=bool)
    return data


def _is_for_us(worker: Any) -> bool:
    """Whether the worker's run has gdpo; asked once, as verl may run a manager's file for it."""
    config, is_ours = record_of(worker) or (None, False)
    if config is not worker.config:
        estimator = OmegaConf.select(worker.config, "algorithm.adv_estimator")
        is_ours = estimator == "gdpo" or runs_gdpo_manager(worker.config)
        attach(worker, (worker.config, is_ours))
    return bool(is_ours)
