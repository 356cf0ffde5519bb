"""A run whose trainer stands still ends.

`faults.py` lets a scorer and a collective hang.
"""

import signal

from broken_training import SAVED, Training, check_hang

from verl_gdpo.tools.run.stop_conditions import HANG_FILE


def test_a_trainer_that_is_stopped(tmp_path):
    training = Training(tmp_path, "trainer.hang_minutes=1")
    with training.started() as launcher:
        training.wait_for(launcher, SAVED)
        training.process("TaskRunner").send_signal(signal.SIGSTOP)
        output = check_hang(training, launcher)
    assert ", stopped: ray::TaskRunner" in output
    assert ", stopped: ray::TaskRunner" in (training.folder / HANG_FILE).read_text()
