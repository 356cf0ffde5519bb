"""The watch over a trainer: what it reads, when it ends the run, and how."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf
from verl.utils import debug, profiler

from verl_gdpo.hooks import hang
from verl_gdpo.hooks.hang import HangError
from verl_gdpo.run.heartbeat import Heartbeat


def trainer(folder, **keys):
    recipe = {"recipes": "verl-gdpo", "run_dir": str(folder)}
    config = OmegaConf.create({**recipe, "trainer": {"hang_minutes": 10, **keys}})
    return SimpleNamespace(config=config, global_steps=7)


@pytest.fixture
def quick(monkeypatch):
    """A watch of a process without Ray."""
    monkeypatch.setattr(hang, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(hang, "_looked_at", lambda _: ("Busy or silent: worker 3", "the stacks"))
    monkeypatch.setattr(hang, "_being_scored", lambda _: "; reward worker 0 scores row 5")
    monkeypatch.setattr(hang.Watch, "_ask_for_samples", lambda _: None)
    monkeypatch.setattr(hang.Watch, "_actors", lambda *_: {})
    monkeypatch.setattr(hang.os, "_exit", lambda code: codes.append(code))
    codes = []
    yield codes
    hang.end_watch()


@pytest.mark.parametrize("minutes", [True, -1, "10", float("nan"), [1]])
def test_a_limit_that_is_no_number_of_minutes(tmp_path, minutes):
    with pytest.raises(ValueError, match=r"trainer\.hang_minutes=.*expected minutes"):
        hang.seconds_of(trainer(tmp_path, hang_minutes=minutes).config)


def test_the_limit_of_a_configuration():
    seconds = [
        hang.seconds_of(OmegaConf.create({"trainer": keys}))
        for keys in ({}, {"hang_minutes": 2.5}, {"hang_minutes": 0})
    ]
    assert seconds == [600, 150, 0]


def test_verls_timers_are_phases(tmp_path, quick):
    timing = {}
    with hang.watched(trainer(tmp_path)):
        clock = hang._watch.clock
        with debug.marked_timer("gen", timing, color="red"):
            assert clock.current == "gen"
        assert clock.current != "gen"
    assert timing["gen"] > 0
    assert profiler.marked_timer is debug.marked_timer  # by which recipes import it
    with debug.marked_timer("gen", timing):  # nobody watches
        pass


def test_a_setup_that_fails_ends_its_watch(tmp_path, quick):
    with hang.watched_from(trainer(tmp_path)):
        pass
    assert hang._watch is not None
    with pytest.raises(ZeroDivisionError), hang.watched_from(trainer(tmp_path)):
        1 / 0  # noqa: B018
    assert hang._watch is None


def test_a_watch_starts_no_ray(tmp_path):
    assert not ray.is_initialized()
    hang.Watch(trainer(tmp_path), 1.0)._ask_for_samples()
    assert not ray.is_initialized()


def test_a_trainer_that_waits_for_ever_gets_an_error(tmp_path, quick, monkeypatch, capsys):
    monkeypatch.setattr(hang, "RAISED_SECONDS", 0.0)
    with (
        pytest.raises(HangError) as error,
        hang.watched(trainer(tmp_path, hang_minutes=0.1 / 60)),
        debug.marked_timer("update_actor", {}),
    ):
        threading.Event().wait(60)
    assert "in the phase 'update_actor' of step 7" in str(error.value)
    assert "Busy or silent: worker 3; reward worker 0 scores row 5. The stacks" in str(error.value)
    text = (tmp_path / "hang.txt").read_text()
    assert text.startswith(f"HangError: {error.value}") and text.endswith("the stacks")
    assert "the stacks" in capsys.readouterr().err
    assert not (tmp_path / "heartbeat.json").exists()
    while not quick:  # then the process ends, whatever still blocks it
        time.sleep(0.01)
    assert quick == [1]


def test_an_error_in_the_watch_ends_nothing(tmp_path, quick, monkeypatch, caplog):
    """It would end the run: its launcher would see no heartbeat."""
    monkeypatch.setattr(hang.Watch, "_ask_for_samples", lambda _: 1 / 0)
    with hang.watched(trainer(tmp_path)):
        for _ in range(2):
            (tmp_path / "heartbeat.json").unlink(missing_ok=True)
            while not Heartbeat.read(tmp_path):
                time.sleep(0.01)
        assert hang._watch.is_alive()
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_hang_of_which_nothing_can_be_read_ends_the_run(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(hang, "RAISED_SECONDS", 0.0)
    monkeypatch.setattr(hang, "_looked_at", lambda _: 1 / 0)
    with (
        pytest.raises(HangError, match="Why is not known: ZeroDivisionError"),
        hang.watched(trainer(tmp_path, hang_minutes=0.1 / 60)),
    ):
        threading.Event().wait(60)


def test_a_run_that_moves_again_goes_on(tmp_path, quick, monkeypatch):
    """To look takes up to minutes, in which a process may answer again."""
    looks = []

    def look_while_it_moves(_):
        looks.append(hang._watch.clock.seconds)
        hang._watch.clock.progress()
        return "", ""

    monkeypatch.setattr(hang, "_looked_at", look_while_it_moves)
    with hang.watched(trainer(tmp_path, hang_minutes=0.1 / 60)):
        while len(looks) < 2:
            time.sleep(0.01)
    assert not quick
    assert not (tmp_path / "hang.txt").exists()


def test_a_trainer_that_fails_meanwhile_keeps_its_error(tmp_path, quick, monkeypatch):
    looking, go_on = threading.Event(), threading.Event()

    def look(_):
        looking.set()
        go_on.wait(60)
        return "", ""

    monkeypatch.setattr(hang, "_looked_at", look)
    monkeypatch.setattr(hang, "ANSWER_SECONDS", 0.0)
    with (
        pytest.raises(KeyError),
        hang.watched(trainer(tmp_path, hang_minutes=0.1 / 60)),
    ):
        looking.wait(60)
        watch = hang._watch
        raise KeyError("its own")
    go_on.set()
    watch.join(60)
    assert not quick
    assert not (tmp_path / "hang.txt").exists()


def test_the_heartbeat_ends_with_the_watch(tmp_path, quick):
    with hang.watched(trainer(tmp_path)), debug.marked_timer("gen", {}):
        while not (beat := Heartbeat.read(tmp_path)):
            time.sleep(0.01)
    assert beat == Heartbeat(os.getpid(), "gen", 7, samples=0, limit=600)
    assert not (tmp_path / "heartbeat.json").exists()
    assert hang._watch is None


def test_switched_off(tmp_path, quick):
    with hang.watched(trainer(tmp_path, hang_minutes=0)):
        assert hang._watch is None
    hang.begin_heartbeat(trainer(tmp_path, hang_minutes=0).config)
    assert not [*tmp_path.iterdir()]


def test_the_start_has_its_limit_before_there_is_a_trainer(tmp_path):
    hang.begin_heartbeat(trainer(tmp_path, hang_minutes=5).config)
    assert Heartbeat.read(tmp_path).limit == 900
    hang.begin_heartbeat(trainer(tmp_path / "not there").config)
    assert not (tmp_path / "not there").exists()
