"""Extends `run_ppo` for the main modules that import it; `driver.py` does it for its own.

Relies on verl 0.9 `verl.trainer.main_ppo.run_ppo(config, ...)`, which the main modules of
`one_step_off_policy` and `fully_async_policy` call.
"""

from verl.trainer import main_ppo

from verl_gdpo.verl_hooks.driver import checked

main_ppo.run_ppo = checked(main_ppo.run_ppo)
