"""verl's own parts that `check` tries a configuration on, before anything is started.

Relies on verl 0.9: `utils.config.validate_config` with `need_reference_policy` and `need_critic`;
`get_trainer_cls`, `load_reward_manager` and `DataProto.from_dict`.
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
    """Let verl validate the whole configuration; what is wrong raises what verl raises."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with redirect_stdout(StringIO()) as printed:
        validate_config(config, need_reference_policy(config), need_critic(config))
    return [line for line in printed.getvalue().splitlines() if "checks passed" not in line]


def import_parts(config: Any) -> None:
    """Import the trainer and the reward managers, with all that they need.

    Raises:
        ImportError: its `name` is the module of verl that cannot be imported.
    """
    trainer = "v1" if config.trainer.get("use_v1", False) else "ray_trainer"
    for part in (f"trainer.ppo.{trainer}", "experimental.reward_loop.reward_manager"):
        try:
            importlib.import_module(f"verl.{part}")
        except ImportError as error:
            raise ImportError(str(error), name=f"verl.{part}") from error


def make_v1_trainer(config: Any) -> None:
    """Make a trainer of this mode, which checks the configuration; its `init` would start things.

    Raises:
        Exception: whatever verl, or the trainer, has against the configuration.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    get_trainer_cls(config.trainer.v1.trainer_mode)(deepcopy(config))


def make_reward_manager(config: Any, tokenizer: Any, **server: Any) -> Any:
    from verl.trainer.ppo.reward import load_reward_manager

    return load_reward_manager(config, tokenizer, **server)


def one_rollout(prompt: list[int], response: list[int], columns: Mapping[str, Any]) -> Any:
    """A rollout as verl's agent loop hands it to a reward manager, as a batch of one."""
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
