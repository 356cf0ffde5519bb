"""The lines of verl's console logger, as verl writes them and Ray prints them."""

import math

import numpy as np
from verl.utils.logger.aggregate_logger import concat_dict_to_str

from verl_gdpo.tools.run_folder.console_log import ConsoleReader, read_console_log

VALUES = {
    "gdpo/a: b/mean": 0.25,
    "critic/score/mean": np.float64(1.5),
    "val-aux/x - y/acc/mean@1": np.float32(0.5),
    "actor/lr": 1e-06,
    "training/global_step": 3,
    "actor/nan": math.nan,
    "text": "left out by verl",
}
RAY = "\x1b[36m(TaskRunnerV1 pid=32389)\x1b[0m "


def test_every_number_of_a_line_is_read(tmp_path):
    log = tmp_path / "train.log"
    text = f"Total training steps: 3\n{RAY}{concat_dict_to_str(VALUES, step=3)}\n"
    log.write_text(f"{text}step:4 - a:1.0\nfootstep:5 - a:1.0\n(pid=1) step:6 - a:2.0")
    steps = read_console_log(log)
    assert list(steps) == [3, 4]  # the last line has no end yet
    nan = steps[3].pop("actor/nan")
    expected = {name: value for name, value in VALUES.items() if not isinstance(value, str)}
    del expected["actor/nan"]
    # A name with the sign between two values is cut.
    del expected["val-aux/x - y/acc/mean@1"]
    cut = {"y/acc/mean@1": 0.5}
    assert math.isnan(nan) and steps[3] == {**expected, **cut}


def test_a_log_is_read_on_while_it_grows(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step:1 - a:1.0\n")
    reader = ConsoleReader(log, log.stat().st_size)
    assert list(reader.new()) == []
    with log.open("a") as file:
        file.write("step:2 - a:")
        file.flush()
        assert list(reader.new()) == []
        file.write("2.0\n")
    assert list(reader.new()) == [(2, {"a": 2.0})]
