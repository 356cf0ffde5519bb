"""What GDPO adds to verl's legacy trainer (`trainer.use_v1=False`) and those derived from it.

Relies on verl 0.9 `verl.trainer.ppo.ray_trainer`: `RayPPOTrainer.__init__(config, ...)`, and the
module's own `compute_advantage(data, adv_estimator, ..., config)` and `compute_data_metrics(batch)`
with the reward columns in `data.non_tensor_batch`, named by `meta_info["reward_extra_keys"]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import wrapt
from verl.trainer.ppo import ray_trainer

from verl_gdpo.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.reward_rows import EstimatorInput, RewardMatrix, RewardRows, current_input
from verl_gdpo.settings import GdpoSettings, settings_of_run, uses_gdpo_manager
from verl_gdpo.validation import average_what_is_present
from verl_gdpo.variants import Bounds

METRICS_KEY = "gdpo_metrics"

# of the trainer in this process; compute_advantage is told no more than `algorithm`
has_gdpo_manager = False
run_bounds: Mapping[str, Bounds] = {}


def _init(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> None:
    global has_gdpo_manager, run_bounds
    config = args[0] if args else kwargs["config"]
    settings = settings_of_run(config)
    has_gdpo_manager = uses_gdpo_manager(config)
    run_bounds = settings.bounds if settings else {}
    wrapped(*args, **kwargs)


def _compute_advantage(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Hand the reward columns to the estimator; V1 has done so by itself."""
    arguments = dict(zip(("data", "adv_estimator"), args, strict=False)) | kwargs
    data, adv_estimator = arguments["data"], arguments["adv_estimator"]
    ours = adv_estimator == "gdpo" or has_gdpo_manager
    if not ours or current_input.get() is not None:
        return wrapped(*args, **kwargs)
    settings = GdpoSettings.from_algorithm(arguments["config"])
    settings = replace(settings, bounds={**run_bounds, **settings.bounds})
    names = data.meta_info.get("reward_extra_keys") or settings.names
    columns = {name: data.non_tensor_batch[name] for name in names if name in data.non_tensor_batch}
    rows = RewardRows.from_columns(columns, len(data))
    rewards = RewardMatrix.of(rows, settings)
    token = current_input.set(EstimatorInput(rows, settings))
    try:
        result = wrapped(*args, **kwargs)
    finally:
        current_input.reset(token)
    result.meta_info[METRICS_KEY] = batch_metrics(
        rewards,
        rows.counted_B,
        result.non_tensor_batch["uid"],
        (result.batch["response_mask"] != 0).sum(dim=1).cpu().numpy(),
        settings_of_advantage(adv_estimator, settings),
        settings.bounds,
    )
    return result


def _compute_data_metrics(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    batch = args[0] if args else kwargs["batch"]
    return {**wrapped(*args, **kwargs), **batch.meta_info.get(METRICS_KEY, {})}


wrapt.wrap_function_wrapper(ray_trainer, "RayPPOTrainer.__init__", _init)
wrapt.wrap_function_wrapper(ray_trainer, "compute_advantage", _compute_advantage)
wrapt.wrap_function_wrapper(ray_trainer, "compute_data_metrics", _compute_data_metrics)
average_what_is_present(ray_trainer)
