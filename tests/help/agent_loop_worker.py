"""verl's own agent loop workers in this process, with an agent loop that scores itself.

The loop is `SELF_SCORED`. `results[prompt][session]` is what it sets: `reward_score` and
`reward_extra_info`. Ray and the LLM server are doubles.
"""

import asyncio
from types import SimpleNamespace

import numpy as np
import torch
from tiny_chat_model import make_chat_model
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import get_tensordict
from verl_batch import verl_config

from verl_gdpo.tools.run.resume import quoted

SELF_SCORED = "scores_itself"
NOT_SET = object()
results = {}


def made_output(number):
    return AgentLoopOutput(
        prompt_ids=[5, 6],
        response_ids=[7] * (2 + number),
        response_mask=[1] * (2 + number),
        num_turns=4,
        metrics=AgentLoopMetrics(),
        extra_fields={},  # verl 0.9.0 and its main want it set
    )


@register(SELF_SCORED)
class ScoresItself(AgentLoopBase):
    async def run(self, sampling_params, raw_prompt, **kwargs):
        given = results[raw_prompt[0]["content"]]
        made, (score, info) = made_output(0), given.pop(0)
        fields = {} if info is NOT_SET else {"reward_extra_info": info}
        made.reward_score, made.extra_fields = score, fields
        return made


class Scorer:
    """A reward worker that no session must ask."""

    compute_score = SimpleNamespace(remote=None)


def make_worker(cls, folder):
    """A worker of verl, made by its own constructor. A test may give it another `config`."""
    if not (folder / "config.json").exists():
        make_chat_model(folder)
    config = verl_config(
        f"actor_rollout_ref.model.path={quoted(str(folder))}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={SELF_SCORED}",
        "actor_rollout_ref.rollout.prompt_length=4",
        "actor_rollout_ref.rollout.response_length=6",
    )
    return cls(config, None, reward_loop_worker_handles=[Scorer()])


WORKER_OF_V1 = AgentLoopWorkerTQ.__ray_metadata__.modified_class


def generate_on_v1(worker, prompts, uids, sources, *, validate=False):
    """Run all sessions; the rows are then in TransferQueue."""
    batch = get_tensordict(
        {name: column.tolist() for name, column in columns_of(prompts, uids, sources).items()}
        | {"index": list(range(len(uids)))},
        non_tensor_dict={"global_steps": 7, "validate": validate},
    )

    async def run():
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(run())


def messages_of(prompts):
    return objects([[{"role": "user", "content": prompt}] for prompt in prompts])


def objects(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def columns_of(prompts, uids, sources):
    return {
        "raw_prompt": messages_of(prompts),
        "uid": objects(uids),
        "data_source": objects(sources),
        "reward_model": objects([{"ground_truth": "4"}] * len(uids)),
        "agent_name": objects([SELF_SCORED] * len(uids)),
    }


def legacy_batch(prompts, uids, sources):
    return DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(prompts), 1)},
        non_tensors=columns_of(prompts, uids, sources),
        meta_info={"global_steps": 7},
    )


def generate_on_legacy(workers, data):
    """As verl's AgentLoopManager: a chunk to each worker."""
    chunks = data.chunk(len(workers))

    async def run():
        return [await w.generate_sequences(c) for w, c in zip(workers, chunks, strict=True)]

    return DataProto.concat(asyncio.run(run()))
