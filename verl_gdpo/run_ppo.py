"""A look at the configuration before verl's `run_ppo` starts Ray, for trainers with their own main.

Relies on verl 0.7.1 to 0.9: `verl.trainer.main_ppo.run_ppo(config, ...)`, by which the main modules
of `one_step_off_policy`, `fully_async_policy` (alone has `async_training` in its configuration) and
verl 0.8's `main_ppo_sync` (alone sets `transfer_queue.enable` before it) start.
"""

import functools
from collections.abc import Callable
from typing import Any

import verl
from packaging.version import Version
from verl.trainer import main_ppo

from verl_gdpo.settings import settings_of_run
from verl_gdpo.support import REFUSED


def checked(run_ppo: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_ppo)
    def check_and_run(config: Any, *args: Any, **kwargs: Any) -> Any:
        if settings_of_run(config) is not None:
            refuse_trainer(config)
        return run_ppo(config, *args, **kwargs)

    return check_and_run


def refuse_trainer(config: Any) -> None:
    """Raise ValueError if `config` is that of a trainer in `REFUSED`."""
    has_v1 = Version(verl.__version__) >= Version("0.9")
    for trainer, is_meant in {
        "fully_async_policy": config.get("async_training") is not None,
        "main_ppo_sync": not has_v1 and config.transfer_queue.enable,
    }.items():
        if is_meant:
            raise ValueError(f"gdpo does not run on {trainer}: {REFUSED[trainer]}")


main_ppo.run_ppo = checked(main_ppo.run_ppo)
