"""The names that engines, trackers and other parts of verl know.

vLLM, SGLang and Megatron are seldom where check runs, and loading one takes longer than check has.
What they take is written down here.
"""

from collections.abc import Collection
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import (
    ACTOR,
    MODEL,
    REF,
    ROLLOUT,
    Roles,
)
from verl_gdpo.tools.check.verl_questions import STRATEGIES, trains_critic
from verl_gdpo.tools.run.attention import AUTO, SDPA

# vllm.config.model.ModelDType; the choices of --dtype in sglang.srt.server_args
DTYPES_OF_ROLLOUT = ("auto", "half", "float16", "bfloat16", "float", "float32")
# vllm.model_executor.model_loader.LoadFormats, sglang.srt.configs.load_config.LoadFormat, and the
# names of earlier versions of verl, which looks itself whether "dummy" is a part of it
LOAD_FORMATS = (
    "auto",
    "hf",
    "pt",
    "safetensors",
    "npcache",
    "dummy",
    "tensorizer",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "fastsafetensors",
    "modelexpress",
    "instanttensor",
    "layered",
    "flash_rl",
    "jax",
    "remote",
    "remote_instance",
    "rdma",
    "local_cached",
    "private",
    "megatron",
    "dummy_dtensor",
    "dummy_hf",
    "dummy_megatron",
    "dtensor",
)
# vllm.config.model.LogprobsMode, vllm.config.scheduler.SchedulerPolicy
LOGPROBS_MODES = ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
POLICIES = ("fcfs", "priority")
# verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer._apply_quantization, and
# verl.workers.rollout.sglang_rollout.async_sglang_server.SGLangHttpServer.launch_server
QUANTIZATIONS = {"vllm": ("fp8", "torchao", "ascend"), "sglang": ("fp8",)}
# verl.checkpoint_engine: what its modules register. One whose package is not here does not.
CHECKPOINT_ENGINES = ("naive", "nccl", "nixl", "kimi_ckpt_engine", "mooncake", "delta_sharded")
# verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.should_save_model and its siblings
CONTENTS = ("model", "optimizer", "extra", "hf_model")
# verl.utils.profiler.profile.DistProfiler.__init__ takes any other name for none
PROFILERS = ("nsys", "npu", "torch", "torch_memory", "precision_debugger")
# verl.utils.rollout_trace.RolloutTraceConfig.init takes any other name for none
TRACERS = ("weave", "mlflow", "trackio")
DEVICES = ("cuda", "npu", "cpu", "xpu", "musa", "mlu")
STRATEGIES_OF_ENGINES = {
    "FSDPEngineConfig": ("fsdp", "fsdp2", "fsdp_turbo"),
    "McoreEngineConfig": ("megatron",),
    "VeOmniEngineConfig": ("veomni",),
    "TorchtitanEngineConfig": ("torchtitan",),
    "AutomodelEngineConfig": ("automodel",),
}
# verl.models.transformers.monkey_patch.patch_forward_with_backends
KERNELS = ("triton", "torch", "liger")
SIDES = ("left", "right", "middle")  # verl.experimental.agent_loop.tool_agent_loop


def look_at_names(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare names with those that engines, trackers and others know."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("vllm", "sglang"):
        _refuse_unknown(config, f"{ROLLOUT}.dtype", DTYPES_OF_ROLLOUT, answers)
        _refuse_unknown(config, f"{ROLLOUT}.load_format", LOAD_FORMATS, answers)
        known = QUANTIZATIONS[rollout.name]
        _refuse_unknown(config, f"{ROLLOUT}.quantization", known, answers)
    if rollout.name == "vllm":
        _refuse_unknown(config, f"{ROLLOUT}.logprobs_mode", LOGPROBS_MODES, answers)
        _refuse_unknown(config, f"{ROLLOUT}.scheduling_policy", POLICIES, answers)
    _refuse_unknown(config, "trainer.device", DEVICES, answers)
    _look_at_strategies(config, roles, answers)
    model = config.actor_rollout_ref.model
    if model.get("use_fused_kernels"):
        _refuse_unknown(config, f"{MODEL}.fused_kernel_options.impl_backend", KERNELS, answers)
    for block in (ACTOR, "critic"):
        _refuse_unknown(config, f"{block}.checkpoint.save_contents", CONTENTS, answers)
        _refuse_unknown(config, f"{block}.checkpoint.load_contents", CONTENTS, answers)
    engine = rollout.get("checkpoint_engine") or {}
    if not engine.get("custom_backend_module"):
        _refuse_unknown(config, f"{ROLLOUT}.checkpoint_engine.backend", CHECKPOINT_ENGINES, answers)
    _warn_of_unknown(config, f"{ROLLOUT}.trace.backend", TRACERS, answers)
    if config.global_profiler.get("steps"):
        _warn_of_unknown(config, "global_profiler.tool", PROFILERS, answers)
        for block in (ACTOR, REF, ROLLOUT, "critic"):
            if OmegaConf.select(config, f"{block}.profiler.enable"):
                _warn_of_unknown(config, f"{block}.profiler.tool", PROFILERS, answers)
    _look_at_attention(config, answers)
    if rollout.multi_turn.get("enable") or rollout.agent.default_agent_loop == "tool_agent":
        _refuse_unknown(config, f"{ROLLOUT}.multi_turn.tool_response_truncate_side", SIDES, answers)


def _look_at_attention(config: Any, answers: Answers) -> None:
    """Compare the attention with those that transformers and we have; it may be a kernel of a hub.

    See transformers' PreTrainedModel.get_correct_attn_implementation.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    key = f"{MODEL}.override_config.attn_implementation"
    name = OmegaConf.select(config, key)
    if name is None or "/" in str(name):
        return
    known = ["eager", AUTO, SDPA, *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    _refuse_unknown(config, key, known, answers)


def _look_at_strategies(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the engines of reference and critic; the actor's is a name of `rules.NAMED`."""
    if roles.ref is not None:
        _refuse_unknown(config, f"{REF}.strategy", STRATEGIES, answers)
    if trains_critic(config):
        _refuse_unknown(config, "critic.strategy", STRATEGIES, answers)
    for key, role in roles.with_engines():
        fitting = STRATEGIES_OF_ENGINES.get(type(role.engine).__name__)
        if fitting is not None and role.strategy in STRATEGIES and role.strategy not in fitting:
            # verl.workers.engine.base.EngineRegistry would hand one engine another's settings
            answers.problems.append(
                f"{key}.strategy={role.strategy}: the settings of its engine are those of "
                f"{fitting[0]}. Set model_engine={role.strategy.rstrip('2')}, which changes both"
            )


def _refuse_unknown(config: Any, key: str, known: Collection[str], answers: Answers) -> None:
    answers.problems += _unknown(config, key, known)


def _warn_of_unknown(config: Any, key: str, known: Collection[str], answers: Answers) -> None:
    answers.warnings += _unknown(config, key, known)


def _unknown(config: Any, key: str, known: Collection[str]) -> list[str]:
    return unknown_name(key, OmegaConf.select(config, key), known)


def unknown_name(key: str, value: Any, known: Collection[str]) -> list[str]:
    """Return a sentence for each name under a key that is not known. No name is right, too."""
    if value is None:
        return []
    names = [value]
    if isinstance(value, ListConfig):
        names = list(value)
    sentences = []
    for name in names:
        if str(name) not in known:
            remedy = hint(str(name), sorted(known)) or _all_of(known)
            sentences.append(f"{key}={name}: no such name{remedy}")
    return sentences


def _all_of(known: Collection[str]) -> str:
    return f"; expected one of {', '.join(sorted(known))}"
