"""Where the folder of a run is that somebody renames, deletes or replaces."""

import shutil

import pytest

from verl_gdpo.tools.run.held_folder import HeldFolder


@pytest.fixture
def held(tmp_path):
    run = tmp_path / "run"
    (run / "metrics").mkdir(parents=True)
    with HeldFolder(run) as folder:
        yield folder


def test_a_folder_that_stays(held):
    assert held.loss() == ""
    assert held.place() == held.path
    assert held.follow(held.path / "metrics" / "1.jsonl") == held.path / "metrics" / "1.jsonl"


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_is_renamed(held, tmp_path, is_made_again):
    """verl makes it again, for rollouts and checkpoints."""
    held.path.rename(tmp_path / "moved")
    if is_made_again:
        (held.path / "rollouts").mkdir(parents=True)
    assert held.place() == tmp_path / "moved"
    assert held.follow(held.path / "metrics" / "1.jsonl") == tmp_path / "moved/metrics/1.jsonl"
    assert held.follow(tmp_path / "else.jsonl") == tmp_path / "else.jsonl"
    assert held.loss().startswith(f"the run folder {held.path} is gone: it is now {tmp_path}/moved")
    if not is_made_again:
        (tmp_path / "moved").rename(held.path)
        assert held.loss() == ""


def test_a_folder_above_it_is_renamed(tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    with HeldFolder(run) as held:
        (tmp_path / "runs").rename(tmp_path / "old")
        assert held.place() == tmp_path / "old" / "one"


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_is_deleted(held, is_made_again):
    shutil.rmtree(held.path)
    if is_made_again:
        (held.path / "metrics").mkdir(parents=True)
    assert held.place() is None
    assert held.follow(held.path / "metrics" / "1.jsonl") is None
    assert f"{held.path} is gone: it was deleted. The training goes on" in held.loss()


def test_a_disk_that_is_away(held, tmp_path, monkeypatch):
    """Its name is there, and nothing of the run under it."""
    monkeypatch.setattr(HeldFolder, "_name", lambda self: str(tmp_path))
    held.path.rename(tmp_path / "elsewhere")
    held.path.mkdir()
    assert held.place() is None
    assert "its disk is away, or something else is in its place" in held.loss()
