"""Lists what our parts use of verl, and finds what the installed verl lacks.

A part is not loaded if something that it uses is missing, and gdpo is refused then. What verl sets
in a constructor cannot be looked up here; the docstrings of the parts name it.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

# {part, as in `EXTENDS`: places in verl, each with the NAMES or NAMES(PARAMETERS) that are used}; a
# place is MODULE or MODULE:CLASS, and alone has a dot
PARTS = {
    "agent_loop": """
        experimental.agent_loop.agent_loop:AgentLoopWorker
            _compute_score(outputs) _postprocess(inputs)""",
    "reward_manager": """
        experimental.reward_loop.reward_manager.registry REWARD_MANAGER
        experimental.reward_loop.reward_manager.base
            RewardManagerBase(config,tokenizer,compute_score)
        experimental.reward_loop.reward_manager.base:RewardManagerBase run_single(data)""",
    "legacy_batch:extend_reward": "trainer.ppo.reward extract_reward(batch)",
    "legacy_batch:extend_metrics": """
        trainer.ppo.metric_utils compute_data_metrics(batch)
            process_validation_metrics(data_sources,sample_uids,infos_dict)""",
    "fully_async:extend_rollouter": """
        experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter
            fit _streaming_generation_main""",
    "fully_async:extend_trainer": """
        experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer fit""",
    "legacy_trainer": """
        trainer.ppo.core_algos ADV_ESTIMATOR_REGISTRY
        trainer.ppo.reward resolve_reward_manager_cls(config)
        trainer.ppo.ray_trainer compute_advantage(data,adv_estimator,config)
        trainer.ppo.ray_trainer:RayPPOTrainer _create_dataloader init_workers fit
            _get_gen_batch(batch) _log_rollout_data(batch,reward_extra_infos_dict)
            _dump_generations(reward_extra_infos_dict) _val_metrics_update
            _init_dump_executor _shutdown_dump_executor""",
    "v1_trainer": """
        trainer.ppo.core_algos ADV_ESTIMATOR_REGISTRY
        trainer.ppo.reward resolve_reward_manager_cls(config)
        trainer.ppo.v1.trainer_base compute_advantage_for_multi_trajectories(data)
        trainer.ppo.v1.utils compute_advantage(data)
        trainer.ppo.v1.trainer_base:PPOTrainer __init__(config) _setup _init_dataloader
            fit(agent_loop_manager) _build_replay_buffer _compute_advantage(batch,metrics)
            _log_rollout_data _dump_generations(reward_extra_infos_dict) _val_metrics_update
        trainer.ppo.v1.replay_buffer:ReplayBuffer sample _sync_metadata_from_transfer_queue
            _select_prompt_uids _materialize_batch _clear_groups _terminal_eviction_reasons
            _sampleable_terminal_keys _dapo_filtered_keys(partition_id)""",
    "driver:extend_device": "utils.device auto_set_device(config)",
    "driver:extend_main_ppo": "trainer.main_ppo run_ppo(config,task_runner_class)",
    "attention:register": "models.transformers.monkey_patch apply_monkey_patch(model)",
    "fused_kernels": "utils.fsdp_utils _select_fsdp2_wrap_targets(model)",
    "merge": """
        model_merger.base_model_merger
            ModelMergerConfig(operation,backend,local_dir,target_dir,hf_model_config_path)
        model_merger.fsdp_model_merger:FSDPModelMerger merge_and_save""",
    "for_check": """
        utils.config validate_config(config)
        trainer.ppo.utils need_reference_policy(config) need_critic(config)
        trainer.ppo.reward load_reward_manager(config,tokenizer)
        trainer.ppo.core_algos POLICY_LOSS_REGISTRY kl_penalty
        workers.rollout.replica:RolloutReplicaRegistry _registry
        experimental.agent_loop.agent_loop _agent_loop_registry
        utils.tracking:Tracking supported_backend
        utils.dataset.rl_dataset get_dataset_class""",
}


def _symbols(places: str) -> Iterator[str]:
    """Each as MODULE:NAME or MODULE:CLASS.NAME, with its parameters."""
    for word in places.split():
        if "." in word:
            place = f"verl.{word}{'.' if ':' in word else ':'}"
        else:
            yield place + word


RELIED_ON = {part: [*_symbols(places)] for part, places in PARTS.items()}


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
    return not parameters or {*parameters.split(",")} <= {*inspect.signature(value).parameters}
