"""The part of a run's configuration that the settings look at."""

from omegaconf import OmegaConf


def listed(functions, *, algorithm=None, **reward):
    """With a list of reward functions, for a reward manager."""
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "gdpo", **(algorithm or {})},
            "reward": {
                "custom_reward_function": {"path": None, "name": "compute_score"},
                "reward_manager": {"source": "register", "name": "gdpo"},
                "reward_model": {"enable": False},
                "reward_functions": functions,
                **reward,
            },
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "trainer": {"experiment_name": "run"},
            "transfer_queue": {"enable": False},
        }
    )


def run_config(**changes):
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "gdpo", "use_kl_in_reward": False},
            "reward": {
                "reward_manager": {"source": "register", "name": "gdpo"},
                "reward_model": {"enable": False, "enable_resource_pool": False},
                "custom_reward_function": {"path": None},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config
