"""A batch and its configuration, as verl's trainers pass them to `compute_advantage`."""

from pathlib import Path

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from quick_composition import compose_quickly
from tensordict import TensorDict
from verl import DataProto

REWARDS = [[1, 1], [1, 0], [0, 1], [0, 0], [3, 1], [3, 1], [-3, 1], [0.5, 1]]
GROUPS = list("aaaabbbb")
GDPO = [
    "algorithm.adv_estimator=gdpo",
    "reward.reward_manager.name=gdpo",
    "actor_rollout_ref.rollout.n=4",
]


def batch(columns=None, keys=None, **meta_info):
    size = len(REWARDS)
    mask = (torch.arange(8)[None, :] <= torch.arange(size)[:, None]).long()
    scores = mask * torch.tensor([sum(row) for row in REWARDS])[:, None]
    return DataProto(
        batch=TensorDict(
            {"token_level_rewards": scores.float(), "response_mask": mask}, batch_size=size
        ),
        non_tensor_batch={"uid": np.array(GROUPS, dtype=object), **(columns or {})},
        meta_info=meta_info,
    )


def algorithm(**settings):
    return OmegaConf.create({"adv_estimator": "gdpo", "gdpo": settings})


def verl_config(*overrides):
    """The configuration of the installed verl, with gdpo as estimator and reward manager."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    return compose_quickly(folder, "ppo_trainer", [*GDPO, *overrides])
