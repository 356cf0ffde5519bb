"""Carries what was returned for each rollout out of verl's agent loop workers, as it was returned.

Relies on verl 0.9 `AgentLoopWorker`:
- the coroutine `_compute_score(outputs, ...)`, which leaves out the reward manager if an agent loop
  has set `reward_score` itself. verl then copies `extra_fields["reward_extra_info"]` of the last
  output to the others of its session, and raises KeyError if there is none.
- `_run_agent_loop(sampling_params, trajectory, ...)` runs a session in a task of its own, and
  `trajectory["validate"]` says whether it is one of a validation;
- `_postprocess(inputs, ...)`, which makes the legacy trainers' batch. It has a column for each key
  of the first sample, and raises if another sample lacks the key or has a list of another length.
"""

from contextvars import ContextVar
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_gdpo.algorithm.samples import AGENT_SCORE_KEY
from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.extend import Function, attach, record_of

# in the `extra_info` of a reward function
TOOL_SECONDS, IS_VALIDATION = "tool_seconds", "is_validation"
_validates: ContextVar[bool] = ContextVar("verl_gdpo_validates", default=False)
INFO = "reward_extra_info"  # verl's name for what was returned beside the score


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
    original: Function, self: Any, outputs: Any, *args: Any, **kwargs: Any
) -> None:
    """Mark a session that an agent loop scored itself, and tell the reward manager of others.

    Its last output then has a `reward_extra_info`, with the score under `AGENT_SCORE_KEY`.
    """
    score, fields, is_for_us = outputs[-1].reward_score, outputs[-1].extra_fields, _is_for_us(self)
    if is_for_us:
        fields[TOOL_SECONDS] = sum(output.metrics.tool_calls for output in outputs)
        fields[IS_VALIDATION] = _validates.get()
    await original(self, outputs, *args, **kwargs)
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
