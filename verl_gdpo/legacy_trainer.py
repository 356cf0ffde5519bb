"""What GDPO adds to verl's legacy trainer (`trainer.use_v1=False`) and those derived from it.

Relies on verl 0.7.1 to 0.9 `verl.trainer.ppo.ray_trainer`: `RayPPOTrainer.__init__(config, ...)`,
and `compute_advantage(data, adv_estimator, ..., config)`, which `verl.experimental.separation`
imports by name, with the reward columns in `data.non_tensor_batch`, named by
`meta_info["reward_extra_keys"]`.

The replacements are plain functions, which a user's `__main__` can hold and Ray can still pickle.
"""

import functools
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo import ray_trainer

from verl_gdpo.reward_rows import RewardMatrix, RewardRows, current_rows
from verl_gdpo.settings import GdpoSettings, settings_of_run
from verl_gdpo.verl_metrics import METRICS_KEY

Function = Callable[..., Any]


def checking_settings(init: Function) -> Function:
    @functools.wraps(init)
    def check_and_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        settings_of_run(config)
        init(self, config, *args, **kwargs)

    return check_and_init


def with_reward_columns(compute_advantage: Function) -> Function:
    """Hand the reward columns to the estimator; V1 has done so by itself."""

    @functools.wraps(compute_advantage)
    def hand_over_and_compute(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        if adv_estimator != "gdpo" or current_rows.get() is not None:
            return compute_advantage(data, adv_estimator, *args, **kwargs)
        settings = GdpoSettings.from_algorithm(kwargs["config"])
        names = data.meta_info.get("reward_extra_keys") or settings.names
        columns = {
            name: data.non_tensor_batch[name] for name in names if name in data.non_tensor_batch
        }
        rows = RewardRows.from_columns(columns, len(data))
        data.meta_info[METRICS_KEY] = RewardMatrix.of(rows, settings).metrics()
        token = current_rows.set(rows)
        try:
            return compute_advantage(data, adv_estimator, *args, **kwargs)
        finally:
            current_rows.reset(token)

    return hand_over_and_compute


trainer_cls = ray_trainer.RayPPOTrainer
trainer_cls.__init__ = checking_settings(trainer_cls.__init__)
ray_trainer.compute_advantage = with_reward_columns(ray_trainer.compute_advantage)
