"""The functions that are called in the place of verl's where there is no GPU; see `plugin.py`."""

import importlib
from typing import Any

from verl_gdpo.hooks.extend import Function

BACKEND = "cpu:gloo"
POLL_INTERVAL_SECONDS = 0.1
ROLLOUTS: dict[str, str] = {}  # {name: MODULE.CLASS of its adapter}


def find_rollout_class(original: Function, rollout_name: str, *args: Any, **kwargs: Any) -> Any:
    """Return ours by its name: verl has no function that registers one."""
    if rollout_name not in ROLLOUTS:
        return original(rollout_name, *args, **kwargs)
    module, _, adapter = ROLLOUTS[rollout_name].rpartition(".")
    return getattr(importlib.import_module(module), adapter)


async def run_with_session(
    original: Function, self: Any, sampling_params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Tell the rollout which sample of its prompt this is.

    verl's V1 trainer gives `session_id` to the agent loop. The order in which the samples of a
    prompt arrive differs from run to run.
    """
    if self.config.actor_rollout_ref.rollout.name in ROLLOUTS and "session_id" in kwargs:
        sampling_params = {**sampling_params, "session": kwargs["session_id"]}
    return await original(self, sampling_params, *args, **kwargs)


def initialize_gloo(
    original: Function, timeout_second: int | None = None, backend: str | None = None
) -> None:
    """Choose a backend: verl's "cpu:gloo,cpu:gloo" names a device twice, which torch rejects."""
    original(timeout_second=timeout_second, backend=backend or BACKEND)


def save_copies(original: Function, model: Any) -> Any:
    """Copy weights that are kept for later: verl moves them to the CPU, where they are already."""
    shards, spec = original(model)
    return {name: (shard.clone(), own) for name, (shard, own) in shards.items()}, spec


def make_unpinned(original: Function, pin_memory: bool = False) -> Any:
    """Leave host memory unpinned: pinned, as for the reference model, it needs an accelerator."""
    return original(pin_memory=False)


def construct_with_short_poll(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Poll more often than every 2 s, for which there is no key: a tiny step takes less."""
    original(self, *args, **{"poll_interval": POLL_INTERVAL_SECONDS, **kwargs})
