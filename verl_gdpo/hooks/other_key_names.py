"""The names that other libraries, and older versions of verl, have for verl's keys."""

from collections.abc import Mapping

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

# {a name in TRL and transformers: the key of verl}. No letters tell that they mean the same.
OTHER_NAMES: Mapping[str, str] = {
    "batch_size": "data.train_batch_size",
    "epsilon": f"{ACTOR}.clip_ratio",
    "epsilon_high": f"{ACTOR}.clip_ratio_high",
    "eval_steps": "trainer.test_freq",
    "learning_rate": f"{ACTOR}.optim.lr",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": f"{ACTOR}.optim.clip_grad",
    "max_steps": "trainer.total_training_steps",
    "num_generations": f"{ROLLOUT}.n",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "save_steps": "trainer.save_freq",
    "warmup_ratio": f"{ACTOR}.optim.lr_warmup_steps_ratio",
    "warmup_steps": f"{ACTOR}.optim.lr_warmup_steps",
}
# {a block of an older version: the block that verl reads}, and the keys that have another name
# there. They are those of verl's `migrate_legacy_reward_impl`, which `main_ppo` does not call.
MOVED_BLOCKS: Mapping[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
}
MOVED: Mapping[str, str] = {
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_manager": "reward.reward_manager.name",
}
# {a block that verl's configuration had once: the one that has its keys now}
OLDER_BLOCKS: Mapping[str, str] = {"critic.model.fsdp_config": "critic.fsdp"}
