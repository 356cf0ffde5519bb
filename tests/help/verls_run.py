"""What stands around verl's `run_ppo` in a process with our plugins, in the order of the calls."""

from stand_in import stand_in

from verl_gdpo.hooks.driver import check_and_run
from verl_gdpo.tools.run.record import record_and_run


def run_with_plugins(run_ppo, config, *args, **kwargs):
    """Call `run_ppo` as verl's main module does: checked by the core, then recorded."""
    recorded = stand_in(record_and_run, run_ppo)
    return stand_in(check_and_run, recorded)(config, *args, **kwargs)
