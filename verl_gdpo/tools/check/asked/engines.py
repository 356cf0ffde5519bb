"""The names and numbers that the engines of training and rollout take.

vLLM, SGLang and Megatron are seldom where check runs, and loading one takes longer than check has.
What they take is written down here.
"""

from collections.abc import Collection
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, REF, ROLLOUT, Roles, lora_rank
from verl_gdpo.tools.check.verl_questions import STRATEGIES, trains_critic

# vllm.config.model.ModelDType; the choices of --dtype in sglang.srt.server_args
DTYPES_OF_ROLLOUT = ("auto", "half", "float16", "bfloat16", "float", "float32")
# vllm.model_executor.model_loader.LoadFormats, sglang.srt.configs.load_config.LoadFormat, and the
# names of earlier versions of verl, which looks itself whether "dummy" is a part of it
LOAD_FORMATS = (
    *("auto", "hf", "pt", "safetensors", "npcache", "dummy", "tensorizer", "sharded_state"),
    *("gguf", "bitsandbytes", "mistral", "runai_streamer", "runai_streamer_sharded"),
    *("fastsafetensors", "modelexpress", "instanttensor", "layered", "flash_rl", "jax", "remote"),
    *("remote_instance", "rdma", "local_cached", "private", "megatron"),
    *("dummy_dtensor", "dummy_hf", "dummy_megatron", "dtensor"),
)
# verl.checkpoint_engine: what its modules register. One whose package is not here does not.
CHECKPOINT_ENGINES = ("naive", "nccl", "nixl", "kimi_ckpt_engine", "mooncake", "delta_sharded")
# verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.should_save_model and its siblings
CONTENTS = ("model", "optimizer", "extra", "hf_model")
# verl.utils.profiler.profile.DistProfiler.__init__ takes any other name for none
PROFILERS = ("nsys", "npu", "torch", "torch_memory", "precision_debugger")
# verl.utils.rollout_trace.RolloutTraceConfig.init takes any other name for none
TRACERS = ("weave", "mlflow", "trackio")
DEVICES = ("cuda", "npu", "cpu", "xpu", "musa", "mlu")
# verl.models.transformers.monkey_patch.patch_forward_with_backends
KERNELS = ("triton", "torch", "liger")
# verl.workers.rollout.vllm_rollout.utils.get_vllm_max_lora_rank, which needs vLLM to be imported
HIGHEST_RANK = 512
AT_LEAST_1 = (
    f"{ROLLOUT}.agent.num_workers",  # verl.trainer.ppo.v1.agent_loop_tq: a batch for each of them
    f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.max_num_batched_tokens",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}.multi_turn.max_parallel_calls",
)
SHARES = ("algorithm.gamma", "algorithm.lam")
SIDES = ("left", "right", "middle")  # verl.experimental.agent_loop.tool_agent_loop


