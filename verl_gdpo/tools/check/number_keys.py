"""The keys of a configuration that have to be numbers, and the lowest one that can be meant."""

from typing import Any

from omegaconf import OmegaConf

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOWEST = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    f"{ACTOR}.optim.lr": 0,
    f"{ACTOR}.ppo_epochs": 0,
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ACTOR}.clip_ratio_c": 0,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 0,
    f"{ROLLOUT}.gpu_memory_utilization": 0,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.data_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 0,
    "trainer.critic_warmup": 0,
}


def unusable_numbers(config: Any) -> list[str]:
    """A sentence for each of these keys that is no such number; nothing else can be asked then."""
    given = {key: OmegaConf.select(config, key) for key in LOWEST}
    return [
        f"{key}={value}: expected a number of {LOWEST[key]} or more"
        for key, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or value < LOWEST[key]
    ]
