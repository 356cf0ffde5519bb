"""Carries what was returned for each rollout out of verl's agent loop workers, as it was returned.

It also counts the samples that were finished.

Relies on verl 0.9 `AgentLoopWorker`:
- the coroutine `_compute_score(outputs, ...)`, which leaves out the reward manager if an agent loop
  has set `reward_score` itself. verl then copies `extra_fields["reward_extra_info"]` of the last
  output to the others of its session, and raises KeyError if there is none.
- `_postprocess(inputs, ...)`, which makes the legacy trainers' batch. It has a column for each key
  of the first sample, and raises if another sample lacks the key or has a list of another length.
"""

from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from verl_gdpo.algorithm.samples import AGENT_SCORE_KEY
from verl_gdpo.hooks.extend import Function, extends

INFO = "reward_extra_info"  # verl's name for what was returned beside the score

IS_OURS = "_is_for_gdpo"  # our attribute of a worker: its configuration, and the answer

_finished = 0  # samples, in this process


@extends(AgentLoopWorker, "_compute_score")
async def compute_and_mark(
    compute_score: Function, self: Any, outputs: Any, *args: Any, **kwargs: Any
) -> None:
    """Mark a session that an agent loop scored itself.

    Its last output then has a `reward_extra_info`, with the score under `AGENT_SCORE_KEY`.
    """
    global _finished
    score = outputs[-1].reward_score
    await compute_score(self, outputs, *args, **kwargs)
    _finished += 1
    if score is not None and _is_for_us(self):
        fields = outputs[-1].extra_fields
        info = fields.get(INFO) or {}
        named = {name: value for name, value in info.items() if name != "score"}
        fields[INFO] = {**named, AGENT_SCORE_KEY: score}


@extends(AgentLoopWorker, "_postprocess")
def postprocess_without_columns(
    postprocess: Function, self: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make one column of dicts: see `legacy_batch.py`."""
    if not _is_for_us(self):
        return postprocess(self, inputs, *args, **kwargs)
    infos = np.empty(len(inputs), dtype=object)
    infos[:] = [given.extra_fields.get(INFO) or {} for given in inputs]
    for given in inputs:
        given.extra_fields[INFO] = {}
    data = postprocess(self, inputs, *args, **kwargs)
    data.non_tensor_batch[INFO] = infos
    return data


def finished_samples(_worker: Any) -> int:
    """Return how many samples this process has finished. It runs in an agent loop worker."""
    return _finished


def _is_for_us(worker: Any) -> bool:
    """Whether the worker's run has gdpo; asked once, as verl may run a manager's file for it."""
    config, said = getattr(worker, IS_OURS, (None, False))
    if config is not worker.config:
        from verl_gdpo.hooks.reward_manager import runs_gdpo_manager

        estimator = OmegaConf.select(worker.config, "algorithm.adv_estimator")
        said = estimator == "gdpo" or runs_gdpo_manager(worker.config)
        setattr(worker, IS_OURS, (worker.config, said))
    return bool(said)