def look_at_names(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare names with those that engines, trackers and others know."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("vllm", "sglang"):
        _refuse_unknown(config, f"{ROLLOUT}.dtype", DTYPES_OF_ROLLOUT, answers)
        _refuse_unknown(config, f"{ROLLOUT}.load_format", LOAD_FORMATS, answers)
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
    if rollout.multi_turn.get("enable"):
        _refuse_unknown(config, f"{ROLLOUT}.multi_turn.tool_response_truncate_side", SIDES, answers)


def _look_at_strategies(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the engines of reference and critic; the actor's is a name of `rules.NAMED`."""
    if roles.ref is not None:
        _refuse_unknown(config, f"{REF}.strategy", STRATEGIES, answers)
    if trains_critic(config):
        _refuse_unknown(config, "critic.strategy", STRATEGIES, answers)


def _refuse_unknown(config: Any, key: str, known: Collection[str], answers: Answers) -> None:
    answers.problems += _unknown(config, key, known)


def _warn_of_unknown(config: Any, key: str, known: Collection[str], answers: Answers) -> None:
    answers.warnings += _unknown(config, key, known)


def _unknown(config: Any, key: str, known: Collection[str]) -> list[str]:
    value = OmegaConf.select(config, key)
    if value is None:
        return []
    names = list(value) if isinstance(value, ListConfig) else [value]
    return [
        f"{key}={name}: no such name{hint(str(name), sorted(known)) or _all_of(known)}"
        for name in names
        if str(name) not in known
    ]


def _all_of(known: Collection[str]) -> str:
    return f"; expected one of {', '.join(sorted(known))}"


def look_at_numbers(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare numbers with what engines take, and with each other."""
    for key in AT_LEAST_1:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and value < 1:
            answers.problems.append(f"{key}={value}: expected a number of 1 or more")
    for key in SHARES:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and not 0 <= value <= 1:
            answers.problems.append(f"{key}={value}: expected a number from 0 to 1")
    _look_at_lengths(config, answers)
    _look_at_sampling(config, answers)
    _look_at_clipping(config, roles, answers)
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.get("max_model_len")
    if length is not None and length < longest:
        # vLLM and SGLang end a response where the length of the model ends, and take no longer
        # prompt: verl's servers give them max_model_len - prompt at most.
        answers.problems.append(
            f"{ROLLOUT}.max_model_len={length}: a prompt and its response may have {longest} "
            f"tokens (data.max_prompt_length={config.data.max_prompt_length} and "
            f"data.max_response_length={config.data.max_response_length}). Raise it, leave it "
            "out, or shorten the rows"
        )
    trainer = config.trainer
    if trainer.val_only and not trainer.val_before_train:
        # verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit ends there only after the first validation
        answers.problems.append(
            "trainer.val_only=True with trainer.val_before_train=False: verl would train. Set "
            "trainer.val_before_train=True to validate alone"
        )
    model = config.actor_rollout_ref.model
    tiled = model.get("tiled_mlp") or {}
    shards = tiled.get("num_shards", 1)
    if tiled.get("enabled") and shards < 1:
        answers.problems.append(
            f"{MODEL}.tiled_mlp.num_shards={shards}: expected a number of 1 or more"
        )


def _look_at_lengths(config: Any, answers: Answers) -> None:
    """verl's agent loops read the lengths of the rollout, which follow those of the data."""
    for name in ("prompt_length", "response_length"):
        length = OmegaConf.select(config, f"{ROLLOUT}.{name}")
        of_data = config.data[f"max_{name}"]
        if type(length) is int and length != of_data:
            answers.warnings.append(
                f"{ROLLOUT}.{name}={length} with data.max_{name}={of_data}: the former counts for "
                "what is generated, and follows the latter if it is left out"
            )


def look_at_places(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare what Ray and TransferQueue are told with what verl asks of them."""
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from verl.single_controller.ray.base import ResourcePoolManager

    queue = config.get("transfer_queue")
    if queue is not None and config.trainer.get("use_v1", False):
        name = str(queue.backend.storage_backend)
        if StorageBootstrapProvider.get_provider(name) is None and name not in queue.backend:
            known = sorted(str(key) for key in queue.backend if key != "storage_backend")
            answers.problems.append(
                f"transfer_queue.backend.storage_backend={name}: no such name{hint(name, known)}"
            )
    # A bundle of a GPU asks Ray for so many CPUs; verl waits for ever for one that cannot be.
    for_gpu = ResourcePoolManager.__dataclass_fields__["max_colocate_count"].default
    needed = for_gpu * config.trainer.n_gpus_per_node
    cpus = OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus")
    if type(cpus) is int and cpus < needed:
        answers.problems.append(
            f"ray_kwargs.ray_init.num_cpus={cpus}: verl asks Ray for {for_gpu} CPUs for each of "
            f"{config.trainer.n_gpus_per_node} GPUs, and would wait for ever. Set {needed + 1} or "
            "more"
        )
    for key, role in ((ACTOR, roles.actor), ("critic", roles.critic)):
        saves_later = role is not None and role.checkpoint.get("async_save", False)
        if saves_later and "FSDP" in type(role.engine).__name__:
            # PPOTrainer._save_checkpoint leaves out latest_checkpointed_iteration.txt
            answers.warnings.append(
                f"{key}.checkpoint.async_save=True with strategy={role.strategy}: only Megatron "
                "saves so, and verl would not note which checkpoint is the newest, so that "
                "trainer.resume_mode=auto finds none. Set it to False"
            )


def _look_at_sampling(config: Any, answers: Answers) -> None:
    """vllm.sampling_params.SamplingParams._verify_args; SGLang's SamplingParams.verify is alike."""
    for block in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        top_k = OmegaConf.select(config, f"{block}.top_k")
        if type(top_k) is int and top_k < -1:
            answers.problems.append(
                f"{block}.top_k={top_k}: expected -1 for all tokens, or a number of 1 or more"
            )
        temperature = OmegaConf.select(config, f"{block}.temperature")
        if type(temperature) in (int, float) and temperature < 0:
            answers.problems.append(f"{block}.temperature={temperature}: expected 0 or more")
    penalty = OmegaConf.select(config, f"{ROLLOUT}.repetition_penalty")
    if type(penalty) in (int, float) and penalty <= 0:
        answers.problems.append(f"{ROLLOUT}.repetition_penalty={penalty}: expected more than 0")


def _look_at_clipping(config: Any, roles: Roles, answers: Answers) -> None:
    """torch scales each gradient by grad_clip / norm, so 0 leaves nothing of it."""
    for key, role in ((f"{ACTOR}.grad_clip", roles.actor), ("critic.grad_clip", roles.critic)):
        if role is None or "FSDP" not in type(role.engine).__name__:
            continue
        clip = OmegaConf.select(config, key)
        if type(clip) in (int, float) and clip <= 0:
            answers.problems.append(
                f"{key}={clip}: each gradient would be scaled to {clip}, so nothing would be "
                "trained; expected more than 0"
            )


def look_at_precision(config: Any, roles: Roles, answers: Answers) -> None:
    """Ask verl for the number types of the FSDP engines, as `FSDPEngine._build_module` does."""
    from verl.utils.torch_dtypes import PrecisionType

    for key, role in roles.with_engines():
        engine = role.engine
        if "FSDP" not in type(engine).__name__:
            continue
        prefix = f"{key}.fsdp" if key == "critic" else f"{key}.fsdp_config"
        types = {"model_dtype": engine.model_dtype, "dtype": engine.dtype}
        mixed = engine.mixed_precision or {}
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            types[f"mixed_precision.{name}"] = mixed.get(name)
        for name, value in types.items():
            if value is not None:
                remedy = "Set bfloat16, float16 or float32"
                where = f"{prefix}.{name}={value}"
                answers.ask(where, PrecisionType.to_dtype, value, remedy=remedy)


def look_at_adapter(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the settings of a LoRA adapter with the engine that reads them."""
    model = config.actor_rollout_ref.model
    rank, of_megatron = model.get("lora_rank", 0), (model.get("lora") or {}).get("rank", 0)
    if rank < 0:
        answers.problems.append(
            f"{MODEL}.lora_rank={rank}: expected 0 for no adapter, or a number of 1 or more"
        )
    is_fsdp = roles.actor is not None and "FSDP" in type(roles.actor.engine).__name__
    if is_fsdp and of_megatron > 0 and rank <= 0:
        # FSDPEngine reads lora_rank alone, and the trainer takes the actor for the reference
        answers.problems.append(
            f"{MODEL}.lora.rank={of_megatron} with {ACTOR}.strategy={roles.actor.strategy}: only "
            f"Megatron reads it, so no adapter would be trained. Set "
            f"{MODEL}.lora_rank={of_megatron}"
        )
    merges = (model.get("lora") or {}).get("merge", False)
    is_vllm = config.actor_rollout_ref.rollout.name == "vllm"
    if is_vllm and not merges and lora_rank(config) > HIGHEST_RANK:
        answers.problems.append(
            f"{MODEL}.lora_rank={lora_rank(config)}: vLLM takes adapters up to rank {HIGHEST_RANK}"
        )
