"""Lists what our parts use of verl, and finds what the installed verl lacks.

A part is not loaded if something that it uses is missing, and gdpo is refused then. What verl sets
in a constructor cannot be looked up here; the docstrings of the parts name it.
"""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

V1 = "verl.trainer.ppo.v1"
LEGACY = "verl.trainer.ppo.ray_trainer"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async"
METRICS = "verl.trainer.ppo.metric_utils"
MANAGER = "verl.experimental.reward_loop.reward_manager"
WORKER = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"
BY_BOTH_TRAINERS = {
    "verl.trainer.ppo.core_algos": "ADV_ESTIMATOR_REGISTRY",
    "verl.trainer.ppo.reward": "resolve_reward_manager_cls(config)",
}

# {part, as in `EXTENDS`: {MODULE or MODULE:CLASS of verl: the NAMES or NAMES(PARAMETERS) it uses}}
PARTS = {
    "agent_loop": {WORKER: "_compute_score(outputs) _postprocess(inputs)"},
    "reward_manager": {
        f"{MANAGER}.registry": "REWARD_MANAGER",
        f"{MANAGER}.base": "RewardManagerBase(config,tokenizer,compute_score)",
        f"{MANAGER}.base:RewardManagerBase": "run_single(data)",
    },
    "legacy_batch:extend_reward": {"verl.trainer.ppo.reward": "extract_reward(batch)"},
    "legacy_batch:extend_metrics": {
        METRICS: "compute_data_metrics(batch) "
        "process_validation_metrics(data_sources,sample_uids,infos_dict)",
    },
    "fully_async:extend_rollouter": {
        f"{FULLY_ASYNC}_rollouter:FullyAsyncRollouter": "fit _streaming_generation_main",
    },
    "fully_async:extend_trainer": {f"{FULLY_ASYNC}_trainer:FullyAsyncTrainer": "fit"},
    "legacy_trainer": {
        LEGACY: "compute_advantage(data,adv_estimator,config)",
        f"{LEGACY}:RayPPOTrainer": "_create_dataloader init_workers fit _get_gen_batch(batch) "
        "_log_rollout_data(batch,reward_extra_infos_dict) "
        "_dump_generations(reward_extra_infos_dict) _val_metrics_update "
        "_init_dump_executor _shutdown_dump_executor",
        **BY_BOTH_TRAINERS,
    },
    "v1_trainer": {
        f"{V1}.trainer_base": "compute_advantage_for_multi_trajectories(data)",
        f"{V1}.utils": "compute_advantage(data)",
        f"{V1}.trainer_base:PPOTrainer": "__init__(config) _setup _init_dataloader "
        "fit(agent_loop_manager) _build_replay_buffer "
        "_compute_advantage(batch,metrics) _log_rollout_data "
        "_dump_generations(reward_extra_infos_dict) _val_metrics_update",
        f"{V1}.replay_buffer:ReplayBuffer": "sample _sync_metadata_from_transfer_queue "
        "_select_prompt_uids _materialize_batch _clear_groups _terminal_eviction_reasons "
        "_sampleable_terminal_keys _dapo_filtered_keys(partition_id)",
        **BY_BOTH_TRAINERS,
    },
    "driver:extend_device": {"verl.utils.device": "auto_set_device(config)"},
    "driver:extend_main_ppo": {"verl.trainer.main_ppo": "run_ppo(config,task_runner_class)"},
    "attention:register": {"verl.models.transformers.monkey_patch": "apply_monkey_patch(model)"},
    "hang": {"verl.utils.debug": "marked_timer(name,timing_raw)"},
    "fused_kernels": {"verl.utils.fsdp_utils": "_select_fsdp2_wrap_targets(model)"},
    "merge": {
        "verl.model_merger.base_model_merger": "ModelMergerConfig(operation,backend,local_dir,"
        "target_dir,hf_model_config_path)",
        "verl.model_merger.fsdp_model_merger:FSDPModelMerger": "merge_and_save",
    },
    "for_check": {
        "verl.utils.config": "validate_config(config)",
        "verl.trainer.ppo.utils": "need_reference_policy(config) need_critic(config)",
        "verl.trainer.ppo.reward": "load_reward_manager(config,tokenizer)",
        "verl.trainer.ppo.core_algos": "POLICY_LOSS_REGISTRY kl_penalty",
        "verl.workers.rollout.replica:RolloutReplicaRegistry": "_registry",
        "verl.experimental.agent_loop.agent_loop": "_agent_loop_registry",
        "verl.utils.tracking:Tracking": "supported_backend",
        "verl.utils.dataset.rl_dataset": "get_dataset_class",
    },
}

# {part: MODULE:NAME or MODULE:NAME(PARAMETERS) of what it uses}
RELIED_ON = {
    part: [
        f"{place}{'.' if ':' in place else ':'}{name}"
        for place, names in places.items()
        for name in names.split()
    ]
    for part, places in PARTS.items()
}


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
