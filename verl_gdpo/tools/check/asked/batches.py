"""Whether the batches of a step can be divided: by GPUs, sequence parallelism and micro-batches."""

import math
from typing import Any

import torch

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, REF, ROLLOUT, Roles, engine_key
from verl_gdpo.tools.check.verl_questions import VERSION


def look_at_batches(config: Any, roles: Roles, answers: Answers) -> None:
    """Ask how the samples of a step, and those of a mini-batch, are divided."""
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for key, role in roles.with_engines():
        _look_at_mesh(key, role.engine, gpus, answers)
    _look_at_budgets(config, roles, answers)
    step = _samples_of_step(config, roles, gpus)
    if roles.actor is not None:
        _divide_for_actor(config, roles.actor, step, gpus, answers)
    ref, critic = roles.ref, roles.critic
    if ref is not None and not ref.use_dynamic_bsz:
        key = f"{REF}.log_prob_micro_batch_size_per_gpu"
        parts = _data_parallel_size(ref.engine, gpus)
        what = "the reference's probabilities in a step"
        _divide(key, ref.ppo_micro_batch_size_per_gpu, step, parts, what, answers)
    if critic is not None:
        _divide_for_critic(config, critic, gpus, answers)


def _divide_for_actor(config: Any, actor: Any, step: int, gpus: int, answers: Answers) -> None:
    rollout = config.actor_rollout_ref.rollout
    parts = _data_parallel_size(actor.engine, gpus)
    if not actor.use_dynamic_bsz:
        key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        samples = actor.ppo_mini_batch_size * rollout.n
        what = "an update of the policy"
        _divide(key, actor.ppo_micro_batch_size_per_gpu, samples, parts, what, answers)
    if not rollout.log_prob_use_dynamic_bsz and not _skips_old_probabilities(config):
        key = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        what = "the policy's probabilities in a step"
        _divide(key, rollout.log_prob_micro_batch_size_per_gpu, step, parts, what, answers)


