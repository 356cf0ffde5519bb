"""verl's rollouter, whose errors verl drops; `slow/trainers.py` runs the whole training."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from verl.experimental.fully_async_policy import fully_async_rollouter
from verl_batch import verl_config

from verl_gdpo.hooks import legacy


class Signals:
    """Of the message queue: what the rollouter puts into it."""

    def __init__(self):
        self.samples = []

    async def put_sample(self, sample):
        self.samples.append(sample)
        return True


async def one_prompt(rollouter):
    await rollouter.pending_queue.put(SimpleNamespace(sample_id="sample_0_1"))
    await rollouter.pending_queue.put(None)


async def nothing(*_):
    return None


async def cannot_score(_sample):
    raise RuntimeError("cannot be scored")


async def run_rollouter(rollouter_cls, *overrides, process):
    """verl's rollouter, with doubles for the message queue, the prompts and the agent loops."""
    rollouter = object.__new__(rollouter_cls)
    legacy.extend(rollouter, verl_config(*overrides))
    doubles = {
        "async_rollout_manager": object(),
        "message_queue_client": Signals(),
        "_feed_samples": lambda: one_prompt(rollouter),
        "_process_single_sample_streaming": process,
        "_async_monitor_loop": nothing,  # it waits for 10 s
        "_should_pause_generation": nothing,
        "_record_active_count": lambda: None,
    }
    numbers = {"max_concurrent_samples": 1, "staleness_samples": 0, "active_tasks": set()}
    vars(rollouter).update(doubles, **numbers)
    rollouter.pending_queue = asyncio.Queue()
    rollouter._init_async_objects()
    try:
        await rollouter_cls.fit(rollouter)  # as Ray calls it, whatever class the object has now
    finally:
        assert rollouter.message_queue_client.samples == [None]  # the trainer's sign to end


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_rollouter_raises_what_ended_it(is_sent):
    rollouter_cls = fully_async_rollouter.FullyAsyncRollouter.__ray_metadata__.modified_class
    if is_sent:  # as Ray sends it to the actor's process
        rollouter_cls = ray.cloudpickle.loads(ray.cloudpickle.dumps(rollouter_cls))
    with pytest.raises(RuntimeError, match="cannot be scored"):
        asyncio.run(run_rollouter(rollouter_cls, process=cannot_score))
    asyncio.run(run_rollouter(rollouter_cls, process=nothing))
    without_us = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")
    asyncio.run(run_rollouter(rollouter_cls, *without_us, process=cannot_score))
