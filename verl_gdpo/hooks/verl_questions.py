"""The functions of verl that `verl-gdpo check` calls; none of them starts Ray or loads a model.

Relies on verl 0.9: `utils.config.validate_config` with `need_reference_policy` and `need_critic`;
`get_trainer_cls`, `load_reward_manager`, `get_dataset_class`, `DataProto.from_dict`; the names in
`ADV_ESTIMATOR_REGISTRY`, `POLICY_LOSS_REGISTRY`, `RolloutReplicaRegistry._registry`,
`_agent_loop_registry` and `Tracking.supported_backend`; and `kl_penalty`, which raises
NotImplementedError.
"""

import importlib
from collections.abc import Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from typing import Any

import numpy as np
import torch
import verl

from verl_gdpo.hooks.extend import load_all

VERSION: str = verl.__version__


def what_validation_prints(config: Any) -> list[str]:
    """Let verl validate the configuration, except the critic's model; return what it prints.

    That model would be looked up on a hub.

    Raises:
        Exception: the exception of verl for a wrong configuration.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    without_model = deepcopy(config)
    without_model.critic.model = None
    with redirect_stdout(StringIO()) as printed:
        validate_config(without_model, need_reference_policy(config), need_critic(config))
    return [line for line in printed.getvalue().splitlines() if "checks passed" not in line]


def import_parts(config: Any) -> None:
    """Import verl's trainer and reward managers, and all that we put in the place of verl's.

    Raises:
        ImportError: a module cannot be imported; `name` is that module of verl.
    """
    trainer = "v1" if config.trainer.get("use_v1", False) else "ray_trainer"
    for part in (f"trainer.ppo.{trainer}", "experimental.reward_loop.reward_manager"):
        try:
            importlib.import_module(f"verl.{part}")
        except ImportError as error:
            raise ImportError(str(error), name=f"verl.{part}") from error
    load_all()


def known_names(key: str) -> list[str]:
    """Names that verl knows for a key of the configuration, with those that others registered."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    names = {
        "algorithm.adv_estimator": ADV_ESTIMATOR_REGISTRY,
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        "actor_rollout_ref.rollout.name": RolloutReplicaRegistry._registry,
        "actor_rollout_ref.rollout.agent.default_agent_loop": _agent_loop_registry,
        "trainer.logger": Tracking.supported_backend,
    }[key]
    return sorted({str(getattr(name, "value", name)) for name in names})


def make_rollout_config_and_dataset_class(config: Any) -> None:
    """Make what verl makes of the configuration in its workers, without starting them.

    Raises:
        Exception: verl refuses `actor_rollout_ref.rollout` or `data.custom_cls`.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import get_dataset_class

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    with redirect_stdout(StringIO()):
        get_dataset_class(config.data)


def trains_critic(config: Any) -> bool:
    """Whether verl trains a critic."""
    from verl.trainer.ppo.utils import need_critic

    return bool(need_critic(config))


def make_v1_trainer(config: Any) -> None:
    """Make the trainer, whose constructor checks the configuration and starts nothing.

    Raises:
        Exception: verl or the trainer refuses the configuration.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    get_trainer_cls(config.trainer.v1.trainer_mode)(deepcopy(config))


def make_reward_manager(config: Any, tokenizer: Any, **server: Any) -> Any:
    """Make the configured reward manager; `server` holds keywords for a reward model."""
    from verl.trainer.ppo.reward import load_reward_manager

    return load_reward_manager(config, tokenizer, **server)


def one_rollout(prompt: list[int], response: list[int], columns: Mapping[str, Any]) -> Any:
    """Return a batch of one rollout, as verl's agent loop passes it to a reward manager.

    Args:
        prompt, response: token ids.
        columns: {name: value} of the non-tensor columns.
    """
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([response]),
            "attention_mask": torch.ones(1, len(prompt) + len(response), dtype=torch.int64),
        },
        non_tensors={k: np.fromiter([value], dtype=object) for k, value in columns.items()},
    )
