"""The clock that says when a run makes no progress, with made-up times; and its file."""

import errno
import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from verl_gdpo.run import heartbeat
from verl_gdpo.run.heartbeat import Clock, Heartbeat, Pulse

FLOOR = 600.0


def after(clock, seconds):
    clock.tick(seconds)
    return clock.is_overdue


def run_phase(clock, name, seconds):
    with clock.phase(name):
        clock.tick(seconds)


def test_the_start_and_the_first_of_each_phase_have_a_floor_of_their_own():
    clock = Clock(FLOOR)
    assert not after(clock, 1800)
    assert after(clock, 1)
    for name in ("gen", "update_actor"):
        with clock.phase(name):
            assert not after(clock, 7200)
            assert after(clock, 1)
    with clock.phase("old_log_prob"):
        clock.tick(1)
    with clock.phase("old_log_prob"):
        assert not after(clock, 600)
        assert after(clock, 1)


def test_the_limit_is_five_times_the_longest():
    clock = Clock(FLOOR)
    for seconds in (200, 900, 100):
        run_phase(clock, "update_actor", seconds)
    with clock.phase("update_actor"):
        assert not after(clock, 4500)
        assert after(clock, 1)
    assert not clock.is_overdue  # the end of a phase is progress


def test_what_is_inside_is_not_part_of_a_phase():
    clock = Clock(FLOOR)
    with clock.phase("step"):
        clock.tick(150)
        run_phase(clock, "update_actor", 1000)
        clock.tick(50)
    with clock.phase("step"):
        assert (clock.current, clock.limit) == ("step", 5 * 200)
        with clock.phase("update_actor"):
            assert (clock.current, clock.limit) == ("update_actor", 5 * 1000)


def test_phases_may_overlap():
    """A coroutine of `one_step_off_policy` goes on generating while the step waits for it."""
    clock = Clock(FLOOR)
    step, generation, waiting = (clock.phase(name) for name in ("step", "generate", "gen"))
    step.__enter__()
    generation.__enter__()
    waiting.__enter__()
    clock.tick(900)
    generation.__exit__(None, None, None)
    assert clock.current == "gen"
    clock.tick(100)
    waiting.__exit__(None, None, None)
    assert clock.current == "step"
    with clock.phase("gen"):
        assert clock.limit == 5 * 1000


def test_a_phase_that_raises_has_ended():
    clock = Clock(FLOOR)
    with pytest.raises(KeyError), clock.phase("gen"):
        raise KeyError
    assert clock.current == heartbeat.BETWEEN


def test_a_validation_twenty_times_a_step_goes_on():
    """Steps of 60 s, and a validation of 20 minutes in which a sample ends every 100 s."""
    clock = Clock(FLOOR)
    for _ in range(3):
        run_phase(clock, "gen", 60)
    for _ in range(2):
        with clock.phase("testing"):
            for _ in range(12):
                assert not after(clock, 100)
                clock.progress()


def test_a_judge_that_is_ten_times_slower_goes_on():
    """A sample takes 8 s of a judge until step 30, and 80 s from then on."""
    clock = Clock(FLOOR)
    for step in range(40):
        with clock.phase("gen"):
            for _ in range(16):
                assert not after(clock, 8 if step < 30 else 80)
                clock.progress()
    with clock.phase("gen"):  # and a judge that never answers again does not
        assert after(clock, 5 * 16 * 80 + 1)


def test_a_run_that_is_stopped_and_goes_on_loses_no_time(tmp_path, monkeypatch):
    """Ctrl-Z and fg: the launcher does not look for an hour."""
    seconds = iter([0, 1, 2, 3602, 3603, 3613, 3614])
    # the module's own clock: the whole process's would be asked by other threads too
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    Heartbeat(1, "gen", 3, 5, limit=10).write(tmp_path)
    pulse = Pulse(tmp_path)
    assert [pulse.look(most=2) for _ in range(4)] == [None] * 4
    dead = Heartbeat(1, "gen", 3, 5, limit=10)
    assert [pulse.look(most=10) for _ in range(2)] == [dead, dead]


def test_each_write_is_a_beat(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(tmp_path)
    beat = Heartbeat(1, "gen", 3, 5, limit=10)
    for _ in range(5):
        now[0] += 9
        assert pulse.look(most=60) is None  # also without a file
    for count in range(5):
        beat.write(tmp_path)
        os.utime(tmp_path / heartbeat.FILE, ns=(count, count))
        now[0] += 9
        assert pulse.look(most=60) is None
    now[0] += 11
    assert pulse.look(most=60) == beat
    heartbeat.remove(tmp_path)
    assert pulse.look(most=60) is None


def test_a_disk_that_is_away_is_no_hang(tmp_path, monkeypatch):
    def away(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    Heartbeat(1, "gen", 3, 5, limit=0).write(tmp_path)
    pulse = Pulse(tmp_path)
    monkeypatch.setattr(os, "stat", away)
    assert [pulse.look(most=60) for _ in range(3)] == [None] * 3


def test_a_full_disk_is_no_hang(tmp_path, monkeypatch):
    beat = Heartbeat(1, "gen", 3, 5, limit=10)
    beat.write(tmp_path)
    file = tmp_path / heartbeat.FILE
    os.utime(file, ns=(1, 1))
    with ExitStack() as stack:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(heartbeat.Path, "write_text", lambda *_: 1 / 0)
        beat.write(tmp_path)
    assert os.stat(file).st_mtime_ns > 1
    file.write_text("{")
    assert Heartbeat.read(tmp_path) is None


def test_a_loop_without_phases_may_take_two_hours():
    """A `fit` of the user's own, with timers that we do not know."""
    clock = Clock(FLOOR, heartbeat.BETWEEN)
    assert not after(clock, 7200)
    assert after(clock, 1)
