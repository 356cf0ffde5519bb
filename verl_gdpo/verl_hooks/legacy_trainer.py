"""Extends verl's legacy trainer (`trainer.use_v1=False`) and the trainers derived from it.

Relies on verl 0.9 `verl.trainer.ppo.ray_trainer`:
- `RayPPOTrainer._create_dataloader`: every derived trainer calls it before it loads a model, and
  has set its `config` by then.
- `compute_advantage(data, adv_estimator, ..., config)`: `verl.experimental.separation` imports it
  by name. The reward columns are in `data.non_tensor_batch`, and
  `meta_info["reward_extra_keys"]` holds their names.

The replacements are plain functions. Ray can pickle them even if a user's `__main__` holds them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from verl.trainer.ppo import ray_trainer

from verl_gdpo.advantage.variants import Bounds
from verl_gdpo.batch.matrix import EstimatorInput, current_input
from verl_gdpo.batch.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.batch.rows import RewardError, RewardRows
from verl_gdpo.run.folder import write_into_run_dir
from verl_gdpo.settings.algorithm import GdpoSettings, settings_of_run
from verl_gdpo.verl_hooks.estimator import NO_REWARDS
from verl_gdpo.verl_hooks.rollout_table import RolloutTable
from verl_gdpo.verl_hooks.supported_trainers import refuse_trainer
from verl_gdpo.verl_hooks.verl_metrics import METRICS_KEY

Function = Callable[..., Any]

# facts about the trainer in this process, because compute_advantage gets only `algorithm`
has_gdpo_manager = False
run_bounds: Mapping[str, Bounds] = {}


def checking_settings(create_dataloader: Function) -> Function:
    """Return `create_dataloader` extended to check the configuration first."""

    @functools.wraps(create_dataloader)
    def check_and_create(self: Any, *args: Any, **kwargs: Any) -> None:
        from verl_gdpo.verl_hooks.reward_manager import (
            runs_gdpo_manager,  # imported late, so that V1 trainers do not load it here
            scored_rows,
        )

        global has_gdpo_manager, run_bounds
        has_gdpo_manager = runs_gdpo_manager(self.config)
        settings = settings_of_run(self.config, has_manager=has_gdpo_manager)
        if settings is not None:
            refuse_trainer(self.config)
        RolloutTable.of(self.config, has_rewards=False)
        write_into_run_dir(self.config)
        create_dataloader(self, *args, **kwargs)
        rows = scored_rows(self.train_dataset)
        if settings is not None and rows is not None:
            sources = {*rows["data_source"]}
            settings = settings_of_run(self.config, sources, has_manager=has_gdpo_manager)
        run_bounds = settings.bounds if settings else {}

    return check_and_create


def with_reward_columns(compute_advantage: Function) -> Function:
    """Return `compute_advantage` extended to pass the reward columns to the estimator.

    It does nothing under a V1 trainer, which has passed them already.
    """
    signature = inspect.signature(compute_advantage)

    @functools.wraps(compute_advantage)
    def hand_over_and_compute(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        data, adv_estimator, algorithm = given["data"], given["adv_estimator"], given.get("config")
        ours = adv_estimator == "gdpo" or has_gdpo_manager
        if not ours or current_input.get() is not None:
            return compute_advantage(*args, **kwargs)
        if adv_estimator == "gdpo":
            refuse_penalty(data)
        input_ = input_of(data, algorithm or {})
        rewards = input_.rewards  # raises if a reward is missing, whichever estimator runs
        token = current_input.set(input_)
        try:
            result = compute_advantage(*args, **kwargs)
        finally:
            current_input.reset(token)
        result.meta_info[METRICS_KEY] = batch_metrics(
            rewards,
            input_.rows.counted_B,
            result.non_tensor_batch["uid"],
            (result.batch["response_mask"] != 0).sum(dim=1).cpu().numpy(),
            settings_of_advantage(adv_estimator, input_.settings),
            input_.settings.bounds,
        )
        return result

    return hand_over_and_compute


def input_of(data: Any, algorithm: Any) -> EstimatorInput:
    """Return the reward columns of verl's batch, with the settings of verl's `algorithm` block.

    Raises:
        RewardError: the batch has no reward.
    """
    settings = GdpoSettings.from_algorithm(algorithm)
    settings = replace(settings, bounds={**run_bounds, **settings.bounds})
    names = data.meta_info.get("reward_extra_keys") or settings.names
    columns = {name: data.non_tensor_batch[name] for name in names if name in data.non_tensor_batch}
    if not columns.keys() - {"score"}:
        raise RewardError(NO_REWARDS)
    return EstimatorInput(RewardRows.from_columns(columns, len(data)), settings)


def refuse_penalty(data: Any) -> None:
    """Raise ValueError if a trainer has changed the scores, because gdpo would ignore that."""
    scores, rewards = (data.batch.get(f"token_level_{what}") for what in ("scores", "rewards"))
    if scores is not None and rewards is not scores and not torch.equal(scores, rewards):
        raise ValueError(
            "token_level_rewards differ from token_level_scores with adv_estimator=gdpo: a penalty "
            "was added to the summed reward, such as KL by algorithm.use_kl_in_reward, and gdpo "
            "would ignore it. Make the penalty a separate reward, or put it into the loss"
        )


trainer_cls = ray_trainer.RayPPOTrainer
trainer_cls._create_dataloader = checking_settings(trainer_cls._create_dataloader)
ray_trainer.compute_advantage = with_reward_columns(ray_trainer.compute_advantage)
