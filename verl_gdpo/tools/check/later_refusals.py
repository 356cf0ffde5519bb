"""What verl refuses late: in a worker, after the model was loaded, or at the first step.

The rules are those of verl 0.9: `ActorRolloutRefWorker.init_model`, `train_mini_batch`,
`EngineRegistry`, `build_optimizer`, `copy_to_local`, `PPOTrainer._load_checkpoint`, and the names
that `verl_hooks/for_check.py` looks up.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_gdpo.settings.algorithm import hint

NAMED = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "trainer.logger",
)
OLD_KEYS = ("custom_reward_function", "reward_model", "sandbox_fusion")


def what_verl_refuses(config: Any, _environment: str) -> list[str]:
    """What verl refuses later than at its start: one sentence for each reason."""
    return [
        *_unknown_names(config),
        *_keys_without_a_reader(config),
        *_sizes_that_do_not_divide(config),
        *_values_out_of_range(config),
        *_paths_that_verl_cannot_take(config),
    ]


def _unknown_names(config: Any) -> Iterator[str]:
    from verl_gdpo.verl_hooks.for_check import known_names, knows_kl_penalty

    for key in NAMED:
        value = OmegaConf.select(config, key)
        if key.endswith("agent_loop") and config.actor_rollout_ref.rollout.agent.get(
            "agent_loop_config_path"
        ):
            continue  # that file names more
        for name in map(str, value if isinstance(value, ListConfig) else [value]):
            if name not in (known := known_names(key)):
                yield f"{key}={name}: unknown to verl{hint(name, known)}"
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    kinds = {}
    if actor.use_kl_loss:
        kinds["actor_rollout_ref.actor.kl_loss_type"] = actor.kl_loss_type
    if algorithm.use_kl_in_reward:
        kinds["algorithm.kl_penalty"] = algorithm.kl_penalty
    for key, name in kinds.items():
        if not knows_kl_penalty(name):
            yield f"{key}={name}: unknown to verl; it knows kl, abs, mse, low_var_kl"
    yield from _unknown_engines(actor)
    mode = config.trainer.resume_mode
    if mode not in ("auto", "disable", "resume_path"):
        yield f"trainer.resume_mode={mode}: expected auto, disable or resume_path"


def _unknown_engines(actor: Any) -> Iterator[str]:
    if "fsdp_config" not in actor:
        return
    strategies = ("fsdp", "fsdp2", "fsdp_turbo")
    if actor.strategy not in strategies:
        guess = hint(actor.strategy, strategies)
        yield f"actor_rollout_ref.actor.strategy={actor.strategy}: unknown to verl{guess}"
    name, module = actor.optim.optimizer, actor.optim.optimizer_impl
    try:
        known = dir(importlib.import_module(module))
    except ImportError as error:
        yield f"actor_rollout_ref.actor.optim.optimizer_impl={module}: {error}"
    else:
        if name not in known:
            guess = hint(name, [one for one in known if one[0].isupper()])
            yield f"actor_rollout_ref.actor.optim.optimizer={name}: not in {module}{guess}"


def _keys_without_a_reader(config: Any) -> Iterator[str]:
    for block in OLD_KEYS:
        given = OmegaConf.to_container(config.get(block) or OmegaConf.create())
        assert isinstance(given, dict)
        for key, value in given.items():
            if value is not None and not isinstance(value, dict):
                yield (
                    f"{block}.{key!s}={value}: this verl does not read the key, and would train "
                    f"without it. Set {_new_key(block, str(key))}={value}"
                )


def _new_key(block: str, key: str) -> str:
    """The key that took the place of an old one, as in verl's `migrate_legacy_reward_impl`."""
    if (block, key) == ("reward_model", "reward_manager"):
        return "reward.reward_manager.name"
    if (block, key) == ("reward_model", "num_workers"):
        return "reward.num_workers"
    return f"reward.{block}.{key}"


def _sizes_that_do_not_divide(config: Any) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for_one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for_one *= rollout.pipeline_model_parallel_size
    if gpus % for_one:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}: an engine takes {for_one} GPUs, and the run "
            f"has {gpus}, which is no multiple of that"
        )
    if "fsdp_config" in actor:
        split = actor.ulysses_sequence_parallel_size
        ranks = max(gpus // max(split, actor.fsdp_config.ulysses_sequence_parallel_size), 1)
        samples = actor.ppo_mini_batch_size * rollout.n
        if samples % ranks:
            yield (
                f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} with "
                f"actor_rollout_ref.rollout.n={rollout.n}: {samples} samples cannot be shared "
                f"equally by {ranks} GPUs"
            )


def _values_out_of_range(config: Any) -> Iterator[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if not 0 < rollout.gpu_memory_utilization <= 1:
        yield (
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: "
            "expected a share of the GPU's memory, above 0 and at most 1"
        )
    if rollout.max_model_len and rollout.max_model_len <= data.max_prompt_length:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} leaves no token for "
            f"a response after data.max_prompt_length={data.max_prompt_length}"
        )
    actor = config.actor_rollout_ref.actor
    if actor.clip_ratio_c <= 1:
        yield f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c}: expected more than 1"
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        yield (
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz="
            f"{rollout.log_prob_use_dynamic_bsz}: verl expects the same as in "
            f"actor_rollout_ref.actor.use_dynamic_bsz={actor.use_dynamic_bsz}"
        )


def _paths_that_verl_cannot_take(config: Any) -> Iterator[str]:
    path = str(config.actor_rollout_ref.model.path)
    if path.endswith("/"):
        yield f"actor_rollout_ref.model.path={path}: verl refuses a path that ends in a slash"
    path = str(config.trainer.resume_from_path)
    if config.trainer.resume_mode == "resume_path":
        if "global_step_" not in path:
            yield (
                f"trainer.resume_mode=resume_path with trainer.resume_from_path={path}: expected "
                "a folder global_step_N of checkpoints"
            )
        elif not os.path.isdir(path):
            yield f"trainer.resume_from_path={path}: there is no such folder"
