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
import functools
from contextvars import ContextVar
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_gdpo.algorithm.values import AGENT_SCORE_KEY, OF_AGENT_LOOPS, ROLLOUT_KEY
from verl_gdpo.hooks import net
from verl_gdpo.hooks.before_training import may_have_gdpo_manager, runs_gdpo_manager
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import Function, attach, record_of
from verl_gdpo.scoring.function_list import KEY, OF_GROUP
from verl_gdpo.scoring.response import runs_of

# Reward functions find these in their `extra_info`.
TOOL_SECONDS = "tool_seconds"
IS_VALIDATION = "is_validation"
# The reward manager finds the runs of the response mask here; verl sends it no mask.
MASK_RUNS = "gdpo_mask_runs"
# verl has what was returned beside the score under this name.
INFO = "reward_extra_info"
# A column of True stands beside a column `INFO` of ours, because verl may have one of its own.
IS_OURS = "gdpo_is_ours"
# None: verl has not said it here; see `run_and_note`.
_validates: ContextVar[bool | None] = ContextVar("verl_gdpo_validates", default=None)
# {task of a session that runs: the sessions of its prompt}
_groups: dict[Any, "_Sessions"] = {}


class _Sessions:
    """The sessions of a prompt, which are scored together once each has an output or has ended."""

    def __init__(self, tasks: Any) -> None:
        # {task of a session: its last output}. It is None for a session that failed, or whose
        # agent loop scored it.
        self._last: dict[Any, asyncio.Future[Any]] = {}
        for task in tasks:
            last = asyncio.get_running_loop().create_future()
            self._last[task] = last
            task.add_done_callback(functools.partial(_end_without_output, last))
        # One call scores all sessions, and each of them waits for it.
        self._scoring: asyncio.Future[list[Any]] | None = None

    async def result(self, output: Any, score: Function) -> Any:
        """Return this session's part of what `score` returns for the outputs of all."""
        own_task = asyncio.current_task()
        self._last[own_task].set_result(output)
        await asyncio.wait(self._last.values())
        # The outputs keep the order in which verl made the tasks.
        tasks = []
        outputs = []
        for task, last in self._last.items():
            if last.result() is not None:
                tasks.append(task)
                outputs.append(last.result())
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(score(outputs))
        # A session may be cancelled alone, and the others still need the results.
        results = await asyncio.shield(self._scoring)
        return results[tasks.index(own_task)]


def _end_without_output(last: "asyncio.Future[Any]", _task: Any) -> None:
    """Let the other sessions of a prompt go on without one that has ended."""
    if not last.done():
        last.set_result(None)


async def settle(call: Call) -> Any:
    """Let the sessions of a prompt know each other before one of them begins."""
    tasks = call["tasks"]
    sessions = _Sessions(tasks)
    for task in tasks:
        _groups[task] = sessions
    try:
        return await call.hand_on()
    finally:
        # A task holds its outputs, so none may stay here.
        for task in tasks:
            _groups.pop(task, None)


async def run_and_note(call: Call) -> Any:
    """Note whether this session is one of a validation, as long as it runs."""
    token = _validates.set(bool(call["trajectory"]["validate"]))
    try:
        return await call.hand_on()
    finally:
        _validates.reset(token)


async def compute_and_mark(call: Call) -> Any:
    """Mark a session that an agent loop scored itself, and tell the reward manager of others.

    Its last output then has a `reward_extra_info`, with the score under `AGENT_SCORE_KEY`.
    """
    worker = call.instance
    if not _is_for_us(worker):
        return await call.hand_on()
    outputs = call["outputs"]
    last = outputs[-1]
    fields = last.extra_fields
    own_score = last.reward_score
    tool_seconds = sum(output.metrics.tool_calls for output in outputs)
    fields[TOOL_SECONDS] = tool_seconds
    is_validation = _validates.get()
    if is_validation is None:
        net.warn_of("AgentLoopWorker._run_agent_loop")
    else:
        fields[IS_VALIDATION] = is_validation
    fields[MASK_RUNS] = runs_of(last.response_mask)

    group = None
    if own_score is None and _scores_groups(worker.config):
        group = _groups.get(asyncio.current_task())
    if group is None:
        await call.hand_on()
    else:
        await _score_in_group(group, call)
    # The reward manager has read them by now, and as fields they would become columns of the batch.
    fields.pop(TOOL_SECONDS, None)
    fields.pop(IS_VALIDATION, None)
    fields.pop(MASK_RUNS, None)
    if own_score is not None:
        fields[INFO] = _with_own_score(fields.get(INFO) or {}, own_score)
    # A colocated reward model scores later, in the trainer. A validation has no step to dump.
    if INFO in fields and not is_validation:
        rollout = {"generated_tokens": sum(last.response_mask), TOOL_SECONDS: tool_seconds}
        fields[INFO] = {**fields[INFO], ROLLOUT_KEY: rollout}
    return None


async def _score_in_group(group: _Sessions, call: Call) -> None:
    """Score the last output of a session together with those of its prompt's other sessions."""
    last = call["outputs"][-1]

    async def score_all(outputs: list[Any]) -> Any:
        # verl sends all outputs to a reward worker, which returns a list of results for a group.
        fields = {**call["kwargs"], OF_GROUP: True}
        await call.changed(outputs=outputs, kwargs=fields).hand_on()
        return outputs[-1].extra_fields[INFO]

    result = await group.result(last, score_all)
    last.reward_score = result["reward_score"]
    last.extra_fields[INFO] = result[INFO]


def _with_own_score(info: dict[Any, Any], score: Any) -> dict[Any, Any]:
    """Return what an agent loop returned beside its score, and the score under a name of ours.

    Raises:
        ValueError: the agent loop has used a name of ours.
    """
    for name in OF_AGENT_LOOPS:
        if name in info:
            raise ValueError(f"reward_extra_info has {name!r}, verl-gdpo's own; rename it")
    # verl itself writes the score of a session under this name.
    named = {name: value for name, value in info.items() if name != "score"}
    return {**named, AGENT_SCORE_KEY: score}


def _scores_groups(config: Any) -> bool:
    """Whether a function of the list scores the sessions of a prompt together."""
    functions = OmegaConf.select(config, KEY) or {}
    return any(each and each.get("group") for each in functions.values())


def postprocess_without_columns(call: Call) -> Any:
    """Make one column of dicts: see `legacy.py`."""
    if not _is_for_us(call.instance):
        return call.hand_on()
    inputs = call["inputs"]
    # One column of dicts, because samples may have different keys.
    infos = np.empty(len(inputs), dtype=object)
    for place, each in enumerate(inputs):
        infos[place] = each.extra_fields.get(INFO) or {}
        # verl then makes no columns of it.
        each.extra_fields[INFO] = {}
    data = call.hand_on()
    data.non_tensor_batch[INFO] = infos
    data.non_tensor_batch[IS_OURS] = np.ones(len(inputs), dtype=bool)
    return data


def _is_for_us(worker: Any) -> bool:
    """Whether the worker's run has gdpo; asked once, as verl may run a manager's file for it."""
    config, is_ours = record_of(worker) or (None, False)
    # Another run's configuration has another answer.
    if config is not worker.config:
        estimator = OmegaConf.select(worker.config, "algorithm.adv_estimator")
        is_ours = estimator == "gdpo"
        if not is_ours and may_have_gdpo_manager(worker.config):
            is_ours = runs_gdpo_manager(worker.config)
        attach(worker, (worker.config, is_ours))
    return bool(is_ours)