def _divide_for_critic(config: Any, critic: Any, gpus: int, answers: Answers) -> None:
    """Nobody hands the critic's micro-batches to its engine, which cuts its batches by tokens.

    verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup sets two numbers of tokens of the engine, and
    leaves `EngineConfig.use_dynamic_bsz` at True.
    """
    parts = _data_parallel_size(critic.engine, gpus)
    samples = critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if parts is None:
        return
    if samples % parts:
        # verl.workers.engine_workers.TrainingWorker.train_mini_batch
        answers.problems.append(
            f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} with {ROLLOUT}.n="
            f"{config.actor_rollout_ref.rollout.n}: {samples} samples cannot be shared equally by "
            f"{parts} GPUs"
        )
        return
    size = critic.ppo_micro_batch_size_per_gpu
    if not critic.use_dynamic_bsz and size is not None and (samples // parts) % max(size, 1):
        answers.warnings.append(
            f"critic.ppo_micro_batch_size_per_gpu={size}: each GPU has {samples // parts} samples "
            f"in an update of the critic, which is no multiple of that. verl {VERSION} does not "
            "read it, and cuts the critic's batches by critic.ppo_infer_max_token_len_per_gpu"
        )


def _skips_old_probabilities(config: Any) -> bool:
    """Whether the rollout's probabilities are taken, see `PPOTrainer._compute_old_log_prob`."""
    correction = config.algorithm.get("rollout_correction") or {}
    return bool(correction.get("bypass_mode", False))


def _data_parallel_size(engine: Any, gpus: int) -> int | None:
    """Return by how many a batch is divided among the GPUs; None if that is not known here.

    As `get_data_parallel_size` of verl's engines: FSDPEngine, and Megatron's own division.
    """
    if "FSDP" in type(engine).__name__:
        return max(int(gpus // engine.ulysses_sequence_parallel_size), 1)
    if "Mcore" in type(engine).__name__:
        parts = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
        return max(int(gpus // (parts * engine.context_parallel_size)), 1)
    return None


def _look_at_mesh(key: str, engine: Any, gpus: int, answers: Answers) -> None:
    """Ask whether the GPUs make whole groups.

    verl.workers.engine.fsdp.transformer_impl.FSDPEngine._init_device_mesh makes meshes of
    (gpus // size, size). GPUs that are left over are in no mesh, and torch ends the run there.
    """
    if "Mcore" in type(engine).__name__:
        _look_at_experts(key, engine, gpus, answers)
    if "FSDP" not in type(engine).__name__:
        return
    prefix = engine_key(key)
    split = engine.ulysses_sequence_parallel_size
    if gpus % split:
        answers.problems.append(
            f"{prefix}.ulysses_sequence_parallel_size={split}: the run has {gpus} GPUs, which is "
            f"no multiple of that. Set a divisor of {gpus} (also as "
            f"{key}.ulysses_sequence_parallel_size)"
        )
    size = engine.fsdp_size
    if 0 <= size < gpus and (size == 0 or gpus % size):
        answers.problems.append(
            f"{prefix}.fsdp_size={size}: the run has {gpus} GPUs, which is no multiple of that. "
            f"Set a divisor of {gpus}, or -1 for all GPUs"
        )


def _look_at_experts(key: str, engine: Any, gpus: int, answers: Answers) -> None:
    """megatron.core.parallel_state.initialize_model_parallel asks for whole groups of experts.

    What it takes where `expert_tensor_parallel_size` is null is its own affair: at least 1.
    """
    tensor = engine.expert_tensor_parallel_size or 1
    experts = engine.expert_model_parallel_size
    for_one = tensor * experts * engine.pipeline_model_parallel_size
    if gpus % for_one:
        answers.problems.append(
            f"{key}.megatron.expert_model_parallel_size={experts}: with its tensor and pipeline "
            f"parallelism, experts take {for_one} GPUs, and the run has {gpus}, which is no "
            "multiple of that"
        )


def _samples_of_step(config: Any, roles: Roles, gpus: int) -> int:
    """Return the samples of one update, with those with which a V1 trainer fills the batch up.

    As verl.trainer.ppo.v1.trainer_base.PPOTrainer._get_required_batch_multiple.
    """
    n = int(config.actor_rollout_ref.rollout.n)
    samples = int(config.data.train_batch_size * n)
    if not config.trainer.get("use_v1", False):
        return samples
    mode = config.trainer.v1.trainer_mode
    samples //= (config.trainer.v1.get(mode) or {}).get("parameter_sync_step", 1)
    multiples = [config.actor_rollout_ref.actor.ppo_mini_batch_size * n]
    if roles.actor is not None:
        multiples.append(_data_parallel_size(roles.actor.engine, gpus) or 1)
    if roles.critic is not None:
        multiples.append(roles.critic.ppo_mini_batch_size * n)
    multiple = math.lcm(*multiples)
    return int(math.ceil(samples / multiple) * multiple)


def _divide(
    key: str, size: int | None, samples: int, parts: int | None, what: str, answers: Answers
) -> None:
    """Let verl cut one GPU's share of some samples into micro-batches of a size.

    Args:
        parts: by how many the samples are divided; None if that is not known.
    """
    if size is None or parts is None or samples % parts:
        return  # Other problems say so.
    share = samples // parts
    if size < 1:
        answers.problems.append(f"{key}={size}: expected a number of 1 or more")
        return
    if _can_be_cut(share, size):
        return
    fitting = max(number for number in range(1, min(size, share) + 1) if share % number == 0)
    answers.problems.append(
        f"{key}={size}: for {what}, each GPU has {share} samples ({samples} / {parts}), which is "
        f"no multiple of that. Set {fitting}, or another divisor of {share}"
    )


def _can_be_cut(share: int, size: int) -> bool:
    """Ask verl's `prepare_micro_batches` on a smaller share with the same remainder."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.engine.utils import prepare_micro_batches

    rows = share if share < size else size + share % size
    batch = TensorDict({"row": torch.zeros(rows, 1)}, batch_size=rows)
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size}
    tensordict_utils.assign_non_tensor(batch, **settings)
    try:
        prepare_micro_batches(batch)
    except AssertionError:
        return False
    return True


def _look_at_budgets(config: Any, roles: Roles, answers: Answers) -> None:
    """Compare the tokens of a micro-batch with the longest row.

    verl.utils.seqlen_balancing.rearrange_micro_batches asks that of each batch, and
    `ActorRolloutRefWorker.init_model` asks for equal settings of actor and rollout.
    """
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    if roles.actor is not None and roles.actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        answers.problems.append(
            f"{ROLLOUT}.log_prob_use_dynamic_bsz={rollout.log_prob_use_dynamic_bsz} with "
            f"{ACTOR}.use_dynamic_bsz={roles.actor.use_dynamic_bsz}: verl asks for the same value "
            "of both, once the model is loaded. Leave the former out: it follows the latter"
        )
    budgets = []
    if roles.ref is not None and roles.ref.use_dynamic_bsz:
        tokens = roles.ref.ppo_max_token_len_per_gpu
        budgets.append((f"{REF}.log_prob_max_token_len_per_gpu", tokens, roles.ref.engine))
    if roles.critic is not None:
        tokens = roles.critic.ppo_infer_max_token_len_per_gpu
        key = "critic.ppo_infer_max_token_len_per_gpu"
        budgets.append((key, tokens, roles.critic.engine))
    for key, tokens, engine in budgets:
        split = getattr(engine, "ulysses_sequence_parallel_size", 1)
        if "FSDP" in type(engine).__name__ and tokens is not None and tokens * split < longest:
            answers.problems.append(
                f"{key}={tokens}: a micro-batch has to hold the longest row, which may have "
                f"{longest} tokens (data.max_prompt_length and data.max_response_length); verl "
                "stops at a row that is longer. Raise it, or shorten the rows"
            )


def look_at_parallelism_of_model(config: Any, roles: Roles, model: Any, answers: Answers) -> None:
    """Compare parallelism with the heads of a model whose config.json is here.

    Args:
        model: the transformers configuration of the policy.
    """
    heads = _heads(model)
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    # vLLM: ModelConfig.verify_with_parallel_config; SGLang asserts it in each attention layer.
    if heads is not None and heads[0] % tensor_parallel:
        answers.problems.append(
            f"{ROLLOUT}.tensor_model_parallel_size={tensor_parallel}: the model at {MODEL}.path "
            f"has {heads[0]} attention heads, which is no multiple of that. Set a divisor of "
            f"{heads[0]}"
        )
    for key, role in roles.with_engines():
        if key != "critic":  # It may have another model.
            look_at_heads(key, role, MODEL, model, answers)


def _heads(model: Any) -> tuple[int, int] | None:
    """Return a model's numbers of attention heads and of key-value heads; None without them."""
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    groups = getattr(text, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(groups, int):
        return heads, groups
    return None


def look_at_heads(key: str, role: Any, model_key: str, model: Any, answers: Answers) -> None:
    """Compare the parallelism of a role's engine with the heads of its model.

    Args:
        model_key: of the model's block.
        model: its transformers configuration.
    """
    numbers = _heads(model)
    if numbers is None:
        return
    heads, groups = numbers
    have = f"the model at {model_key}.path has {heads} attention heads"
    engine = role.engine
    if "FSDP" in type(engine).__name__:
        split = engine.ulysses_sequence_parallel_size
        # verl.models.transformers.monkey_patch.apply_monkey_patch
        if heads % split or (groups % split and split % groups):
            answers.problems.append(
                f"{engine_key(key)}.ulysses_sequence_parallel_size={split}: {have} and "
                f"{groups} key-value heads; expected a divisor of {heads} that divides "
                f"{groups} too, or is a multiple of it"
            )
    elif "Mcore" in type(engine).__name__:
        split = engine.tensor_model_parallel_size
        # megatron.core.transformer.TransformerConfig.__post_init__
        if heads % split:
            answers.problems.append(
                f"{key}.megatron.tensor_model_parallel_size={split}: {have}, which is no "
                f"multiple of that. Set a divisor of {heads}"
            )
