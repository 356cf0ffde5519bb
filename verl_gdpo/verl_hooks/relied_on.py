"""Lists what our parts use of verl, and finds what the installed verl lacks.

A part is not loaded if something that it uses is missing, and gdpo is refused then. What verl sets
in a constructor cannot be looked up here; the docstrings of the parts name it.
"""

import importlib
import inspect
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

V1 = "verl.trainer.ppo.v1"
LEGACY = "verl.trainer.ppo.ray_trainer"
MANAGER = "verl.experimental.reward_loop.reward_manager"

# {file of `verl_hooks`: MODULE:SYMBOL or MODULE:SYMBOL(PARAMETERS) that it uses}
RELIED_ON = MappingProxyType(
    {
        "agent_loop": (
            "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score(outputs)",
            "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess(inputs)",
        ),
        "legacy_batch:extend_reward": ("verl.trainer.ppo.reward:extract_reward(batch)",),
        "reward_manager": (
            f"{MANAGER}.registry:REWARD_MANAGER",
            f"{MANAGER}.base:RewardManagerBase(config, tokenizer, compute_score)",
            f"{MANAGER}.base:RewardManagerBase.run_single(data)",
        ),
        "legacy_batch:extend_metrics": (
            "verl.trainer.ppo.metric_utils:compute_data_metrics(batch)",
            "verl.trainer.ppo.metric_utils:process_validation_metrics"
            "(data_sources, sample_uids, infos_dict)",
        ),
        "legacy_trainer": (
            f"{LEGACY}:RayPPOTrainer._create_dataloader",
            f"{LEGACY}:RayPPOTrainer.init_workers",
            f"{LEGACY}:RayPPOTrainer.fit",
            f"{LEGACY}:RayPPOTrainer._get_gen_batch(batch)",
            f"{LEGACY}:RayPPOTrainer._log_rollout_data(batch, reward_extra_infos_dict)",
            f"{LEGACY}:RayPPOTrainer._dump_generations(reward_extra_infos_dict)",
            f"{LEGACY}:RayPPOTrainer._val_metrics_update",
            f"{LEGACY}:compute_advantage(data, adv_estimator, config)",
            "verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY",
            "verl.trainer.ppo.reward:resolve_reward_manager_cls(config)",
        ),
        "v1_trainer": (
            f"{V1}.trainer_base:compute_advantage_for_multi_trajectories(data)",
            f"{V1}.utils:compute_advantage(data)",
            f"{V1}.trainer_base:PPOTrainer(config)",
            f"{V1}.trainer_base:PPOTrainer._init_dataloader",
            f"{V1}.trainer_base:PPOTrainer._setup",
            f"{V1}.trainer_base:PPOTrainer.fit(agent_loop_manager)",
            f"{V1}.trainer_base:PPOTrainer._build_replay_buffer",
            f"{V1}.trainer_base:PPOTrainer._load_checkpoint",
            f"{V1}.trainer_base:PPOTrainer._compute_advantage(batch, metrics)",
            f"{V1}.trainer_base:PPOTrainer._log_rollout_data",
            f"{V1}.trainer_base:PPOTrainer._dump_generations(reward_extra_infos_dict)",
            f"{V1}.trainer_base:PPOTrainer._val_metrics_update",
            f"{V1}.replay_buffer:ReplayBuffer.sample",
            f"{V1}.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",
            f"{V1}.replay_buffer:ReplayBuffer._select_prompt_uids",
            f"{V1}.replay_buffer:ReplayBuffer._materialize_batch",
            f"{V1}.replay_buffer:ReplayBuffer._clear_groups",
            f"{V1}.replay_buffer:ReplayBuffer._terminal_eviction_reasons",
            f"{V1}.replay_buffer:ReplayBuffer._sampleable_terminal_keys",
            f"{V1}.replay_buffer:ReplayBuffer._dapo_filtered_keys(partition_id)",
            "verl.trainer.ppo.core_algos:ADV_ESTIMATOR_REGISTRY",
            "verl.trainer.ppo.reward:resolve_reward_manager_cls(config)",
        ),
        "driver:extend_device": ("verl.utils.device:auto_set_device(config)",),
        "hang": ("verl.utils.debug:marked_timer(name, timing_raw)",),
        "driver:extend_main_ppo": ("verl.trainer.main_ppo:run_ppo(config)",),
        "fused_kernels": ("verl.utils.fsdp_utils:_select_fsdp2_wrap_targets(model)",),
        "for_check": (
            "verl.utils.config:validate_config(config)",
            "verl.trainer.ppo.utils:need_reference_policy(config)",
            "verl.trainer.ppo.utils:need_critic(config)",
            "verl.trainer.ppo.reward:load_reward_manager(config, tokenizer)",
            "verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY",
            "verl.trainer.ppo.core_algos:kl_penalty",
            "verl.workers.rollout.replica:RolloutReplicaRegistry._registry",
            "verl.experimental.agent_loop.agent_loop:_agent_loop_registry",
            "verl.utils.tracking:Tracking.supported_backend",
            "verl.utils.dataset.rl_dataset:get_dataset_class",
        ),
    }
)


def missing(symbols: Iterable[str]) -> list[str]:
    """Return those of the symbols that verl lacks, or that lack a parameter."""
    return [symbol for symbol in symbols if not _exists(symbol)]


def _exists(symbol: str) -> bool:
    path, _, parameters = symbol.removesuffix(")").partition("(")
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return False
    return not parameters or {*parameters.split(", ")} <= {*inspect.signature(value).parameters}
