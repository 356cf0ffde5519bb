"""The manifests of a run's starts, and the arguments that go on with it."""

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from saved_checkpoint import save_checkpoint

from verl_gdpo.run import starts
from verl_gdpo.run.folder import config_of_run, read_versions
from verl_gdpo.run.resolved_config import file_states
from verl_gdpo.run.resume_rules import changes, missing_files
from verl_gdpo.run.starts import (
    RecordedStart,
    StartManifest,
    code_change,
    ended,
    starts_of,
    write,
)

CONFIGURATION = {"algorithm": {"adv_estimator": "grpo"}, "data": {"train_files": "rows.parquet"}}


def start(time="2026-01-01T00:00:00+00:00", **more):
    return StartManifest(time, configuration=CONFIGURATION, **more)


def checkpoint(run, step):
    return save_checkpoint(run / "checkpoints", step)


def test_a_start_is_read_as_it_was_written(tmp_path):
    values = {"a": [1e-6, None, True, 1], "b": {"c": "${not: resolved}"}, "ä": "x: 'y'\n"}
    manifest = StartManifest(
        "2026-01-01T00:00:00+00:00", configuration=values, warnings=("w",), command=("a", "b c")
    )
    folder = write(tmp_path, manifest, "a: ${seed}\n")
    assert folder == tmp_path / "starts" / "1"
    (read,) = starts_of(tmp_path)
    assert (read.number, read.start, read.end) == (1, manifest, {})
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
    for metrics in ("1.jsonl", "2.jsonl"):
        write(tmp_path, start(metrics=metrics), "")
    ended(tmp_path, "", 137, metrics="1.jsonl")  # this launcher's start is not the last one
    assert [one.end for one in starts_of(tmp_path)] == [{}, {}]
    ended(tmp_path, "RolloutError: a worker died")
    ended(tmp_path, "", 1, metrics="2.jsonl")
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
    """It has no marks at its ends, one of its launcher, and hashes of files, which say nothing."""
    manifest = write(tmp_path, start(files={"data.train_files": "f00"}), "") / "start.yaml"
    text = manifest.read_text().removeprefix("---\n").removesuffix("...\n")
    manifest.write_text(f"{text}mark: 1a\n")
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
    codes = []
    for text in ("b", "c", "ü".encode("latin-1")):
        module.write_bytes(text if isinstance(text, bytes) else text.encode())
        codes.append(code())
    for text in ("1", "2"):
        (tmp_path / "verl_gdpo" / "new.py").write_text(text)
        codes.append(code())
    assert len({one["commit"] for one in codes}) == 1
    assert len({one["changed"] for one in codes} - {False}) == 5
    (before, after) = (RecordedStart(tmp_path / "1", start(code=one), {}) for one in codes[:2])
    (warning,) = code_change(before, after.start)
    assert warning.startswith("the code is not that of start 1: changed ")
    assert code_change(before, before.start) == ()


def differences(before, after):
    return {change.key for change in changes(before, after)}


def test_files_are_compared_by_size_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "1", "b": "22"}.items():
        (tmp_path / name).write_text(text)

    def of_files(*names):
        configuration = {"data": {"train_files": [*names]}}
        return StartManifest("", file_states(configuration), configuration=configuration)

    def is_other(before, after):
        return differences(before, after) == {"data.train_files"}

    before = of_files("a", "b")
    (tmp_path / "a").rename("c")
    assert not differences(before, of_files("c", "b"))
    assert is_other(before, of_files("b", "c"))
    os.utime("c", (1, 1))
    assert is_other(before, of_files("c", "b"))  # a copy may have another time
    before = of_files("b")
    time = os.stat("b").st_mtime
    (tmp_path / "b").write_text("333")
    os.utime("b", (time, time))
    assert is_other(before, of_files("b"))
    # without size and time, the names count
    assert not differences(replace(before, files={}), of_files("b"))
    assert is_other(replace(before, files={}), of_files("c"))


def test_a_file_that_is_missing(tmp_path, monkeypatch):
    def of_files(**keys):
        configuration = {"data": {"val_files": "b", **keys}}
        return StartManifest("", file_states(configuration), configuration=configuration)

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


def test_a_models_folder_is_compared_by_its_size(tmp_path):
    states = []
    for name, more in {"a": "", "b": "", "c": "x"}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(f"weights{more}")
        os.utime(folder / "weights", (len(states), 1))
        states.append(file_states({"model": {"path": str(folder)}})["model.path"])
    assert states[0] == states[1] != states[2]


def test_nothing_and_no_key_are_one():
    before, after = ({"a": None, "b": 1, "c": []}, {"b": 1.0})
    assert (
        differences(StartManifest("", configuration=before), StartManifest("", configuration=after))
        == set()
    )
