"""A run that is slow goes on, and one whose trainer stands still ends. A part of `nox -s faults`.

`faults.py` lets a scorer and a collective hang.
"""

import re
import signal

from broken_training import check_hang, hanging_training

from verl_gdpo.run.folder import read_metrics
from verl_gdpo.run.stacks import HANG_FILE

FLOOR_SECONDS = 90


def test_a_slow_judge_and_then_a_trainer_that_is_stopped(tmp_path):
    """The judge becomes fifty times slower, so that a batch takes longer than its limit."""
    training, trigger = hanging_training(
        tmp_path,
        "judge",
        *(f"trainer.hang_minutes={FLOOR_SECONDS / 60}", "reward.num_workers=1"),
        "reward.custom_reward_function.name=judged",
    )
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        trigger.touch()
        training.wait_for(launcher, 3)
        training.process("TaskRunner").send_signal(signal.SIGSTOP)
        output = check_hang(training, launcher)
    assert read_metrics(training.folder)[3]["timing_s/gen"] > FLOOR_SECONDS
    # it may be stopped before it has noted that step 4 began
    where = r"has given no sign of life for \d+ s, in the phase '\w+' of step [34]"
    assert re.search(where, output)
    assert ", stopped: ray::TaskRunner" in (training.folder / HANG_FILE).read_text()
