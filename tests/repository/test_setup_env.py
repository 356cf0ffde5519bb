"""The environments that `setup_env.sh` makes, keeps and switches, with a `uv` that does nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import REPO

# notes each call with what .venv is meanwhile; waits in `pip install` while ./wait is there
UV = """#!/bin/bash
echo "begin $1 $(readlink .venv)" >>calls
case $1 in
  venv) mkdir -p "${@: -1}/bin"; printf '#!/bin/sh\\nexit 1\\n' >"${@: -1}/bin/python"; chmod +x "${@: -1}/bin/python" ;;
  pip) while [ -e wait ]; do sleep .05; done; [ ! -e fail ] || exit 7 ;;
esac
echo "end $1 $(readlink .venv)" >>calls
"""  # noqa: E501


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("setup_env.sh", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    shutil.copytree(REPO / "requirements", tmp_path / "requirements")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def start(checkout, *extras):
    command = [checkout / "setup_env.sh", *extras]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def setup(checkout, *extras):
    """(exit code, the folder that it prints, messages)"""
    process = start(checkout, *extras)
    output, errors = process.communicate(timeout=60)
    return process.returncode, Path(output.rstrip("\n")), errors


def calls(checkout):
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_every_task_of_the_recipes_has_its_packages(hardware):
    """`run.sh math_length` asks for no extra of its own."""
    (extras,) = re.findall(
        rf"^{hardware} = .*verl-gdpo\[(.*?)\]", (REPO / "pyproject.toml").read_text(), re.M
    )
    assert {"math", "plots"} <= {*extras.split(",")}
    pinned = (REPO / "requirements" / f"{hardware}.txt").read_text()
    for name in ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "scipy"):
        assert re.search(rf"^{name}==", pinned, re.M), name


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_made_once(checkout):
    code, venv, _ = setup(checkout, "cpu")
    assert code == 0
    assert venv == (checkout / ".venv").resolve() and venv.name.startswith(".venv-cpu-")
    made = calls(checkout)
    assert setup(checkout, "cpu") == (0, venv, "")
    assert calls(checkout) == made


def test_an_environment_in_use_is_left_alone_when_more_is_asked_for(checkout):
    _, first, _ = setup(checkout, "cpu")
    files = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    _, second, said = setup(checkout, "cpu", "dev")
    assert second != first and (checkout / ".venv").resolve() == second
    assert f"{first.name} is not needed any more" in said
    assert files == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    # and .venv was the first until the second was whole
    assert {line.split()[2] for line in calls(checkout)[-4:]} == {first.name}
    assert setup(checkout, "cpu")[1] == second  # which has all of it
    assert len([line for line in calls(checkout) if line.startswith("begin venv")]) == 2


def test_hardware_asked_for_in_turns_is_made_once_each(checkout):
    folders = [setup(checkout, hardware)[1] for hardware in ("cpu", "gpu", "cpu", "gpu")]
    assert folders[:2] == folders[2:] and folders[0] != folders[1]
    assert (checkout / ".venv").resolve() == folders[1]
    assert len([line for line in calls(checkout) if line.startswith("begin venv")]) == 2


def test_two_first_starts_make_one_environment(checkout):
    (checkout / "wait").touch()
    first = start(checkout, "cpu")
    wait_for(lambda: any(line.startswith("begin pip") for line in calls(checkout)))
    second = start(checkout, "cpu")
    assert "waiting for it" in second.stderr.readline()
    (checkout / "wait").unlink()
    assert first.communicate(timeout=60)[0] == second.communicate(timeout=60)[0] != ""
    assert [line.split()[:2] for line in calls(checkout)].count(["begin", "venv"]) == 1


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_half_an_environment_is_never_used(checkout, how):
    _, old, _ = setup(checkout, "cpu")
    (checkout / "wait").touch()
    count = len(calls(checkout))
    process = start(checkout, "cpu", "dev")
    wait_for(lambda: any(line.startswith("begin pip") for line in calls(checkout)[count:]))
    if how == "killed":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        (checkout / "fail").touch()
        (checkout / "wait").unlink()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert (checkout / ".venv").resolve() == old
    for name in ("wait", "fail"):
        (checkout / name).unlink(missing_ok=True)
    (half,) = {*checkout.glob(".venv-*")} - {old}
    (half / "left").touch()
    code, venv, _ = setup(checkout, "cpu", "dev")
    assert (code, venv) == (0, half)
    assert not (half / "left").exists()


def test_a_folder_of_the_name_is_kept_beside(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").touch()
    code, venv, said = setup(checkout, "cpu")
    assert code == 0 and (checkout / ".venv").resolve() == venv
    (kept,) = checkout.glob(".venv.*/mine")
    assert f"the folder is {kept.parent.name} now" in said
    (checkout / ".venv").unlink()
    (checkout / ".venv").mkdir()
    made = calls(checkout)
    assert setup(checkout, "cpu")[:2] == (0, venv)
    assert calls(checkout) == made


def test_a_folder_of_the_name_in_use_is_not_touched(checkout):
    (checkout / ".venv").mkdir()
    library = checkout / ".venv" / "library.so"
    library.write_bytes(b"code")
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'rb'); "
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
        "print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, library], **pipes) as user:
        user.stdout.readline()
        assert setup(checkout, "cpu")[0] == 2
        assert library.exists() and calls(checkout) == []
