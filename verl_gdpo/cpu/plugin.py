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

from verl_gdpo.hooks.extend import Extension, extend_when_imported, load
from verl_gdpo.hooks.refusal import versions

# each request has one sampling option more, "session"
HF_ROLLOUT = (
    Extension(
        "verl.workers.rollout.base",
        "get_rollout_class(rollout_name)",
        "cpu.on_cpu:find_rollout_class",
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._run_agent_loop(sampling_params)",
        "cpu.on_cpu:run_with_session",
    ),
    Extension("verl.workers.rollout.replica", "RolloutReplicaRegistry.register(name,loader)"),
)
ON_CPU = (
    Extension(
        "verl.utils.distributed",
        "initialize_global_process_group_ray(timeout_second,backend)",
        "cpu.on_cpu:initialize_with_gloo",
    ),
    Extension(
        "verl.utils.fsdp_utils",
        "_select_fsdp2_wrap_targets(model)",
        "hooks.fused_kernels:keep_head_in_root",
    ),
    Extension(
        "verl.utils.fsdp_utils", "fsdp2_sharded_save_to_cpu(model)", "cpu.on_cpu:save_copies"
    ),
    Extension(
        "verl.workers.engine.fsdp.transformer_impl",
        "CPUOffloadPolicy(pin_memory)",
        "cpu.on_cpu:make_unpinned",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__(poll_interval)",
        "cpu.on_cpu:construct_with_short_poll",
    ),
    Extension("verl.plugin.platform", "PlatformRegistry.register(platform)"),
    Extension("verl.checkpoint_engine", "CheckpointEngineRegistry.register(backend)"),
    Extension(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm(layer)",
        "cpu.vllm_rollout:keep_weights",
    ),
    Extension("importlib.metadata", "version(distribution_name)", "cpu.vllm_rollout:find_version"),
)


def activate() -> None:
    """Set verl up for the CPU if VERL_PLATFORM=cpu.

    Raises:
        ImportError: verl lacks something that this module needs; names it.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":  # normalised as verl does
        return
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    extend_when_imported(ON_CPU, refuse_verl)
    after_import("verl.checkpoint_engine", "verl_gdpo.cpu.checkpoint_engine")
    add_hf_rollout()
    platforms = importlib.import_module("verl.plugin.platform").PlatformRegistry
    platforms.register(platform="cpu")(load("cpu.device:PlatformCPU"))


def add_hf_rollout() -> None:
    """Let `actor_rollout_ref.rollout.name=hf` choose our rollout, which is imported then."""
    extend_when_imported(HF_ROLLOUT, refuse_verl)

    def register(replica: ModuleType) -> None:
        replica.RolloutReplicaRegistry.register("hf", lambda: load("cpu.rollout:HFReplica"))

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
