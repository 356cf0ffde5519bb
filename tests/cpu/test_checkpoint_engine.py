"""The checkpoint engine "gloo": two workers of a trainer send weights to two of a rollout."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from verl_gdpo.cpu.checkpoint_engine import GlooCheckpointEngine

TRAINER = ROLLOUT = 2


def weights(step):
    """Several types, an empty tensor, and one that is a view with holes."""
    return {
        "embedding": torch.arange(12.0).reshape(3, 4) + step,
        "half": torch.full((5,), 0.1 * step, dtype=torch.bfloat16),
        "turned": (torch.arange(6.0).reshape(2, 3) * step).T,
        "one": torch.tensor(float(step), requires_grad=True),
        "none": torch.empty(0, 7),
    }


def sent(engine, given, made):
    def make():  # producing a weight is work of all workers of the trainer together
        for name, tensor in given.items():
            made.append(name)
            yield name, tensor

    asyncio.run(engine.send_weights(make(), global_steps=1))


async def received(engine):
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}


def update(trainer, rollout, step, pool):
    """As verl's CheckpointEngineManager does it; returns what each worker of the rollout got."""
    metadata = [engine.prepare() for engine in trainer + rollout]
    ours, theirs = type(trainer[0]).build_topology(len(trainer), len(rollout), metadata)
    calls = []
    for engines, arguments in ((trainer, ours), (rollout, theirs)):
        for number, engine in enumerate(engines):
            own = {name: values[number] for name, values in arguments.items()}
            calls.append(pool.submit(engine.init_process_group, **own))
    _ = [call.result(60) for call in calls]
    made = [[] for _ in trainer]
    sending = [
        pool.submit(sent, *given)
        for given in zip(trainer, [weights(step)] * len(trainer), made, strict=True)
    ]
    got = [pool.submit(asyncio.run, received(engine)) for engine in rollout]
    results = [call.result(60) for call in got]
    _ = [call.result(60) for call in sending]
    assert made == [list(weights(step))] * len(trainer)
    for engine in trainer + rollout:
        engine.finalize()
    return results


def test_each_update_reaches_each_worker_of_the_rollout():
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
    trainer = [GlooCheckpointEngine(1 << 20, is_master=rank == 0) for rank in range(TRAINER)]
    rollout = [GlooCheckpointEngine(1 << 20) for _ in range(ROLLOUT)]
    with ThreadPoolExecutor(TRAINER + ROLLOUT) as pool:
        for step in (1, 2):
            for got in update(trainer, rollout, step, pool):
                assert list(got) == list(weights(step))
                for name, tensor in weights(step).items():
                    assert got[name].dtype == tensor.dtype
                    assert torch.equal(got[name], tensor.detach()), name
