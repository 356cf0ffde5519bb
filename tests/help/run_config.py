"""The part of a run's configuration that the settings look at."""

from omegaconf import OmegaConf


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
