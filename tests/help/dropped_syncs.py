"""Drops each sync of the weights to vLLM but the second: VERL_USE_EXTERNAL_MODULES=dropped_syncs.

The first step then samples from random weights, the second from the trainer's, and the third from
those of the step before.
"""

from verl.workers.rollout.utils import ensure_async_iterator
from wrapt import register_post_import_hook

KEPT = 2


def drop(rollout):
    original = rollout.ServerAdapter.update_weights
    count = 0

    async def update_weights(self, weights, global_steps=None, **options):
        nonlocal count
        count += 1
        if count == KEPT:
            return await original(self, weights, global_steps=global_steps, **options)
        async for _ in ensure_async_iterator(weights):  # all ranks of the trainer take part
            pass
        if self._ensure_server_handle():  # the number of the step alone
            await self.server_handle.set_global_steps.remote(global_steps)

    rollout.ServerAdapter.update_weights = update_weights


register_post_import_hook(drop, "verl.workers.rollout.vllm_rollout.vllm_rollout")
