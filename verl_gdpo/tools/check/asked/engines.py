"""The names and numbers that the engines of training and rollout take.

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
    engine_key,
    lora_rank,
)
from verl_gdpo.tools.check.verl_questions import STRATEGIES, trains_critic
from verl_gdpo.tools.run.attention import AUTO, SDPA
from verl_gdpo.tools.run.precision import BFLOAT16, NO_FAST_BFLOAT16, has_fast_bfloat16

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
# how the engines call the length of a model
LENGTHS = {"vllm": "max_model_len", "sglang": "context_length"}
# verl.checkpoint_engine: what its modules register. One whose package is not here does not.
CHECKPOINT_ENGINES = ("naive", "nccl", "nixl", "kimi_ckpt_engine", "mooncake", "delta_sharded")
# verl.utils.checkpoint.checkpoint_manager.BaseCheckpointManager.should_save_model and its siblings
CONTENTS = ("model", "optimizer", "extra", "hf_model")
# what FSDPCheckpointManager.load_checkpoint does not load where its name is missing
PARTS_OF_RUN = {
    "model": "the weights",
    "optimizer": "its moments",
    "extra": "the schedule of the learning rate, the random numbers",
}
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
# verl.workers.rollout.vllm_rollout.utils.get_vllm_max_lora_rank, which needs vLLM to be imported
HIGHEST_RANK = 512
AT_LEAST_1 = (
    f"{ROLLOUT}.agent.num_workers",  # verl.trainer.ppo.v1.agent_loop_tq: a batch for each of them
    f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.max_num_batched_tokens",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{ROLLOUT}.multi_turn.max_parallel_calls",
    f"{ROLLOUT}.multi_turn.max_tool_response_length",
    "reward.sandbox_fusion.max_concurrent",  # of a semaphore, at which 0 waits for ever
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
    "data.filter_overlong_prompts_workers",  # datasets.Dataset.filter, its num_proc
)
AT_LEAST_0 = ("algorithm.kl_ctrl.kl_coef", "critic.cliprange_value")
SHARES = ("algorithm.gamma", "algorithm.lam")
QUEUE = "transfer_queue.backend"
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


def look_at_numbers(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare numbers with what engines take, and with each other."""
    for key in AT_LEAST_1:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and value < 1:
            answers.problems.append(f"{key}={value}: expected a number of 1 or more")
    for key in AT_LEAST_0:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and value < 0:
            answers.problems.append(f"{key}={value}: expected a number of 0 or more")
    for key in SHARES:
        value = OmegaConf.select(config, key)
        if type(value) in (int, float) and not 0 <= value <= 1:
            answers.problems.append(f"{key}={value}: expected a number from 0 to 1")
    _look_at_lengths(config, answers)
    _look_at_sampling(config, answers)
    _look_at_clipping(roles, answers)
    _look_at_clipped_ratios(config, answers)
    _look_at_filter(config, answers)
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    lengths = {f"{ROLLOUT}.max_model_len": rollout.get("max_model_len")}
    if rollout.name in LENGTHS:
        key = f"{ROLLOUT}.engine_kwargs.{rollout.name}.{LENGTHS[rollout.name]}"
        lengths[key] = OmegaConf.select(config, key)
    for key, length in lengths.items():
        if length is None or length >= longest:
            continue
        # vLLM and SGLang end a response where the length of the model ends, and take no longer
        # prompt: verl's servers give them max_model_len - prompt at most.
        answers.problems.append(
            f"{key}={length}: a prompt and its response may have {longest} "
            f"tokens (data.max_prompt_length={config.data.max_prompt_length} and "
            f"data.max_response_length={config.data.max_response_length}). Raise it, leave it "
            "out, or shorten the rows"
        )
    _look_at_batches_of_vllm(config, answers)
    _look_at_copies_of_sglang(config, answers)
    _look_at_steps_to_profile(config, answers)
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


