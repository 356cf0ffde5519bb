"""The functions of verl that `verl-gdpo check` calls; none of them starts Ray or loads a model.

Relies on verl 0.9: `utils.config.validate_config` with `need_reference_policy` and `need_critic`;
`get_trainer_cls`, `ADV_ESTIMATOR_REGISTRY`, `load_reward_manager` and `DataProto.from_dict`.
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

VERSION: str = verl.__version__


def what_validation_prints(config: Any) -> list[str]:
    """Let verl validate the configuration and return the lines that it prints.

    Raises:
        Exception: the exception of verl for a wrong configuration.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with redirect_stdout(StringIO()) as printed:
        validate_config(config, need_reference_policy(config), need_critic(config))
    return [line for line in printed.getvalue().splitlines() if "checks passed" not in line]


def import_parts(config: Any) -> None:
    """Import verl's trainer and reward managers, with everything that they import.

    Raises:
        ImportError: a module cannot be imported; `name` is that module of verl.
    """
    trainer = "v1" if config.trainer.get("use_v1", False) else "ray_trainer"
    for part in (f"trainer.ppo.{trainer}", "experimental.reward_loop.reward_manager"):
        try:
            importlib.import_module(f"verl.{part}")
        except ImportError as error:
            raise ImportError(str(error), name=f"verl.{part}") from error


def known_estimators() -> list[str]:
    """Names for `algorithm.adv_estimator`, with those that other modules registered."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return sorted({str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY})


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
        non_tensors={name: _single(value) for name, value in columns.items()},
    )


def _single(value: Any) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array
