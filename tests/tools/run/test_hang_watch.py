"""When a run that logs no step has hung, with made-up times; its stacks, and how it is ended."""

import errno
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from launched import IMPATIENT, children_of, errors_of, step_line

from verl_gdpo.tools.run import stop_conditions
from verl_gdpo.tools.run.stop_conditions import HangWatch, stacks_of, write_stacks
from verl_gdpo.tools.run_folder.folder import MetricsReader

MINUTE, FLOOR = 60.0, 30 * 60.0
TRAINED = ("timing_s/update_actor",)
VALIDATED, SAVED = "timing_s/testing", "timing_s/save_checkpoint"
SETTINGS = {"logger": ["console", "file"], "test_freq": -1, "save_freq": None}


class MadeUpRun:
    """A run whose time and lines a test makes up."""

    def __init__(self, folder, **settings):
        folder.mkdir(exist_ok=True)
        self.file, self.now = folder / "1.jsonl", 1000.0
        self.file.touch()  # the launcher makes it
        self.watch = HangWatch(self.file, {**SETTINGS, **settings}, clock=lambda: self.now)

    def silent_for(self, seconds, most=MINUTE):
        """Whether it counts as hung at any moment of this time; the launcher looks all 10 s."""
        overdue = False
        for _ in range(int(seconds / 10)):
            self.now += 10
            overdue |= self.watch.is_overdue(most)
        return overdue

    def logs(self, *parts, **values):
        with self.file.open("a") as file:
            file.write(step_line(1, **{**dict.fromkeys(parts, 1.0), **values}))
        return self.watch.is_overdue(MINUTE)

    def step(self, seconds, *parts):
        """Whether it counts as hung in a step that takes this time."""
        return self.silent_for(seconds) or self.logs(*TRAINED, *parts)


def test_the_limits_before_and_after_the_first_step(tmp_path):
    run = MadeUpRun(tmp_path)
    assert not run.step(120 * MINUTE)
    assert run.watch.limit == 5 * 120 * MINUTE
    short = MadeUpRun(tmp_path / "other")
    assert short.silent_for(120 * MINUTE + 10)


def test_the_floor_and_five_times_the_longest_step(tmp_path):
    run = MadeUpRun(tmp_path)
    for seconds in (60, 90, 30):
        assert not run.step(seconds)
    assert run.watch.limit == FLOOR
    assert not run.silent_for(FLOOR)
    assert run.silent_for(10)
    assert not run.logs(*TRAINED)  # a line after all
    assert run.watch.limit == 5 * (FLOOR + 10)


def test_steps_that_grow_go_on(tmp_path):
    """Each takes four times as long as the one before it, up to 17 hours."""
    run = MadeUpRun(tmp_path)
    assert not any([run.step(MINUTE * 4**number) for number in range(6)])


@pytest.mark.parametrize(("frequency", "part"), [("test_freq", VALIDATED), ("save_freq", SAVED)])
def test_a_first_validation_or_checkpoint_may_take_two_hours(tmp_path, frequency, part):
    """Steps of a minute; then one of 40 minutes, as the next ones may be."""
    run = MadeUpRun(tmp_path, **{frequency: 20})
    for _ in range(19):
        assert not run.step(MINUTE)
    assert not run.step(40 * MINUTE, part)
    assert run.watch.limit == 5 * 40 * MINUTE
    hung = MadeUpRun(tmp_path / "other", **{frequency: 20})
    assert not hung.step(MINUTE)
    assert hung.silent_for(120 * MINUTE + 10)


def test_a_validation_before_training_says_how_long_one_takes(tmp_path):
    """The first step may take its two hours all the same."""
    run = MadeUpRun(tmp_path, test_freq=20)
    assert not run.silent_for(40 * MINUTE)
    run.logs("val-aux/x/format/mean@1")
    assert run.watch.limit == 5 * 40 * MINUTE
    quick = MadeUpRun(tmp_path / "other", test_freq=20)
    quick.logs("val-core/x/acc/mean@1")
    assert quick.watch.limit == 120 * MINUTE
    quick.step(MINUTE)
    assert quick.watch.limit == FLOOR


def test_a_critic_that_warms_up_is_no_update_of_the_policy(tmp_path):
    run = MadeUpRun(tmp_path)
    run.silent_for(MINUTE)
    run.logs("timing_s/update_critic")
    assert run.watch.limit == 120 * MINUTE


def test_time_in_which_the_launcher_stood_still_does_not_count(tmp_path):
    """Ctrl-Z and fg: it does not look for ten hours."""
    run = MadeUpRun(tmp_path)
    run.step(MINUTE)
    run.now += 36000
    assert not run.watch.is_overdue(most=2.0)
    assert run.watch.silence == 2.0


def test_a_file_that_is_deleted_is_no_hang(tmp_path):
    """verl writes on into it, where nobody can read."""
    run = MadeUpRun(tmp_path)
    run.step(MINUTE)
    run.file.unlink()
    assert not run.silent_for(10 * FLOOR)
    run.file.touch()
    assert run.silent_for(FLOOR + 20)