def _look_at_batches_of_vllm(config: Any, answers: Answers) -> None:
    """See vllm.config.scheduler.SchedulerConfig.verify_max_model_len."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    tokens = rollout.max_num_batched_tokens
    if tokens < rollout.max_num_seqs:
        answers.problems.append(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} with {ROLLOUT}.max_num_seqs="
            f"{rollout.max_num_seqs}: vLLM needs a token for each sequence. Raise the former"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    longest = rollout.get("max_model_len") or longest
    if not rollout.enable_chunked_prefill and tokens < longest:
        answers.problems.append(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} with {ROLLOUT}.enable_chunked_prefill="
            f"False: vLLM has to take a whole prompt at once, of up to {longest} tokens. Raise it, "
            "or set enable_chunked_prefill=True"
        )


def _look_at_copies_of_sglang(config: Any, answers: Answers) -> None:
    """SGLang takes new weights in copies of the model only where they share the attention."""
    rollout = config.actor_rollout_ref.rollout
    copies = rollout.data_parallel_size
    key = f"{ROLLOUT}.engine_kwargs.sglang.enable_dp_attention"
    if rollout.name == "sglang" and copies > 1 and not OmegaConf.select(config, key):
        answers.problems.append(
            f"{ROLLOUT}.data_parallel_size={copies} with {ROLLOUT}.name=sglang: its weights could "
            f"not be updated. Set +{key}=True, or data_parallel_size=1: verl starts as many "
            "servers as fit on the GPUs"
        )


def _look_at_filter(config: Any, answers: Answers) -> None:
    """verl.trainer.ppo.v1.replay_buffer.ReplayBuffer drops groups whose responses are all alike."""
    groups = config.algorithm.get("filter_groups") or {}
    n = config.actor_rollout_ref.rollout.n
    if groups.get("enable") and config.trainer.get("use_v1", False) and n == 1:
        answers.problems.append(
            f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1: a group of one response is "
            "always dropped, so the run would generate for ever"
        )


def _look_at_steps_to_profile(config: Any, answers: Answers) -> None:
    """PPOTrainer.fit looks for each step in the list."""
    steps = config.global_profiler.get("steps")
    if steps is not None and not isinstance(steps, ListConfig):
        answers.problems.append(
            f"global_profiler.steps={steps}: expected a list of steps, as in [{steps}]"
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


def look_at_saving(config: Any, roles: Roles, answers: Answers) -> None:
    """Say what a run would save, or write down, in another way than it is set."""
    for key, role in ((ACTOR, roles.actor), ("critic", roles.critic)):
        if role is None:
            continue
        _look_at_contents(key, role, config.trainer, answers)
        saves_later = role.checkpoint.get("async_save", False)
        if saves_later and "FSDP" in type(role.engine).__name__:
            # PPOTrainer._save_checkpoint leaves out latest_checkpointed_iteration.txt
            answers.warnings.append(
                f"{key}.checkpoint.async_save=True with strategy={role.strategy}: only Megatron "
                "saves so, and verl would not note which checkpoint is the newest, so that "
                "trainer.resume_mode=auto finds none. Set it to False"
            )


def _look_at_contents(key: str, role: Any, trainer: Any, answers: Answers) -> None:
    """Say what a resumed run would not load; it goes on at the step of its checkpoint.

    MegatronCheckpointManager.load_checkpoint takes the weights of `hf_model` too.
    """
    saves = trainer.save_freq > 0
    goes_on_with_its_own = saves and trainer.resume_mode == "auto"
    if not goes_on_with_its_own and trainer.resume_mode != "resume_path":
        return
    engine = type(role.engine).__name__
    saved = list(role.checkpoint.save_contents)
    loaded = list(role.checkpoint.load_contents)
    missing = []
    if "FSDP" in engine:
        missing = [part for part in PARTS_OF_RUN if part not in loaded]
    elif "Mcore" in engine and "model" not in loaded and "hf_model" not in loaded:
        missing = ["model"]
    named = ", ".join(f"{part} ({PARTS_OF_RUN[part]})" for part in missing)
    remedy = f"Put them into {key}.checkpoint.save_contents, which load_contents follows"
    model = MODEL if key == ACTOR else f"{key}.model"
    if "model" in missing:
        answers.warnings.append(
            f"{key}.checkpoint.load_contents={loaded}: a run that is resumed loads nothing for "
            f"{named}, so it would go on at the step of the checkpoint with the weights of "
            f"{model}.path. {remedy}"
        )
    elif missing:
        answers.notes.append(
            f"{key}.checkpoint.load_contents={loaded}: a run that is resumed goes on with the "
            f"saved weights, and begins anew with {named}. {remedy}, if that matters"
        )
    unsaved = [part for part in PARTS_OF_RUN if part in loaded and part not in saved]
    if "FSDP" in engine and goes_on_with_its_own and unsaved:
        answers.warnings.append(
            f"{key}.checkpoint.load_contents has {', '.join(unsaved)}, which "
            f"{key}.checkpoint.save_contents={saved} does not save, so a run that is resumed would "
            "end at the missing file. Give both the same contents"
        )


def look_at_queue(config: Any, answers: Answers) -> None:
    """Ask TransferQueue for its storage, and compare its size with a step of the run."""
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

    queue = config.get("transfer_queue")
    if queue is None or not config.trainer.get("use_v1", False):
        return
    name = str(queue.backend.storage_backend)
    if StorageBootstrapProvider.get_provider(name) is None and name not in queue.backend:
        known = sorted(str(key) for key in queue.backend if key != "storage_backend")
        answers.problems.append(f"{QUEUE}.storage_backend={name}: no such name{hint(name, known)}")
    size = OmegaConf.select(config, f"{QUEUE}.SimpleStorage.total_storage_size")
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if name == "SimpleStorage" and type(size) is int and size < samples:
        # transfer_queue.storage.simple_storage.StorageUnitData raises 'Storage capacity exceeded'
        answers.problems.append(
            f"{QUEUE}.SimpleStorage.total_storage_size={size}: a step has {samples} samples, which "
            "it has to hold at once. Raise it"
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


def _look_at_clipping(roles: Roles, answers: Answers) -> None:
    """torch scales each gradient by clip_grad / norm, so 0 leaves nothing of it."""
    for key, role in ((ACTOR, roles.actor), ("critic", roles.critic)):
        if role is None or "FSDP" not in type(role.engine).__name__:
            continue
        clip = role.optim.clip_grad
        if clip is None or clip <= 0:
            answers.problems.append(
                f"{key}.optim.clip_grad={clip}: each gradient would be scaled to {clip}, so "
                "nothing would be trained; expected more than 0"
            )


def _look_at_clipped_ratios(config: Any, answers: Answers) -> None:
    """verl.trainer.ppo.core_algos clips ratios to 1 - low and 1 + high."""
    actor = config.actor_rollout_ref.actor
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        value = actor.get(name)
        # CISPO, for one, is trained with bounds of 4 or more.
        is_usual_loss = actor.policy_loss.loss_mode in ("vanilla", "gspo")
        if is_usual_loss and type(value) in (int, float) and value >= 1:
            answers.warnings.append(
                f"{ACTOR}.{name}={value}: ratios are clipped at 1 - this and 1 + this, so that "
                "hardly any would be; verl's default is 0.2"
            )
    if actor.policy_loss.loss_mode != "clip_cov":
        return
    # compute_policy_loss_clip_cov takes tokens whose covariance is between the two.
    low = actor.policy_loss.clip_cov_lb
    high = actor.policy_loss.clip_cov_ub
    if low is not None and high is not None and low >= high:
        answers.problems.append(
            f"{ACTOR}.policy_loss.clip_cov_lb={low} with {ACTOR}.policy_loss.clip_cov_ub={high}: "
            "no token is between them, so nothing would be clipped. Exchange them"
        )


def look_at_precision(config: Any, roles: Roles, answers: Answers) -> None:
    """Ask verl for the number types of the FSDP engines, as `FSDPEngine._build_module` does."""
    from verl.utils.torch_dtypes import PrecisionType

    for key, role in roles.with_engines():
        engine = role.engine
        if "FSDP" not in type(engine).__name__:
            continue
        prefix = engine_key(key)
        types = {"model_dtype": engine.model_dtype, "dtype": engine.dtype}
        mixed = engine.mixed_precision or {}
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            types[f"mixed_precision.{name}"] = mixed.get(name)
        for name, value in types.items():
            if value is not None:
                remedy = "Set bfloat16, float16 or float32"
                where = f"{prefix}.{name}={value}"
                answers.ask(where, PrecisionType.to_dtype, value, remedy=remedy)


def look_at_processor(config: Any, roles: Roles, answers: Answers) -> None:
    """Name what this processor would compute in bfloat16, if it can only do so in a plain loop.

    FSDP computes in `mixed_precision.param_dtype`, which is bfloat16 where nothing is said
    (`FSDPEngine._build_fsdp_module`).
    """
    if config.trainer.device != "cpu" or answers.is_elsewhere or has_fast_bfloat16():
        return
    rollout = config.actor_rollout_ref.rollout
    computed = {}
    if rollout.name == "hf":
        computed[f"{ROLLOUT}.dtype"] = rollout.dtype
    for key, role in roles.with_engines():
        if "FSDP" in type(role.engine).__name__:
            mixed = role.engine.mixed_precision or {}
            where = f"{engine_key(key)}.mixed_precision.param_dtype"
            computed[where] = mixed.get("param_dtype", "bf16")
    for where, value in computed.items():
        if value in BFLOAT16:
            answers.warnings.append(f"{where}={value}: {NO_FAST_BFLOAT16}. Set float32")


def look_at_fsdp(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare settings of FSDP that exclude or need each other."""
    for key, role in roles.with_engines():
        engine = role.engine
        if "FSDP" not in type(engine).__name__:
            continue
        model_key = "critic.model" if key == "critic" else MODEL
        packs = OmegaConf.select(config, f"{model_key}.use_remove_padding")
        split = engine.ulysses_sequence_parallel_size
        if split > 1 and not packs:
            # verl.workers.engine.fsdp.transformer_impl.FSDPEngine.__init__
            answers.problems.append(
                f"{engine_key(key)}.ulysses_sequence_parallel_size={split} with "
                f"{model_key}.use_remove_padding=False: verl needs True for it"
            )
        if engine.qat.enable:
            answers.ask(f"{engine_key(key)}.qat", _read_quantization, engine.qat)
    actor = config.actor_rollout_ref.actor
    if actor.get("calculate_sum_pi_squared") and config.actor_rollout_ref.model.use_fused_kernels:
        # FSDPEngineWithLMHead.prepare_model_outputs, and Megatron's
        answers.problems.append(
            f"{ACTOR}.calculate_sum_pi_squared=True with {MODEL}.use_fused_kernels=True: the fused "
            "kernels do not make the probabilities of all tokens. Set one of them to False"
        )


