"""Which of its own folders Ray cannot write, for users without a home of their own."""

import os

import pytest

from verl_gdpo.tools.run.ray_folders import CLUSTER, unwritable


@pytest.fixture
def no_folder(tmp_path):
    """A path under which nobody can make a folder, root neither."""
    file = tmp_path / "file"
    file.touch()
    return file


def test_a_home_in_which_ray_cannot_write_its_token(tmp_path, no_folder):
    environment = {"HOME": str(no_folder), "RAY_TMPDIR": str(tmp_path)}
    ((folder, answer),) = unwritable(environment).items()
    assert folder == f"{no_folder}/.ray"
    assert f"{no_folder} is no folder. Set HOME to a folder of your own" in answer
    assert unwritable({**environment, "HOME": str(tmp_path / "new")}) == {}


def test_a_user_id_without_a_name_and_without_a_home(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody has it
    ((folder, answer),) = unwritable({"RAY_TMPDIR": str(tmp_path)}).items()
    assert folder == "~/.ray"
    assert "you have no HOME. Set HOME to a folder of your own" in answer


@pytest.mark.parametrize(
    "more",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN": "t"},
        {"RAY_AUTH_TOKEN_PATH": "/t"},
        {"RAY_ADDRESS": "10.0.0.1:6379"},
    ],
)
def test_ray_writes_no_token(tmp_path, no_folder, more):
    assert unwritable({"HOME": str(no_folder), "RAY_TMPDIR": str(tmp_path), **more}) == {}


def test_a_home_that_has_a_token_is_only_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) == str(tmp_path / "ray"))
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    (tmp_path / "ray").mkdir()
    environment = {"HOME": str(tmp_path / "home"), "RAY_TMPDIR": str(tmp_path)}
    assert [*unwritable(environment)] == [str(token.parent)]
    token.touch()
    assert unwritable(environment) == {}


def test_a_folder_of_sessions_that_belongs_to_another_user(tmp_path, monkeypatch):
    """As /tmp/ray does, if another user's program has made it."""
    sessions = tmp_path / "ray"
    sessions.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != sessions and mode != os.R_OK)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    environment = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    ((folder, answer),) = unwritable(environment).items()
    assert folder == str(sessions)
    owner = sessions.stat().st_uid
    assert f"{sessions} belongs to user {owner}, and you are user 12345" in answer
    assert "Set RAY_TMPDIR to a short folder of your own, such as RAY_TMPDIR=/tmp/ray_" in answer
    assert unwritable(environment, session=str(tmp_path / "other")) == {}


def test_a_cluster_that_runs_is_joined(tmp_path, no_folder):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / CLUSTER).write_text("10.0.0.1:6379")
    assert unwritable({"HOME": str(no_folder), "RAY_TMPDIR": str(tmp_path)}) == {}
