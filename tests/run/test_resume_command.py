"""The arguments that go on with a run."""

import re
import subprocess
import sys

import pytest
import yaml
from saved_checkpoint import save_checkpoint

from verl_gdpo.run.resume_command import arguments
from verl_gdpo.run.starts import StartManifest, write

CONFIGURATION = {"algorithm": {"adv_estimator": "grpo"}, "data": {"train_files": "rows.parquet"}}
TIME = "2026-01-01T00:00:00+00:00"
FILES = {"data.train_files": [[7, 1]]}


def start(time=TIME, **more):
    return StartManifest(time, configuration=CONFIGURATION, **more)


def checkpoint(run, step):
    return save_checkpoint(run / "checkpoints", step)


def made_run(tmp_path, **more):
    run = tmp_path / "run"
    recipes = {"estimator": "grpo", "task": "tool_rl"}
    write(run, start(recipes=recipes, **more), yaml.safe_dump(CONFIGURATION))
    checkpoint(run, 3)
    return run


def test_what_goes_on_with_a_run(tmp_path, monkeypatch):
    run = made_run(tmp_path, folder=str(tmp_path), files=FILES)
    (tmp_path / "it's").mkdir()
    run = run.rename(tmp_path / "it's" / "run")
    monkeypatch.chdir(tmp_path / "it's")
    found = arguments(run, ["estimator=grpo", "+trainer.x=1", "trainer.resume_mode=disable"])
    assert found[:4] == ["--config-dir", f"{run}/starts/1", "--config-name", "composed"]
    quoted = str(run).replace("'", "\\'")
    assert found[4:] == [
        "++recipes=verl-gdpo",
        f"run_dir='{quoted}'",
        f"hydra.run.dir='{quoted}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}'",
        f"data.train_files='{tmp_path}/rows.parquet'",
        "trainer.resume_from_path=null",
        "++trainer.x=1",
        "trainer.resume_mode=disable",
    ]


def test_a_list_of_files_is_found_from_another_folder(tmp_path):
    configuration = {"data": {"train_files": ["a.parquet", "/b.parquet", "${oc.env:C}/c.parquet"]}}
    run = tmp_path / "run"
    write(
        run,
        StartManifest(TIME, FILES, configuration=configuration, folder="/there"),
        yaml.safe_dump(configuration),
    )
    checkpoint(run, 3)
    there = "['/there/a.parquet','/b.parquet','${oc.env:C}/c.parquet']"
    assert f"data.train_files={there}" in arguments(run, [])


def test_a_file_that_the_environment_names_is_named_again_by_it(tmp_path):
    given = {"data": {"train_files": "${oc.env:ROWS}/rows.parquet"}}
    run = tmp_path / "run"
    there = str(tmp_path / "there")
    write(
        run,
        StartManifest(TIME, FILES, configuration=given, folder=there),
        yaml.safe_dump(given),
    )
    checkpoint(run, 3)
    assert not [one for one in arguments(run, []) if one.startswith("data.train_files")]


def test_the_command_of_the_start_may_be_repeated(tmp_path):
    """`+key` is there already, and `~key` is not any more."""
    given = ["+data.more=1", "++data.more=2", "~data.gone", "~data.train_files", "task=tool_rl"]
    found = arguments(made_run(tmp_path), given)
    assert found[-3:] == ["++data.more=1", "++data.more=2", "~data.train_files"]


def test_another_recipe_is_refused(tmp_path):
    run = made_run(tmp_path)
    with pytest.raises(ValueError, match="estimator=gdpo: the run was started with estimator=grpo"):
        arguments(run, ["estimator=gdpo"])
    with pytest.raises(ValueError, match=r"was started with no attention=\.\.\., and"):
        arguments(run, ["attention=sdpa"])


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to resume in .*: no checkpoint"):
        arguments(tmp_path, [])
    folder = checkpoint(tmp_path, 3)
    (folder / "data.pt").rename(folder / "moved.pt")
    with pytest.raises(ValueError, match=r"says '3', but .* has no whole checkpoints"):
        arguments(tmp_path, [])
    (folder / "moved.pt").rename(folder / "data.pt")
    command = [sys.executable, "-m", "verl_gdpo.run.resume_command", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no start that trained up to it" in done.stderr


def test_what_is_said_before_a_run_goes_on(tmp_path):
    """On stderr, which is the user's terminal: verl's own output goes into train.log."""
    run = made_run(tmp_path, code={"commit": "0ff"})
    after = run / "checkpoints" / "global_step_3"
    for changed in ({}, {"data.seed": [1, 2, "free"]}):
        write(run, start(checkpoint=str(after), changes=changed), "")
    command = [sys.executable, "-m", "verl_gdpo.run.resume_command", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"\0run_dir='{run}'\0" in done.stdout
    code, kept = done.stderr.splitlines()
    assert re.search(r"WARNING: the code is not that of start 1: .*commit 0ff -> ", code)
    assert (
        "start 3 changed data.seed and did not train up to the checkpoint: give these changes again"
        in kept
    )
