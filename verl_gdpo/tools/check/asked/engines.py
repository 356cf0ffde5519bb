"""What a run would save, and whether its engines, its queue and its adapter can be made as set."""

from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Roles,
    engine_key,
    lora_rank,
)
from verl_gdpo.tools.run.precision import BFLOAT16, NO_FAST_BFLOAT16, has_fast_bfloat16

# what FSDPCheckpointManager.load_checkpoint does not load where its name is missing
PARTS_OF_RUN = {
    "model": "the weights",
    "optimizer": "its moments",
    "extra": "the schedule of the learning rate, the random numbers",
}
# verl.workers.rollout.vllm_rollout.utils.get_vllm_max_lora_rank, which needs vLLM to be imported
HIGHEST_RANK = 512
QUEUE = "transfer_queue.backend"


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
