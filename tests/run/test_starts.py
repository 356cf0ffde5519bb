"""The manifests of a run's starts, and the arguments that go on with it."""

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from saved_checkpoint import save_checkpoint

from verl_gdpo.run import starts
from verl_gdpo.run.contents import file_contents
from verl_gdpo.run.folder import config_of_run, read_versions
from verl_gdpo.run.resume_command import arguments
from verl_gdpo.run.resume_rules import changes, missing_files
from verl_gdpo.run.starts import Start, Written, code_change, ended, starts_of, write

CONFIGURATION = {"algorithm": {"adv_estimator": "grpo"}, "data": {"train_files": "rows.parquet"}}


def start(time="2026-01-01T00:00:00+00:00", **more):
    return Start(time, configuration=CONFIGURATION, **more)


def checkpoint(run, step):
    return save_checkpoint(run / "checkpoints", step)


def test_a_start_is_read_as_it_was_written(tmp_path):
    values = {"a": [1e-6, None, True, 1], "b": {"c": "${not: resolved}"}, "ä": "x: 'y'\n"}
    given = Start(
        "2026-01-01T00:00:00+00:00", configuration=values, warnings=("w",), command=("a", "b c")
    )
    folder = write(tmp_path, given, "a: ${seed}\n")
    assert folder == tmp_path / "starts" / "1"
    (read,) = starts_of(tmp_path)
    assert (read.number, read.start, read.end) == (1, given, {})
    assert config_of_run(tmp_path).read_text() == "a: ${seed}\n"


def test_no_start_is_overwritten(tmp_path):
    folders = [write(tmp_path, start(versions={"verl": str(n)}), "") for n in range(11)]
    assert [folder.name for folder in folders] == [str(n) for n in range(1, 12)]
    assert [one.start.versions["verl"] for one in starts_of(tmp_path)] == [*map(str, range(11))]
    assert read_versions(tmp_path) == {"verl": "10"}
    assert sorted(os.listdir(tmp_path / "starts")) == sorted(map(str, range(1, 12)))


def test_two_starts_at_once_have_two_numbers(tmp_path, monkeypatch):
    write(tmp_path, start(), "")
    monkeypatch.setattr(starts, "manifests_in", lambda _: [])  # the other one is not there yet
    assert write(tmp_path, start(), "").name == "2"


