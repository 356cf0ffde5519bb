"""Entry point `verl_gdpo_cpu` of the group `verl.plugins`: lets verl 0.9 run without a GPU.

verl imports this module at the end of `import verl`, in every process. It acts only if the
environment says VERL_PLATFORM=cpu: a CPU-only head node of a GPU cluster must never pick up the
CPU platform. verl hides a plugin's exception in its debug log, so it is printed here first.

`ON_CPU` is the table of what is changed, each right after the module has been imported; see
`hooks/extend.py`, and `on_cpu.py` for the reasons. Besides:

- verl.plugin.platform.PlatformRegistry (public) gets the platform "cpu".
- verl.checkpoint_engine.CheckpointEngineRegistry (public) gets the checkpoint engine "gloo".
- verl.workers.rollout.replica.RolloutReplicaRegistry (public) gets the rollout "hf".
- the variable VERL_ENGINE_DEVICE, read by verl.workers.engine.base.EngineRegistry: verl registers
  its FSDP engine for cuda and npu only; it runs on CPU just the same.
"""

import importlib
import os
import sys
from types import ModuleType

from wrapt import register_post_import_hook

from verl_gdpo.cpu.on_cpu import ROLLOUTS
from verl_gdpo.hooks.extend import extend_when_imported, extensions
from verl_gdpo.hooks.refusal import versions

# {verl's module: {name with the parameters that ours needs: our function}}; a request to a
# rollout of ours has one sampling option more, "session"
OWN_ROLLOUT = extensions(
    {
        "verl.workers.rollout.base": {
            "get_rollout_class(rollout_name)": "on_cpu:find_rollout_class"
        },
        "verl.workers.rollout.replica": {"RolloutReplicaRegistry.register(name,loader)": ""},
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopWorker._run_agent_loop(sampling_params)": "on_cpu:run_with_session"
        },
    },
    room="cpu",
)
ON_CPU = extensions(
    {
        "verl.plugin.platform": {"PlatformRegistry.register(platform)": ""},
        "verl.checkpoint_engine": {"CheckpointEngineRegistry.register(backend)": ""},
        "verl.utils.distributed": {
            "initialize_global_process_group_ray(timeout_second,backend)": "on_cpu:initialize_gloo",
        },
        "verl.utils.fsdp_utils": {"fsdp2_sharded_save_to_cpu(model)": "on_cpu:save_copies"},
        "verl.workers.engine.fsdp.transformer_impl": {
            "CPUOffloadPolicy(pin_memory)": "on_cpu:make_unpinned",
        },
        "verl.trainer.ppo.v1.replay_buffer": {
            "ReplayBuffer.__init__(poll_interval)": "on_cpu:construct_with_short_poll",
        },
        "vllm.model_executor.layers.utils": {
            "dispatch_cpu_unquantized_gemm(layer)": "vllm_rollout:keep_weights",
        },
        "importlib.metadata": {"version(distribution_name)": "vllm_rollout:find_version"},
    },
    room="cpu",
)
# the recipe for the CPU needs it, also where the plugin `verl_gdpo` is not loaded
FUSED_KERNELS = extensions(
    {
        "verl.utils.fsdp_utils": {
            "_select_fsdp2_wrap_targets(model)": "attention:keep_head_in_root",
        }
    }
)


def activate() -> None:
    """Set verl up for the CPU if VERL_PLATFORM=cpu.

    Raises:
        ImportError: verl lacks something that this module needs; names it.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":  # normalised as verl does
        return
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    extend_when_imported((*ON_CPU, *FUSED_KERNELS), refuse_verl)
    after_import("verl.checkpoint_engine", "verl_gdpo.cpu.checkpoint_engine")
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
    ROLLOUTS[name] = f"{module}.{adapter}"
    extend_when_imported(OWN_ROLLOUT, refuse_verl)

    def register(verls: ModuleType) -> None:
        registry = verls.RolloutReplicaRegistry
        registry.register(name, lambda: getattr(importlib.import_module(module), replica))

    register_post_import_hook(register, "verl.workers.rollout.replica")


def after_import(module: str, ours: str) -> None:
    """Import ours, which registers itself, right after verl imports this module."""
    register_post_import_hook(lambda _: importlib.import_module(ours), module)


def refuse_verl(reason: str) -> None:
    """Raise ImportError, and print it: verl and Ray may hide it."""
    message = f"verl_gdpo.cpu cannot change verl: {reason} ({versions()})"
    print(message, file=sys.stderr, flush=True)
    raise ImportError(message)


activate()
