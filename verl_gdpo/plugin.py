"""The module that verl loads: the table of everything in verl that gdpo changes.

verl loads it at the end of `import verl`, in each process, through the entry point `verl_gdpo` of
the group `verl.plugins`, through `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or through both.

Right after verl imports a module of the table, `hooks/extend.py` puts a function there that imports
ours at its first call. If verl lacks a name, or ours cannot be imported, gdpo is refused with the
reason, and verl's own function goes on. If verl lacks a module, as its branch `neo` lacks
`verl.trainer.ppo.v1`, that is no reason: the module is never imported.

A run without gdpo calls verl's own functions with verl's own arguments.

A verl that was not tested is asked for all names that a run uses, once a configuration names gdpo.
If it has them, a line says that nobody has tested it.

What a run needs of us that is not gdpo, such as the record of its start, is in the table of
`verl_gdpo/tools/run/plugin.py`; what a machine without a GPU needs, in that of `verl_gdpo/cpu`.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import REQUIRED_VERL
from verl_gdpo.hooks.extend import Extension, extend_when_imported
from verl_gdpo.hooks.refusal import refusals, refuse

__all__ = ["CALLED_BY_TOOLS", "EXTENSIONS", "refusals"]

# The module whose functions ask whether gdpo can run. They hold with any verl.
LOOKUP = "verl_gdpo.hooks.lookup:"

_WHEN_IMPORTED = (
    Extension(
        "verl.utils.device",
        "auto_set_device",
        "verl_gdpo.hooks.driver:check_and_set_device",
        needs=("config",),
        lost=(
            "our functions are imported late; with python -m, what run_ppo does is not done either"
        ),
    ),
    Extension(
        "verl.trainer.main_ppo",
        "run_ppo",
        "verl_gdpo.hooks.driver:check_and_run",
        needs=(
            "config",
            "task_runner_class",
        ),
        # The table of `tools/run` has a row for the same function.
        lost="unknown keys are not refused, nodes are not compared, and no start is recorded",
    ),
    Extension(
        "verl.trainer.ppo.utils",
        "need_critic",
        "verl_gdpo.hooks.lookup:refuse_configuration",
        needs=("config",),
        lost="gdpo is refused later, when the trainer is made",
    ),
    Extension(
        "verl.trainer.ppo.core_algos",
        "get_adv_estimator_fn",
        "verl_gdpo.hooks.lookup:find_estimator",
        needs=("name_or_enum",),
        lost="verl's own gdpo would compute the advantages",
        ends_run=True,
    ),
    Extension(
        "verl.experimental.reward_loop.reward_manager.registry",
        "get_reward_manager_cls",
        "verl_gdpo.hooks.lookup:find_manager",
        needs=("name",),
        lost="verl's own manager gdpo would score",
        ends_run=True,
    ),
    # Ours is a subclass of it.
    Extension(
        "verl.experimental.reward_loop.reward_manager.base",
        "RewardManagerBase",
        needs=(
            "config",
            "tokenizer",
            "compute_score",
        ),
    ),
    Extension(
        "verl.experimental.reward_loop.reward_manager.base",
        "RewardManagerBase.run_single",
        needs=("data",),
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._run_agent_loop",
        "verl_gdpo.hooks.agent_loop:run_and_note",
        needs=("trajectory",),
        others=("sampling_params", "agent_name"),
        lost="reward functions cannot tell a validation: a run that asks ends at its first sample",
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._compute_score",
        "verl_gdpo.hooks.agent_loop:compute_and_mark",
        needs=(
            "outputs",
            "kwargs",
        ),
        lost="answers of tools would be scored as the policy's own tokens",
        ends_run=True,
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._postprocess",
        "verl_gdpo.hooks.agent_loop:postprocess_without_columns",
        needs=("inputs",),
        lost="rewards that the first sample lacks would be left out",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "_settle_session_tasks",
        "verl_gdpo.hooks.agent_loop:settle",
        needs=("tasks",),
        lost="a run with functions of a group ends at its first sample",
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer.__init__",
        "verl_gdpo.hooks.trainer:construct",
        needs=("config",),
        lost="nothing of the trainer would be extended",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._setup",
        "verl_gdpo.hooks.trainer:set_up",
        lost="reward workers are asked at the first step, and not before",
    ),
    Extension(
        "verl.trainer.ppo.v1.utils",
        "compute_advantage_for_multi_trajectories",
        "verl_gdpo.hooks.trainer:compute_and_note",
        needs=("data", "batch_keys", "adv_estimator"),
        lost="dropped samples would count in verl's estimators, and dumps would have no advantages",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._create_dataloader",
        "verl_gdpo.hooks.legacy:create_dataloader",
        others=("train_dataset", "val_dataset", "collate_fn", "train_sampler"),
        lost="nothing of the trainer would be extended",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._init_dump_executor",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._shutdown_dump_executor",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "compute_advantage",
        "verl_gdpo.hooks.estimator:compute_in_step",
        needs=(
            "data",
            "adv_estimator",
            "config",
        ),
        lost="legacy: nobody would look at the rows",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.reward",
        "extract_reward",
        "verl_gdpo.hooks.legacy:extract_with_columns",
        needs=("batch",),
        lost="legacy: validation and dumps have no rewards",
    ),
    Extension(
        "verl.trainer.ppo.reward",
        "get_custom_reward_fn",
        "verl_gdpo.hooks.custom_function:load_custom_function",
        needs=("config",),
        lost="verl loads the reward file itself, and does not check what its function takes",
    ),
    Extension(
        "verl.trainer.ppo.reward",
        "resolve_reward_manager_cls",
        needs=("config",),
    ),
    Extension(
        "verl.trainer.ppo.metric_utils",
        "compute_data_metrics",
        "verl_gdpo.hooks.legacy:compute_all_metrics",
        needs=("batch",),
        lost="legacy: the metrics of gdpo are lost",
    ),
    Extension(
        "verl.trainer.ppo.metric_utils",
        "process_validation_metrics",
        "verl_gdpo.hooks.legacy:leave_out_none",
        needs=(
            "data_sources",
            "sample_uids",
            "infos_dict",
        ),
        lost="a validation with None as a reward cannot be averaged by some versions of verl",
    ),
    # Ray keeps the methods of an actor's class before it makes one.
    Extension(
        "verl.experimental.fully_async_policy.fully_async_trainer",
        "FullyAsyncTrainer.__init__",
        "verl_gdpo.hooks.fully_async:construct_trainer",
        needs=("config",),
        others=("tokenizer", "role_worker_mapping", "resource_pool_manager"),
        lost="nothing of the trainer would be extended",
        ends_run=True,
    ),
    Extension(
        "verl.experimental.fully_async_policy.fully_async_trainer",
        "FullyAsyncTrainer.fit",
        "verl_gdpo.hooks.fully_async:fit_trainer",
        lost="settings would be read anew at each step, without what the tasks declare",
        ends_run=True,
    ),
    Extension(
        "verl.experimental.fully_async_policy.fully_async_rollouter",
        "FullyAsyncRollouter.fit",
        "verl_gdpo.hooks.fully_async:fit_rollouter",
        lost="a run whose rollouter failed ends with exit code 0",
    ),
    Extension(
        "verl.experimental.fully_async_policy.fully_async_rollouter",
        "FullyAsyncRollouter._streaming_generation_main",
        "verl_gdpo.hooks.fully_async:generate_and_note",
        lost="a run whose rollouter failed ends with exit code 0",
    ),
)

# Methods of the class of a trainer or its buffer, for an instance that is made for gdpo.
_AT_CONSTRUCTION = (
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._init_dataloader",
        "verl_gdpo.hooks.trainer:init_dataloader",
        at_construction=True,
        lost=(
            "ground truths are not read before a model is loaded, nor bounds for a dataset "
            "class of your own"
        ),
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._build_replay_buffer",
        "verl_gdpo.hooks.trainer:build_replay_buffer",
        at_construction=True,
        lost="nobody would look for samples that could not be scored",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer.fit",
        "verl_gdpo.hooks.trainer:fit",
        others=("agent_loop_manager",),
        at_construction=True,
        lost="an actor that died is not named",
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._compute_advantage",
        "verl_gdpo.hooks.trainer:compute_advantage",
        needs=(
            "batch",
            "metrics",
        ),
        at_construction=True,
        lost="nobody would look at the rows",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._log_rollout_data",
        "verl_gdpo.hooks.trainer:log_rollout_data",
        others=("batch", "timing_raw", "rollout_data_dir"),
        at_construction=True,
        lost="dumps have no rewards and advantages",
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._dump_generations",
        "verl_gdpo.hooks.trainer:dump_generations",
        needs=("reward_extra_infos_dict",),
        others=("inputs", "outputs", "gts", "scores", "dump_path"),
        at_construction=True,
        lost="dumps have no rewards and advantages",
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._val_metrics_update",
        "verl_gdpo.hooks.trainer:update_validation_metrics",
        needs=("data_sources", "sample_uids", "reward_extra_infos_dict"),
        others=("sample_turns",),
        at_construction=True,
        lost="validation also averages notes, and samples to which a reward does not apply",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "verl_gdpo.hooks.replay_buffer:sample",
        others=("global_steps", "partition_id", "batch_size"),
        at_construction=True,
        lost="a validation counts samples that could not be scored as 0",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        "verl_gdpo.hooks.replay_buffer:sync_metadata",
        at_construction=True,
        lost="a run whose rollouts are lost does not end",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._clear_groups",
        "verl_gdpo.hooks.replay_buffer:clear_groups",
        needs=("partition_id", "uids"),
        at_construction=True,
        lost="errors of samples in groups that verl drops are not seen",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._sampleable_terminal_keys",
        "verl_gdpo.hooks.replay_buffer:sampleable_keys",
        needs=("partition_id",),
        others=("eviction_reasons",),
        at_construction=True,
        lost="with full_determinism, a batch depends on which prompts finish first",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._select_prompt_uids",
        "verl_gdpo.hooks.replay_buffer:select_prompts",
        needs=("partition_id", "sampleable_keys"),
        others=("batch_size",),
        at_construction=True,
        lost="a batch depends on which prompts finish first",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._materialize_batch",
        "verl_gdpo.hooks.replay_buffer:materialize_batch",
        needs=("selected_prompt_uids", "partition_snapshot"),
        others=("partition_id",),
        at_construction=True,
        lost="the order of rows depends on which prompts finish first",
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._terminal_eviction_reasons",
        "verl_gdpo.hooks.replay_buffer:eviction_reasons",
        needs=("global_steps",),
        others=("partition_id",),
        at_construction=True,
        lost=(
            "a run with weights that have a schedule, and dynamic sampling, ends at its first step"
        ),
    ),
    Extension(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._dapo_filtered_keys",
        "verl_gdpo.hooks.replay_buffer:filtered_keys",
        needs=("partition_id",),
        at_construction=True,
        lost="verl would filter groups by the summed reward",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer.fit",
        "verl_gdpo.hooks.legacy:fit",
        at_construction=True,
        lost="settings would be read anew at each step, without what the tasks declare",
        ends_run=True,
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._get_gen_batch",
        "verl_gdpo.hooks.legacy:get_gen_batch",
        others=("batch",),
        at_construction=True,
        lost="a run with weights that have a schedule ends at its first sample",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._log_rollout_data",
        "verl_gdpo.hooks.legacy:log_rollout_data",
        needs=(
            "batch",
            "reward_extra_infos_dict",
        ),
        others=("timing_raw", "rollout_data_dir"),
        at_construction=True,
        lost="dumps have no rewards and advantages",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._dump_generations",
        "verl_gdpo.hooks.trainer:dump_generations",
        needs=("reward_extra_infos_dict",),
        others=("inputs", "outputs", "gts", "scores", "dump_path"),
        at_construction=True,
        lost="dumps have no rewards and advantages",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._val_metrics_update",
        "verl_gdpo.hooks.trainer:update_validation_metrics",
        needs=("data_sources", "sample_uids", "reward_extra_infos_dict"),
        others=("sample_turns",),
        at_construction=True,
        lost="validation also averages notes, and samples to which a reward does not apply",
    ),
)

EXTENSIONS = (*_WHEN_IMPORTED, *_AT_CONSTRUCTION)

# What `verl-gdpo check` and `tools/evaluate/merge.py` call; no run does. What verl sets in a
# constructor stands in the docstrings of our modules.
CALLED_BY_TOOLS = (
    Extension(
        "verl.model_merger.base_model_merger",
        "ModelMergerConfig",
        needs=(
            "operation",
            "backend",
            "local_dir",
            "target_dir",
            "hf_model_config_path",
        ),
    ),
    Extension(
        "verl.model_merger.fsdp_model_merger",
        "FSDPModelMerger.merge_and_save",
    ),
    Extension(
        "verl.utils.config",
        "validate_config",
        needs=("config",),
    ),
    Extension(
        "verl.trainer.ppo.utils",
        "need_reference_policy",
        needs=("config",),
    ),
    Extension(
        "verl.trainer.ppo.reward",
        "load_reward_manager",
        needs=(
            "config",
            "tokenizer",
        ),
    ),
    Extension(
        "verl.trainer.ppo.core_algos",
        "ADV_ESTIMATOR_REGISTRY",
    ),
    Extension(
        "verl.trainer.ppo.core_algos",
        "POLICY_LOSS_REGISTRY",
    ),
    Extension(
        "verl.trainer.ppo.core_algos",
        "kl_penalty",
    ),
    Extension(
        "verl.workers.rollout.replica",
        "RolloutReplicaRegistry._registry",
    ),
    Extension(
        "verl.experimental.agent_loop.agent_loop",
        "_agent_loop_registry",
    ),
    Extension(
        "verl.utils.tracking",
        "Tracking.supported_backend",
    ),
    Extension(
        "verl.utils.dataset.rl_dataset",
        "get_dataset_class",
    ),
)


def _activate() -> None:
    if SpecifierSet(REQUIRED_VERL).contains(verl.__version__, prereleases=True):
        extend_when_imported(EXTENSIONS)
        return
    refuse(f"verl {verl.__version__} is not supported")
    # Only what refuses gdpo is there, as far as this verl has the names.
    asking = [each for each in EXTENSIONS if each.replacement.startswith(LOOKUP)]
    extend_when_imported(asking, on_missing=lambda _: None)


_activate()