def test_a_disk_that_is_away_is_no_hang(tmp_path, monkeypatch):
    def away(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    run = MadeUpRun(tmp_path)
    run.step(MINUTE)
    run.silent_for(FLOOR - 10)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsReader, "new", away)
        assert not run.silent_for(10 * FLOOR)
    assert not run.silent_for(FLOOR - 10)
    assert run.silent_for(20)


@pytest.mark.parametrize("settings", [{"hang_minutes": 0}, {"logger": ["console"]}])
def test_a_run_that_is_not_watched(tmp_path, settings):
    """Without the file logger, no line ever comes."""
    assert not MadeUpRun(tmp_path, **settings).silent_for(100 * FLOOR)


def test_the_floor_of_a_configuration(tmp_path):
    for minutes, seconds in [(2.5, 150), (0, 0), ("${oc.env:MINUTES}", FLOOR)]:
        assert MadeUpRun(tmp_path, hang_minutes=minutes).watch.floor == seconds
    assert MadeUpRun(tmp_path).watch.floor == FLOOR
    for minutes in (True, -1, "10", None, float("nan"), [1]):
        with pytest.raises(ValueError, match=r"trainer\.hang_minutes=.*expected minutes"):
            MadeUpRun(tmp_path, hang_minutes=minutes)


# a driver that records its start as verl's does, and holds the interpreter from then on
HANGS = """
from pathlib import Path
from verl_gdpo.tools.run import stacks
from verl_gdpo.tools.run import starts
stacks.register_if_asked()  # by the launcher
trainer = {{"logger": ["file"], "hang_minutes": {minutes!r}}}
starts.write(Path({folder!r}), starts.here({{"trainer": trainer}}), "")
import re; re.match("(a*)*b", "a" * 60)
"""


def hung(folder, minutes, monkeypatch):
    monkeypatch.setattr("launched.LAUNCHER", ["-c", IMPATIENT])
    return errors_of(folder, HANGS.format(folder=str(folder), minutes=minutes))


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    exit_code, errors = hung(tmp_path, 0.001, monkeypatch)
    assert exit_code == 1
    assert re.match(r"HangError: no step was logged for \d+ s, and \d+ s were allowed", errors)
    assert str(tmp_path / "hang.txt") in errors
    assert 'File "<string>", line' in (tmp_path / "hang.txt").read_text()
    assert not children_of(tmp_path)
    assert "HangError" in (tmp_path / "starts" / "1" / "end.yaml").read_text()


def test_a_limit_that_is_no_number_ends_the_run_at_once(tmp_path, monkeypatch):
    exit_code, errors = hung(tmp_path, "soon", monkeypatch)
    assert exit_code == 1
    assert errors.startswith("trainer.hang_minutes='soon': expected minutes, such as 30")


# --- stacks --------------------------------------------------------------------------------------

BODIES = {
    "waits": "import threading; threading.Event().wait()",
    "holds the interpreter": "import re; re.match('(a*)*b', 'a' * 60)",
}
METHOD = """
    def actor_method_executor():
        threading.Event().wait()
    import threading; actor_method_executor()
"""


@pytest.fixture
def started(tmp_path):
    processes = []

    def start(body, register=True):
        (tmp_path / "stuck.py").write_text(
            f"from verl_gdpo.tools.run import stacks\n{'stacks.register()' if register else ''}\n"
            f"def stuck_here():\n    print(flush=True)\n    {body}\nstuck_here()\n"
        )
        process = subprocess.Popen([sys.executable, tmp_path / "stuck.py"], stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", BODIES)
def test_its_own_handler_writes_them(started, what):
    process = started(BODIES[what])
    for _ in range(2):  # each time anew
        text = stacks_of(process.pid)
        assert text.count("in stuck_here") == 1, text
        assert text.startswith(f"process {process.pid}, ")


def test_processes_without_stacks(started):
    process = started(BODIES["waits"], register=False)
    assert "it does not load verl-gdpo" in stacks_of(process.pid)
    assert process.poll() is None  # no signal was sent
    process.kill()
    process.wait()
    assert str(process.pid) in stacks_of(process.pid)


def test_processes_that_are_busy_are_named(started, tmp_path, monkeypatch):
    """One waits, one runs a method as Ray calls it, and one is stopped."""
    waits, busy, stopped = (started(body) for body in (BODIES["waits"], METHOD, BODIES["waits"]))
    stopped.send_signal(signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    monkeypatch.setattr(stop_conditions, "WRITTEN_SECONDS", 0.3)
    file = tmp_path / "hang.txt"
    processes = [psutil.Process(one.pid) for one in (waits, busy, stopped)]
    names = [line.split(":")[0] for line in write_stacks(processes, file)]
    assert names == [f"process {busy.pid}, sleeping", f"process {stopped.pid}, stopped"]
    assert file.read_text().count("in stuck_here") == 2
    assert write_stacks(processes[:1], tmp_path / "no" / "folder.txt") == []


def test_stacks_of_a_process_whose_command_is_no_text(tmp_path, monkeypatch):
    """Python has such bytes as lone surrogates, which no encoding writes."""
    monkeypatch.setattr(stop_conditions, "stacks_of", lambda process_id: "train \udcff ä.py")
    file = tmp_path / "hang.txt"
    write_stacks([psutil.Process()], file)
    assert file.read_text(encoding="utf-8") == "train \\udcff ä.py\n"
