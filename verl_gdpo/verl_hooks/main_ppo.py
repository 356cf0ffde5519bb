"""Checks the configuration before verl's `run_ppo` starts Ray.

Relies on verl 0.9 `verl.trainer.main_ppo.run_ppo(config, ...)`. The main modules of
`one_step_off_policy` and `fully_async_policy` call it too.
"""

import functools
from collections.abc import Callable
from typing import Any

from verl.trainer import main_ppo

from verl_gdpo.settings.algorithm import settings_of_run
from verl_gdpo.verl_hooks.hang import begin_heartbeat
from verl_gdpo.verl_hooks.trainer_mixin import refuse_trainer


def checked(run_ppo: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run_ppo` extended to check the configuration first."""

    @functools.wraps(run_ppo)
    def check_and_run(config: Any, *args: Any, **kwargs: Any) -> Any:
        if settings_of_run(config) is not None:
            refuse_trainer(config)
            begin_heartbeat(config)
        return run_ppo(config, *args, **kwargs)

    return check_and_run


main_ppo.run_ppo = checked(main_ppo.run_ppo)
