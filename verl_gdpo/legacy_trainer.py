"""What GDPO adds to verl's legacy trainer (`trainer.use_v1=False`) and those derived from it.

Relies on verl 0.9 `verl.trainer.ppo.ray_trainer`: `RayPPOTrainer.__init__(config, ...)`, and the
module's own `compute_advantage(data, adv_estimator, ..., config)` and `compute_data_metrics(batch)`
with the reward columns in `data.non_tensor_batch`, named by `meta_info["reward_extra_keys"]`.
"""

from collections.abc import Callable
from typing import Any

import wrapt
from verl.trainer.ppo import ray_trainer

from verl_gdpo.reward_rows import EstimatorInput, RewardMatrix, RewardRows, current_input
from verl_gdpo.settings import GdpoSettings, settings_of_run
from verl_gdpo.validation import average_what_is_present

METRICS_KEY = "gdpo_metrics"


def _init(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> None:
    settings_of_run(args[0] if args else kwargs["config"])
    wrapped(*args, **kwargs)


def _compute_advantage(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Hand the reward columns to the estimator; V1 has done so by itself."""
    arguments = dict(zip(("data", "adv_estimator"), args, strict=False)) | kwargs
    data = arguments["data"]
    if arguments["adv_estimator"] != "gdpo" or current_input.get() is not None:
        return wrapped(*args, **kwargs)
    settings = GdpoSettings.from_algorithm(arguments["config"])
    names = data.meta_info.get("reward_extra_keys") or settings.names
    columns = {name: data.non_tensor_batch[name] for name in names if name in data.non_tensor_batch}
    rows = RewardRows.from_columns(columns, len(data))
    data.meta_info[METRICS_KEY] = RewardMatrix.of(rows, settings).metrics()
    token = current_input.set(EstimatorInput(rows, settings))
    try:
        return wrapped(*args, **kwargs)
    finally:
        current_input.reset(token)


def _compute_data_metrics(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    batch = args[0] if args else kwargs["batch"]
    return {**wrapped(*args, **kwargs), **batch.meta_info.get(METRICS_KEY, {})}


wrapt.wrap_function_wrapper(ray_trainer, "RayPPOTrainer.__init__", _init)
wrapt.wrap_function_wrapper(ray_trainer, "compute_advantage", _compute_advantage)
wrapt.wrap_function_wrapper(ray_trainer, "compute_data_metrics", _compute_data_metrics)
average_what_is_present(ray_trainer)