@pytest.mark.parametrize("name", ["composed.yaml", "start.yaml"])
def test_a_start_that_cannot_be_written_is_none(tmp_path, monkeypatch, name):
    """Not even as a file that is cut, which a full disk leaves."""

    def fills_up(path, text, write_text=Path.write_text):
        if name in path.name:
            write_text(path, text[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", fills_up)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, start(), "a: 1\n")
    assert starts_of(tmp_path) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    write(tmp_path, start(), "")
    assert len(starts_of(tmp_path)) == 1


def test_why_a_start_ended(tmp_path):
    ended(tmp_path, "nothing has started")
    assert not os.listdir(tmp_path)
    for mark in ("first", "second"):
        write(tmp_path, start(mark=mark), "")
    ended(tmp_path, "", 137, mark="first")  # this launcher's start is not the last one
    assert [one.end for one in starts_of(tmp_path)] == [{}, {}]
    ended(tmp_path, "RolloutError: a worker died")
    ended(tmp_path, "", 1, mark="second")
    end = starts_of(tmp_path)[1].end
    assert (end["why"], end["exit_code"]) == ("RolloutError: a worker died", 1)


@pytest.mark.parametrize(
    ("exit_code", "why"),
    [(0, "finished"), (3, "exit code 3"), (124, "time limit"), (137, "ended by SIGKILL")],
)
def test_why_a_start_ended_by_its_exit_code(tmp_path, exit_code, why):
    write(tmp_path, start(), "")
    if exit_code > 3:
        ended(tmp_path, "SystemExit: 143")  # what the training saw of it
    ended(tmp_path, "", exit_code)
    assert starts_of(tmp_path)[0].end["why"] == why


def test_starts_are_found_from_the_checkpoints(tmp_path):
    write(tmp_path / "run", start(), "")
    inside, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    for folder in (inside, elsewhere):
        starts.link(tmp_path / "run", folder)
        folder.mkdir(exist_ok=True)
        assert len(starts_of(folder)) == 1
    assert not os.listdir(inside)


@pytest.mark.parametrize("text", ["a: [", "", "time: 2026\n", "time: '2026'\nunknown: 1\n"])
def test_a_damaged_manifest_says_so(tmp_path, text):
    (write(tmp_path, start(), "") / "start.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"start.yaml: cannot be read: .* put back"):
        starts_of(tmp_path)


def test_a_manifest_that_is_cut_anywhere_says_so(tmp_path):
    """Also where what is left is YAML."""
    manifest = write(tmp_path, start(), "") / "start.yaml"
    lines = manifest.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        manifest.write_text("".join(lines[:count]))
        with pytest.raises(ValueError, match=r"start.yaml: cannot be read: .* put back"):
            starts_of(tmp_path)


def test_a_manifest_of_before_is_read(tmp_path):
    """Which has no marks at its ends."""
    manifest = write(tmp_path, start(), "") / "start.yaml"
    manifest.write_text(manifest.read_text().removeprefix("---\n").removesuffix("...\n"))
    assert starts_of(tmp_path)[0].start == start()


def test_another_edit_of_the_checkout_is_other_code(tmp_path, monkeypatch):
    """Also of a file that git does not know yet."""
    module = tmp_path / "verl_gdpo" / "run" / "starts.py"
    module.parent.mkdir(parents=True)
    module.write_text("a")

    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    def code():
        monkeypatch.setattr(starts, "__file__", str(module))
        return starts._code()

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert code()["changed"] is False
    found = []
    for text in ("b", "c", "ü".encode("latin-1")):
        module.write_bytes(text if isinstance(text, bytes) else text.encode())
        found.append(code())
    for text in ("1", "2"):
        (tmp_path / "verl_gdpo" / "new.py").write_text(text)
        found.append(code())
    assert len({one["commit"] for one in found}) == 1
    assert len({one["changed"] for one in found} - {False}) == 5
    (before, after) = (Written(tmp_path / "1", start(code=one), {}) for one in found[:2])
    (said,) = code_change(before, after.start)
    assert said.startswith("the code is not that of start 1: changed ")
    assert code_change(before, before.start) == ()


def differences(before, after):
    return {change.key for change in changes(before, after)}


def test_files_are_compared_by_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "1", "b": "1", "c": "2"}.items():
        (tmp_path / name).write_text(text)

    def of_files(*names):
        configuration = {"data": {"train_files": [*names]}}
        return Start("", file_contents(configuration), configuration=configuration)

    assert differences(of_files("a"), of_files("b")) == set()
    assert differences(of_files("a", "c"), of_files("c", "a")) == {"data.train_files"}
    before = of_files("a")
    (tmp_path / "a").write_text("3")
    assert differences(before, of_files("a")) == {"data.train_files"}
    # without the content, the names count
    assert differences(replace(before, files={}), of_files("a")) == set()
    assert differences(replace(before, files={}), of_files("c")) == {"data.train_files"}


def test_a_file_that_is_missing(tmp_path, monkeypatch):
    def of_files(**keys):
        configuration = {"data": {"val_files": "b", **keys}}
        return Start("", file_contents(configuration), configuration=configuration)

    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).touch()
    before = of_files(train_files=["a", "b"])
    assert missing_files(before, before) == []
    (tmp_path / "b").unlink()
    now = of_files(train_files=["a", "b"])
    assert missing_files(before, now) == ["data.train_files=['a', 'b']", "data.val_files=b"]
    assert missing_files(before, of_files(val_files=None)) == []
    assert missing_files(before, of_files(train_files="a", val_files="hdfs://host/b")) == []


def test_a_models_folder_is_compared_by_content(tmp_path):
    found = []
    for name, more in {"a": "", "b": "", "c": "x"}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(b"\0" * (2 << 20) + more.encode())
        found.append(file_contents({"model": {"path": str(folder)}})["model.path"])
    assert found[0] == found[1] != found[2]


def test_nothing_and_no_key_are_one():
    before, after = ({"a": None, "b": 1, "c": []}, {"b": 1.0})
    assert differences(Start("", configuration=before), Start("", configuration=after)) == set()


def made_run(tmp_path, **more):
    run = tmp_path / "run"
    recipes = {"estimator": "grpo", "task": "tool_rl"}
    write(run, start(recipes=recipes, **more), yaml.safe_dump(CONFIGURATION))
    checkpoint(run, 3)
    return run


def test_what_goes_on_with_a_run(tmp_path, monkeypatch):
    run = made_run(tmp_path, folder=str(tmp_path), files={"data.train_files": "f00"})
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
    files = {"data.train_files": "f00"}
    configuration = {"data": {"train_files": ["a.parquet", "/b.parquet", "${oc.env:C}/c.parquet"]}}
    run = tmp_path / "run"
    write(
        run,
        Start("2026-01-01T00:00:00+00:00", files, configuration=configuration, folder="/there"),
        yaml.safe_dump(configuration),
    )
    checkpoint(run, 3)
    there = "['/there/a.parquet','/b.parquet','${oc.env:C}/c.parquet']"
    assert f"data.train_files={there}" in arguments(run, [])


def test_a_file_that_the_environment_names_is_named_again_by_it(tmp_path):
    files = {"data.train_files": "f00"}
    given = {"data": {"train_files": "${oc.env:ROWS}/rows.parquet"}}
    run = tmp_path / "run"
    there = str(tmp_path / "there")
    write(
        run,
        Start("2026-01-01T00:00:00+00:00", files, configuration=given, folder=there),
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
