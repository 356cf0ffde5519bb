"""docs/adding_a_task.md, block by block: a task in a distribution outside the package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from executable import program
from ray_session import ray_folder
from repository import REPO

from verl_gdpo.tools.run_folder.dump_reader import read_dump
from verl_gdpo.tools.run_folder.folder import read_metrics

PAGE = (REPO / "docs" / "adding_a_task.md").read_text()
EXECUTED = re.findall(
    r"<!-- executed by tests/repository/test_adding_a_task.py -->\n```(\w+)\n(.*?)```",
    PAGE,
    re.DOTALL,
)
# pip has no index here, and leaves the environment of the tests as it is
PIP = """#!/bin/sh
test "$1" = install && shift
exec "{python}" -m pip install --no-build-isolation --no-deps --target "{site}" "$@"
"""
COMMAND = """#!/bin/sh
exec "{python}" -W ignore -m verl_gdpo "$@"
"""


def run(arguments, folder, **env):
    """What a command prints; it must end well."""
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.slow
def test_the_page(tmp_path):
    kinds = [kind for kind, _ in EXECUTED]
    assert kinds == ["toml", "python", "yaml", "yaml", "bash", "bash", "bash"]
    site = tmp_path / "site"
    program(tmp_path / "bin" / "pip", PIP.format(python=sys.executable, site=site))
    program(tmp_path / "bin" / "verl-gdpo", COMMAND.format(python=sys.executable))
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": f"{REPO}:{site}", "HF_HUB_OFFLINE": "1"}
    printed = ""
    with ray_folder() as ray_dir:
        for kind, text in EXECUTED:
            if kind == "bash":
                bash = ["bash", "-euo", "pipefail", "-c", text]
                printed += run(bash, tmp_path, **env, RAY_TMPDIR=ray_dir)
            else:
                file = tmp_path / re.search(r"^# (\S+\.\w+)$", text, re.M)[1]
                assert not file.exists()
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    assert re.search(r"^correct .*0\.000 .*1\.000", printed, re.M), printed
    check_training(tmp_path / "runs" / "echo")
    result = json.loads((tmp_path / "runs/echo/evaluation/echo-step_2/result.json").read_text())
    assert [one["name"] for one in result["numbers"]] == ["correct", "short"]


def check_training(folder):
    """Two steps, whose rewards are those of the task's scorer."""
    assert sorted(read_metrics(folder)) == [0, 1, 2]
    for step in (1, 2):
        rows = read_dump(folder / "rollouts" / f"{step}.jsonl")
        assert {row["data_source"] for row in rows} == {"echo"}
        for row in rows:
            said = row["output"].partition("<say>")[2].partition("</say>")[0].strip()
            correct, short = float(said == row["gts"]), float(row["response_tokens"] <= 12)
            assert row["rewards"] == {"correct": correct, "short": short}
