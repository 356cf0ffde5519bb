"""Extends verl's legacy trainer (`trainer.use_v1=False`) and the trainers derived from it.

Relies on verl 0.9 `verl.trainer.ppo.ray_trainer`:
- `RayPPOTrainer._create_dataloader`: every derived trainer calls it before it loads a model, and
  has set its `config` by then;
- the methods in `relied_on.py`; `fit` may return a coroutine, and some derived trainers do not call
  `_get_gen_batch`;
- `compute_advantage(data, adv_estimator, ..., config)`, which modules of derived trainers import by
  name. The reward columns are in `data.non_tensor_batch`, and `meta_info["reward_extra_keys"]`
  holds their names.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from verl.trainer.ppo import ray_trainer

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.samples import BatchRows, RewardError
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.estimator import NO_REWARDS
from verl_gdpo.hooks.extend import Function, extends
from verl_gdpo.hooks.legacy_batch import METRICS_KEY, infos_of
from verl_gdpo.hooks.rollout_guard import RolloutGuard, rollout_actors
from verl_gdpo.hooks.step import Outcome, Step, current_step, fitting
from verl_gdpo.hooks.trainer_mixin import TrainerMixin
from verl_gdpo.run.folder import write_into_run_dir

KEYS = "gdpo_keys"  # the column with the keys that `keys_of` made


class GdpoLegacyTrainer(TrainerMixin):
    """Mixin for `RayPPOTrainer` classes, of which a run with gdpo makes its trainer an instance."""

    has_tracker = False  # it is a local variable of verl's `fit`

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with self._fitting():
            result = super().fit(*args, **kwargs)  # type: ignore[misc]
        return self.fit_on(result) if inspect.isawaitable(result) else result

    async def fit_on(self, fitting: Awaitable[Any]) -> Any:
        """Wait for verl's `fit`, and for the dumps, for which a `fit` that can wait does not."""
        with self._fitting():
            try:
                return await fitting
            finally:
                self._shutdown_dump_executor()  # type: ignore[attr-defined]

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Let verl's functions know the trainer, and name an actor that dies."""
        token = fitting.set(self)
        try:
            yield
        except ray.exceptions.RayError:
            RolloutGuard(functools.partial(rollout_actors, self), tolerated=0).raise_if_node_died()
            raise
        finally:
            fitting.reset(token)

    def _get_gen_batch(self, batch: Any) -> Any:
        batch = super()._get_gen_batch(batch)  # type: ignore[misc]
        # for the reward manager, whose weights and scorers may have a schedule
        batch.non_tensor_batch["global_steps"] = np.full(len(batch), self.global_steps)
        return batch

    def _log_rollout_data(self, batch: Any, infos: dict[str, Any], *args: Any) -> None:
        # not numbered again: the trainer may have left out rows since, or changed their order
        keys = batch.non_tensor_batch.get(KEYS, batch.non_tensor_batch["uid"]).tolist()
        super()._log_rollout_data(batch, {**infos, "uid": keys}, *args)


def extend(trainer: Any, config: Any) -> bool:
    """Check the configuration, and make the trainer one of ours; False without gdpo."""
    state = GdpoLegacyTrainer.first_state(config)
    write_into_run_dir(config)
    if state is not None:
        trainer.__class__ = GdpoLegacyTrainer.in_front_of(type(trainer))
        vars(trainer).update(state)
    return state is not None


