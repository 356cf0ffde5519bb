"""docs/adding_a_task.md in a copy of the repository, block by block, except the training."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPO, tracked_files

PAGE = (REPO / "docs" / "adding_a_task.md").read_text()
EXECUTED = re.findall(
    r"<!-- executed by tests/repository/test_adding_a_task.py -->\n```(\w+)\n(.*?)```",
    PAGE,
    re.DOTALL,
)


@pytest.mark.slow
def test_the_page(tmp_path):
    assert [kind for kind, _ in EXECUTED] == ["python", "bash", "yaml", "yaml", "bash"]
    for path in tracked_files():
        if (
            path.parts[0] in ("verl_gdpo", "data_prep", "recipes", "workshop")
            and not path.is_symlink()
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / path, tmp_path / path)
    (tmp_path / "verl_gdpo" / "recipes").symlink_to("../recipes")
    (tmp_path / "bin").mkdir()
    command = f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m verl_gdpo "$@"\n'
    (tmp_path / "bin" / "verl-gdpo").write_text(command)
    (tmp_path / "bin" / "verl-gdpo").chmod(0o755)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    printed = ""
    for kind, text in EXECUTED:
        if kind == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=500,
            )
            printed += done.stdout
            assert done.returncode == 0, done.stdout
        else:
            file = re.search(r"^# (\S+\.\w+)$", text, re.M)[1]
            assert not (tmp_path / file).exists()
            (tmp_path / file).write_text(text)
    assert re.search(r"^correct .*0\.000 .*1\.000", printed, re.M), printed
