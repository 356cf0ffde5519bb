"""The module that verl loads: the table of everything in verl that we change.

verl loads it at the end of `import verl`, in each process, through the entry point `verl_gdpo` of
the group `verl.plugins`, through `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or through both.

Right after verl imports a module of the table, `hooks/extend.py` puts a function there that imports
ours at its first call. If verl lacks a name, or ours cannot be imported, gdpo is refused with the
reason, and verl's own function goes on. For a row of `OF_MODELS` or `OF_CHECKPOINTS`, a warning
gives the reason. If verl lacks a module, as its branch `neo` lacks `verl.trainer.ppo.v1`, that is
no reason: the module is never imported.

A run without gdpo calls verl's own functions with verl's own arguments.

A verl that is newer than the supported versions is asked for all names that a run uses, once a
configuration names gdpo. If it has them, a line says that nobody has tested it.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import REQUIRED_VERL
from verl_gdpo.hooks.extend import extend_when_imported, extensions
from verl_gdpo.hooks.gates import refusals, refuse
from verl_gdpo.tools.run import stacks

__all__ = ["CALLED_BY_TOOLS", "EXTENSIONS", "refusals"]

_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_MANAGERS = "verl.experimental.reward_loop.reward_manager"

# {verl's module: {name with the parameters that ours needs: our function in hooks/}}
_WHEN_IMPORTED = {
    "verl.utils.device": {"auto_set_device(config)": "driver:check_and_set_device"},
    "verl.trainer.main_ppo": {"run_ppo(config,task_runner_class)": "driver:check_and_run"},
    "verl.trainer.ppo.utils": {"need_critic(config)": "gates:refuse_configuration"},
    "verl.trainer.ppo.core_algos": {"get_adv_estimator_fn(name_or_enum)": "gates:find_estimator"},
    f"{_MANAGERS}.registry": {"get_reward_manager_cls(name)": "gates:find_manager"},
    f"{_MANAGERS}.base": {  # of which ours is a subclass
        "RewardManagerBase(config,tokenizer,compute_score)": "",
        "RewardManagerBase.run_single(data)": "",
    },
    _AGENT_LOOP: {
        "AgentLoopWorker._run_agent_loop(trajectory)": "agent_loop:run_and_note",
        "AgentLoopWorker._compute_score(outputs,kwargs)": "agent_loop:compute_and_mark",
        "AgentLoopWorker._postprocess(inputs)": "agent_loop:postprocess_without_columns",
    },
    "verl.trainer.ppo.v1.agent_loop_tq": {"_settle_session_tasks(tasks)": "agent_loop:settle"},
    "verl.trainer.ppo.v1.trainer_base": {
        "PPOTrainer.__init__(config)": "trainer:construct",
        "PPOTrainer._setup": "trainer:set_up",
    },
    "verl.trainer.ppo.v1.utils": {
        "compute_advantage_for_multi_trajectories(data)": "trainer:compute_and_note",
    },
    "verl.trainer.ppo.ray_trainer": {
        "RayPPOTrainer._create_dataloader": "legacy:create_dataloader",
        "RayPPOTrainer._init_dump_executor": "",
        "RayPPOTrainer._shutdown_dump_executor": "",
        "compute_advantage(data,adv_estimator,config)": "step:compute_in_step",
    },
    "verl.trainer.ppo.reward": {
        "extract_reward(batch)": "legacy:extract_with_columns",
        "get_custom_reward_fn(config)": "custom_function:load_custom_function",
        "resolve_reward_manager_cls(config)": "",
    },
    "verl.trainer.ppo.metric_utils": {
        "compute_data_metrics(batch)": "legacy:compute_all_metrics",
        "process_validation_metrics(data_sources,sample_uids,infos_dict)": "legacy:leave_out_none",
    },
    # Ray keeps the methods of an actor's class before it makes one
    "verl.experimental.fully_async_policy.fully_async_trainer": {
        "FullyAsyncTrainer.__init__(config)": "legacy:construct_trainer",
        "FullyAsyncTrainer.fit": "legacy:fit_trainer",
    },
    "verl.experimental.fully_async_policy.fully_async_rollouter": {
        "FullyAsyncRollouter.fit": "legacy:fit_rollouter",
        "FullyAsyncRollouter._streaming_generation_main": "legacy:generate_and_note",
    },
}

# for any estimator: each acts only where a run asks for it, and gdpo is never refused for one
OF_MODELS = extensions(
    {
        "verl.workers.engine.fsdp.transformer_impl": {
            "FSDPEngine._build_module": "attention:build_with_ours",
        },
        "verl.utils.fsdp_utils": {
            "_select_fsdp2_wrap_targets(model)": "attention:keep_head_in_root",
        },
        "verl.trainer.ppo.utils": {
            "need_reference_policy(config)": "attention:ask_for_head_in_root",
        },
    },
    room="tools.run",
    only_for="attention=packed_sdpa, and for fused kernels under FSDP2. If a model cannot be built "
    "or trained, set attention=flash_attn and actor_rollout_ref.model.use_fused_kernels=False",
)

# where a resume hands them a list; gdpo is never refused for one
OF_CHECKPOINTS = extensions(
    {
        "verl.utils.checkpoint.fsdp_checkpoint_manager": {
            "FSDPCheckpointManager.load_checkpoint(local_path)": "resumed:load_and_count",
            "FSDPCheckpointManager.ensure_checkpoint_capacity(max_ckpt_to_keep)": "",
            "FSDPCheckpointManager.register_checkpoint(new_path,max_ckpt_to_keep)": "",
        },
    },
    room="tools.run",
    only_for="max_actor_ckpt_to_keep in a resumed run. Without it, verl keeps so many more after "
    "each resume: delete old ones yourself",
)

# methods of the class of a trainer or buffer, when one is made for gdpo
_AT_CONSTRUCTION = {
    "verl.trainer.ppo.v1.trainer_base": {
        "PPOTrainer._init_dataloader": "trainer:init_dataloader",
        "PPOTrainer._build_replay_buffer": "trainer:build_replay_buffer",
        "PPOTrainer.fit(agent_loop_manager)": "trainer:fit",
        "PPOTrainer._compute_advantage(batch,metrics)": "trainer:compute_advantage",
        "PPOTrainer._log_rollout_data": "trainer:log_rollout_data",
        "PPOTrainer._dump_generations(reward_extra_infos_dict)": "trainer:dump_generations",
        "PPOTrainer._val_metrics_update": "trainer:update_validation_metrics",
    },
    "verl.trainer.ppo.v1.replay_buffer": {
        "ReplayBuffer.sample": "replay_buffer:sample",
        "ReplayBuffer._sync_metadata_from_transfer_queue": "replay_buffer:sync_metadata",
        "ReplayBuffer._clear_groups": "replay_buffer:clear_groups",
        "ReplayBuffer._sampleable_terminal_keys": "replay_buffer:sampleable_keys",
        "ReplayBuffer._select_prompt_uids": "replay_buffer:select_prompts",
        "ReplayBuffer._materialize_batch": "replay_buffer:materialize_batch",
        "ReplayBuffer._terminal_eviction_reasons": "replay_buffer:eviction_reasons",
        "ReplayBuffer._dapo_filtered_keys(partition_id)": "replay_buffer:filtered_keys",
    },
    "verl.trainer.ppo.ray_trainer": {
        "RayPPOTrainer.fit": "legacy:fit",
        "RayPPOTrainer._get_gen_batch(batch)": "legacy:get_gen_batch",
        "RayPPOTrainer._log_rollout_data(batch,reward_extra_infos_dict)": "legacy:log_rollout_data",
        "RayPPOTrainer._dump_generations(reward_extra_infos_dict)": "trainer:dump_generations",
        "RayPPOTrainer._val_metrics_update": "trainer:update_validation_metrics",
    },
}

# of `verl-gdpo check` and `tools/evaluate/merge.py`; no run calls them. What verl sets in a
# constructor stands in the docstrings of our modules
_CALLED_BY_TOOLS = {
    "verl.model_merger.base_model_merger": [
        "ModelMergerConfig(operation,backend,local_dir,target_dir,hf_model_config_path)"
    ],
    "verl.model_merger.fsdp_model_merger": ["FSDPModelMerger.merge_and_save"],
    "verl.utils.config": ["validate_config(config)"],
    "verl.trainer.ppo.utils": ["need_reference_policy(config)"],
    "verl.trainer.ppo.reward": ["load_reward_manager(config,tokenizer)"],
    "verl.trainer.ppo.core_algos": [
        *("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "kl_penalty"),
    ],
    "verl.workers.rollout.replica": ["RolloutReplicaRegistry._registry"],
    _AGENT_LOOP: ["_agent_loop_registry"],
    "verl.utils.tracking": ["Tracking.supported_backend"],
    "verl.utils.dataset.rl_dataset": ["get_dataset_class"],
}

EXTENSIONS = (
    *extensions(_WHEN_IMPORTED),
    *OF_CHECKPOINTS,
    *OF_MODELS,
    *extensions(_AT_CONSTRUCTION, at_construction=True),
)
CALLED_BY_TOOLS = extensions({k: dict.fromkeys(v, "") for k, v in _CALLED_BY_TOOLS.items()})


def _activate() -> None:
    stacks.register_if_asked()
    if SpecifierSet(REQUIRED_VERL).contains(verl.__version__, prereleases=True):
        extend_when_imported(EXTENSIONS)
    else:  # the gates alone, as far as this verl has them
        refuse(f"verl {verl.__version__} is not supported")
        gates = [each for each in EXTENSIONS if each.replacement.startswith("hooks.gates:")]
        extend_when_imported(gates, on_missing=lambda _: None)


_activate()