def _read_quantization(settings: Any) -> None:
    from verl.utils.qat.core import QATConfig, load_quantization_config

    names = QATConfig.__dataclass_fields__
    load_quantization_config(QATConfig(**{name: settings[name] for name in names}))


def look_at_adapter(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the settings of a LoRA adapter with the engine that reads them."""
    model = config.actor_rollout_ref.model
    rank = model.get("lora_rank", 0)
    of_megatron = (model.get("lora") or {}).get("rank", 0)
    if rank < 0:
        answers.problems.append(
            f"{MODEL}.lora_rank={rank}: expected 0 for no adapter, or a number of 1 or more"
        )
    if rank > 0 and model.lora_alpha <= 0:
        # peft multiplies what the adapter adds by lora_alpha / lora_rank.
        answers.problems.append(
            f"{MODEL}.lora_alpha={model.lora_alpha}: the adapter would add nothing; expected a "
            "number of 1 or more"
        )
    is_fsdp = roles.actor is not None and "FSDP" in type(roles.actor.engine).__name__
    if is_fsdp and of_megatron > 0 and rank <= 0:
        # FSDPEngine reads lora_rank alone, and the trainer takes the actor for the reference
        answers.problems.append(
            f"{MODEL}.lora.rank={of_megatron} with {ACTOR}.strategy={roles.actor.strategy}: only "
            f"Megatron reads it, so no adapter would be trained. Set "
            f"{MODEL}.lora_rank={of_megatron}"
        )
    if is_fsdp and model.get("lora_adapter_path") and rank <= 0:
        # FSDPEngine._is_lora reads lora_rank alone, and the trainer looks at the path too
        answers.problems.append(
            f"{MODEL}.lora_adapter_path={model.lora_adapter_path} with {MODEL}.lora_rank={rank}: "
            "verl would load no adapter. Set lora_rank to the rank of the adapter"
        )
    merges = (model.get("lora") or {}).get("merge", False)
    is_vllm = config.actor_rollout_ref.rollout.name == "vllm"
    if is_vllm and not merges and lora_rank(config) > HIGHEST_RANK:
        answers.problems.append(
            f"{MODEL}.lora_rank={lora_rank(config)}: vLLM takes adapters up to rank {HIGHEST_RANK}"
        )
