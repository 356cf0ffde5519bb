"""The module that verl loads: the table of everything in verl that we change.

verl loads it at the end of `import verl`, in each process, through the entry point `verl_gdpo` of
the group `verl.plugins`, through `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or through both.

Right after verl imports a module of the table, `hooks/extend.py` puts a function there that imports
ours at its first call. If verl lacks a name, or ours cannot be imported, gdpo is refused with the
reason, and verl's own function goes on. If verl lacks a module, as its branch `neo` lacks
`verl.trainer.ppo.v1`, that is no reason: the module is never imported.

A verl that is newer than the supported versions is asked for all names that a run uses, once a
configuration names gdpo. If it has them, a line says that nobody has tested it.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import REQUIRED_VERL, stacks
from verl_gdpo.hooks.extend import Extension, extend_when_imported
from verl_gdpo.hooks.refusal import refusals, refuse

__all__ = ["CALLED_BY_TOOLS", "EXTENSIONS", "refusals"]

_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_BASE = "verl.trainer.ppo.v1.trainer_base"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_LEGACY = "verl.trainer.ppo.ray_trainer"
_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter"
_TRAINER = "verl.experimental.fully_async_policy.fully_async_trainer"
_METRICS = "verl.trainer.ppo.metric_utils"
_MANAGERS = "verl.experimental.reward_loop.reward_manager"

# (verl's module, name with the parameters that ours needs, our function)
_WHEN_IMPORTED = (
    # what a main module asks first
    ("verl.utils.device", "auto_set_device(config)", "driver:check_and_set_device"),
    ("verl.trainer.ppo.utils", "need_critic(config)", "gates:refuse_configuration"),
    ("verl.trainer.main_ppo", "run_ppo(config,task_runner_class)", "driver:check_and_run"),
    # look-ups by the name "gdpo"
    ("verl.trainer.ppo.core_algos", "get_adv_estimator_fn(name_or_enum)", "gates:find_estimator"),
    (f"{_MANAGERS}.registry", "get_reward_manager_cls(name)", "gates:find_manager"),
    # rollouts
    (_AGENT_LOOP, "AgentLoopWorker._compute_score(outputs)", "agent_loop:compute_and_mark"),
    (_AGENT_LOOP, "AgentLoopWorker._postprocess(inputs)", "agent_loop:postprocess_without_columns"),
    # V1 trainers
    (_BASE, "PPOTrainer.__init__(config)", "trainer:construct"),
    (_BASE, "PPOTrainer._setup", "trainer:set_up"),
    (
        "verl.trainer.ppo.v1.utils",
        "compute_advantage_for_multi_trajectories(data)",
        "trainer:compute_and_note",
    ),
    # the legacy trainer and what derives from it
    (_LEGACY, "RayPPOTrainer._create_dataloader", "legacy:create_dataloader"),
    (_LEGACY, "compute_advantage(data,adv_estimator,config)", "step:compute_in_step"),
    ("verl.trainer.ppo.reward", "extract_reward(batch)", "legacy:extract_with_columns"),
    (
        _METRICS,
        "compute_data_metrics(batch)",
        "legacy:compute_all_metrics",
    ),
    (
        _METRICS,
        "process_validation_metrics(data_sources,sample_uids,infos_dict)",
        "legacy:process_what_is_present",
    ),
    # Ray captures the methods of an actor when it loads its class, before an instance is made
    (
        _TRAINER,
        "FullyAsyncTrainer.__init__(config)",
        "fully_async:construct_trainer",
    ),
    (_TRAINER, "FullyAsyncTrainer.fit", "fully_async:fit_trainer"),
    (_ROLLOUTER, "FullyAsyncRollouter.fit", "fully_async:fit_rollouter"),
    (
        _ROLLOUTER,
        "FullyAsyncRollouter._streaming_generation_main",
        "fully_async:generate_and_note",
    ),
    # models
    (
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._build_module",
        "attention:build_with_ours",
    ),
    (
        "verl.utils.fsdp_utils",
        "_select_fsdp2_wrap_targets(model)",
        "fused_kernels:keep_head_in_root",
    ),
)

# methods of the class of a trainer or buffer, when one is made for gdpo
_WHEN_MADE = (
    (_BASE, "PPOTrainer._init_dataloader", "trainer:init_dataloader"),
    (_BASE, "PPOTrainer._build_replay_buffer", "trainer:build_replay_buffer"),
    (_BASE, "PPOTrainer.fit(agent_loop_manager)", "trainer:fit"),
    (_BASE, "PPOTrainer._compute_advantage(batch,metrics)", "trainer:compute_advantage"),
    (_BASE, "PPOTrainer._log_rollout_data", "trainer:log_rollout_data"),
    (
        _BASE,
        "PPOTrainer._dump_generations(reward_extra_infos_dict)",
        "trainer:dump_generations",
    ),
    (_BASE, "PPOTrainer._val_metrics_update", "trainer:update_validation_metrics"),
    (_BUFFER, "ReplayBuffer.sample", "replay_buffer:sample"),
    (_BUFFER, "ReplayBuffer._sync_metadata_from_transfer_queue", "replay_buffer:sync_metadata"),
    (_BUFFER, "ReplayBuffer._clear_groups", "replay_buffer:clear_groups"),
    (_BUFFER, "ReplayBuffer._sampleable_terminal_keys", "replay_buffer:sampleable_keys"),
    (_BUFFER, "ReplayBuffer._select_prompt_uids", "replay_buffer:select_prompts"),
    (_BUFFER, "ReplayBuffer._materialize_batch", "replay_buffer:materialize_batch"),
    (_BUFFER, "ReplayBuffer._terminal_eviction_reasons", "replay_buffer:eviction_reasons"),
    (_BUFFER, "ReplayBuffer._dapo_filtered_keys(partition_id)", "replay_buffer:filtered_keys"),
    (_LEGACY, "RayPPOTrainer.fit", "legacy:fit"),
    (_LEGACY, "RayPPOTrainer._get_gen_batch(batch)", "legacy:get_gen_batch"),
    (
        _LEGACY,
        "RayPPOTrainer._log_rollout_data(batch,reward_extra_infos_dict)",
        "legacy:log_rollout_data",
    ),
    (
        _LEGACY,
        "RayPPOTrainer._dump_generations(reward_extra_infos_dict)",
        "trainer:dump_generations",
    ),
    (_LEGACY, "RayPPOTrainer._val_metrics_update", "trainer:update_validation_metrics"),
)

# what a run calls besides; what verl sets in a constructor is in the docstrings of our modules
_CALLED = (
    (f"{_MANAGERS}.base", "RewardManagerBase(config,tokenizer,compute_score)"),
    (f"{_MANAGERS}.base", "RewardManagerBase.run_single(data)"),
    ("verl.trainer.ppo.reward", "resolve_reward_manager_cls(config)"),
    (_LEGACY, "RayPPOTrainer._init_dump_executor"),
    (_LEGACY, "RayPPOTrainer._shutdown_dump_executor"),
)

EXTENSIONS = (
    *(Extension(module, name, f"hooks.{ours}") for module, name, ours in _WHEN_IMPORTED),
    *(Extension(module, name, f"hooks.{ours}", True) for module, name, ours in _WHEN_MADE),
    *(Extension(module, name) for module, name in _CALLED),
)

# of `verl-gdpo check` and of `hooks/merge.py`; no run needs them
CALLED_BY_TOOLS = (
    Extension(
        "verl.model_merger.base_model_merger",
        "ModelMergerConfig(operation,backend,local_dir,target_dir,hf_model_config_path)",
    ),
    Extension("verl.model_merger.fsdp_model_merger", "FSDPModelMerger.merge_and_save"),
    Extension("verl.utils.config", "validate_config(config)"),
    Extension("verl.trainer.ppo.utils", "need_reference_policy(config)"),
    Extension("verl.trainer.ppo.reward", "load_reward_manager(config,tokenizer)"),
    Extension("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
    Extension("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
    Extension("verl.trainer.ppo.core_algos", "kl_penalty"),
    Extension("verl.workers.rollout.replica", "RolloutReplicaRegistry._registry"),
    Extension(_AGENT_LOOP, "_agent_loop_registry"),
    Extension("verl.utils.tracking", "Tracking.supported_backend"),
    Extension("verl.utils.dataset.rl_dataset", "get_dataset_class"),
)


def _activate() -> None:
    stacks.register()
    if SpecifierSet(REQUIRED_VERL).contains(verl.__version__, prereleases=True):
        extend_when_imported(EXTENSIONS)
    else:  # the gates alone, as far as this verl has them
        refuse(f"verl {verl.__version__} is not supported")
        gates = [each for each in EXTENSIONS if each.replacement.startswith("hooks.gates:")]
        extend_when_imported(gates, on_missing=lambda _: None)


_activate()