@extends(ray_trainer.RayPPOTrainer, "_create_dataloader")
def extend_and_create(create_dataloader: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Check the configuration, and extend the trainer."""
    is_ours = extend(self, self.config)
    if is_ours and not hasattr(self, "_dump_executor"):  # one_step_off_policy makes none
        self._init_dump_executor()
    create_dataloader(self, *args, **kwargs)
    if is_ours:
        self.check_rows()


@extends(ray_trainer, "compute_advantage")
def compute_in_step(compute_advantage: Function, *args: Any, **kwargs: Any) -> Any:
    """Open a step, and keep what came of it.

    In a loop of the user's, without a trainer of verl's, this is done for adv_estimator=gdpo alone.
    """
    given = inspect.signature(compute_advantage).bind(*args, **kwargs).arguments
    data, adv_estimator = given["data"], given["adv_estimator"]
    trainer, is_v1 = fitting.get(), current_step() is not None
    if is_v1 or (trainer is None and adv_estimator != "gdpo"):
        return compute_advantage(*args, **kwargs)
    if adv_estimator == "gdpo":
        refuse_penalty(data)
    settings = trainer.gdpo if trainer else settings_of_loop(given.get("config"))
    keys = keys_of(data.non_tensor_batch["uid"])
    number = trainer.global_steps if trainer else None
    with Step(settings, rows_of(data, keys, settings, number)) as step:
        step.check(adv_estimator)
        result = compute_advantage(*args, **kwargs)
    step.outcome = Outcome.of(result.batch)
    result.non_tensor_batch[KEYS] = np.array(keys, dtype=object)
    lengths = response_lengths(result.batch)
    result.meta_info[METRICS_KEY] = (
        trainer.record(step, lengths)
        if trainer is not None
        else step.metrics(adv_estimator, lengths, by_source=False)
    )
    return result


def settings_of_loop(algorithm: Any) -> GdpoSettings:
    """Return the settings of a loop of the user's, which are checked at each step.

    Raises:
        ValueError: the loop does not pass verl's `algorithm` block.
    """
    if algorithm is None:
        raise ValueError(
            "compute_advantage was called without `config`, so nobody knows algorithm.gdpo. Pass "
            "config=config.algorithm, or call it in the `fit` of a trainer that is derived from "
            "verl's RayPPOTrainer"
        )
    return read_settings(algorithm)


def keys_of(uids: Iterable[str]) -> list[str]:
    """Return a key for each row, of the form that V1 trainers have: `{uid}_{session}_0`."""
    seen: Counter[str] = Counter()
    keys = []
    for uid in uids:
        keys.append(f"{uid}_{seen[uid]}_0")
        seen[uid] += 1
    return keys


def rows_of(data: Any, keys: Sequence[str], settings: GdpoSettings, step: int | None) -> BatchRows:
    """Return the reward columns of verl's batch as rows.

    Raises:
        RewardError: the batch has no reward.
    """
    given = data.non_tensor_batch
    infos = infos_of(data)  # rows may have different names, as in V1
    if infos is None:
        names = data.meta_info.get("reward_extra_keys") or settings.names
        columns = {name: given[name].tolist() for name in names if name in given}
        if not columns.keys() - {"score"}:
            raise RewardError(NO_REWARDS)
        infos = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    sources = [*map(str, given.get("data_source", [""] * len(keys)))]
    return BatchRows.from_keys(keys, infos, sources, [False] * len(keys), step)


def response_lengths(tensors: Any) -> list[int]:
    """Return the length of each response in tokens; what tools have answered counts too."""
    mask_BT = tensors["response_mask"]
    if "attention_mask" in tensors:
        mask_BT = tensors["attention_mask"][:, -mask_BT.shape[1] :]
    lengths: list[int] = (mask_BT != 0).sum(dim=1).tolist()
    return lengths


def refuse_penalty(data: Any) -> None:
    """Raise ValueError if a trainer has changed the scores, because gdpo would ignore that."""
    scores, rewards = (data.batch.get(f"token_level_{what}") for what in ("scores", "rewards"))
    if scores is not None and rewards is not scores and not torch.equal(scores, rewards):
        raise ValueError(
            "token_level_rewards differ from token_level_scores with adv_estimator=gdpo: a penalty "
            "was added to the summed reward, such as KL by algorithm.use_kl_in_reward, and gdpo "
            "would ignore it. Make the penalty a separate reward, or put it into the loss"
        )
