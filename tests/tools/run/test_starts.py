"""The manifests of a run's starts, and why each ended."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from processes import completed

from verl_gdpo.tools.run import starts
from verl_gdpo.tools.run.starts import (
    RecordedStart,
    StartManifest,
    code_change,
    ended,
    starts_of,
    write,
)
from verl_gdpo.tools.run_folder.folder import config_of_run


def start(time="2026-01-01T00:00:00+00:00", **more):
    return StartManifest(time, configuration={"algorithm": {"adv_estimator": "grpo"}}, **more)


def test_a_start_is_read_as_it_was_written(tmp_path):
    values = {"a": [1e-6, None, True, 1], "b": {"c": "${not: resolved}"}, "ä": "x: 'y'\n"}
    manifest = replace(start(warnings=["w"], command=["a", "b c"]), configuration=values)
    folder = write(tmp_path, manifest, "a: ${seed}\n")
    assert folder == tmp_path / "starts" / "1"
    (read,) = starts_of(tmp_path)
    assert (read.number, read.start, read.end) == (1, manifest, {})
    assert config_of_run(tmp_path).read_text() == "a: ${seed}\n"


WRITES = """
import sys
from pathlib import Path
from verl_gdpo.tools.run import starts
run = Path(sys.argv[1])
start = starts.StartManifest("2026-01-01T00:00:00+00:00", configuration={"a": "\\u00e4"})
starts.write(run, start, "a: \\u00e4\\n")
starts.ended(run, "\\u00e4")
"""


def test_a_start_is_written_in_a_locale_without_its_letters(tmp_path):
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = completed("-c", WRITES, tmp_path, env={**os.environ, **ascii_alone})
    assert done.returncode == 0, done.stderr
    (read,) = starts_of(tmp_path)
    assert read.start.configuration == {"a": "ä"} and read.end["why"] == "ä"
    assert config_of_run(tmp_path).read_text(encoding="utf-8") == "a: ä\n"


def test_no_start_is_overwritten(tmp_path):
    folders = [write(tmp_path, start(versions={"verl": str(n)}), "") for n in range(11)]
    assert [folder.name for folder in folders] == [str(n) for n in range(1, 12)]
    assert [one.start.versions["verl"] for one in starts_of(tmp_path)] == [*map(str, range(11))]
    assert sorted(os.listdir(tmp_path / "starts")) == sorted(map(str, range(1, 12)))


@pytest.mark.parametrize("name", ["composed.yaml", "start.yaml"])
def test_a_start_that_cannot_be_written_is_none(tmp_path, monkeypatch, name):
    """Not even as a file that is cut, which a full disk leaves."""

    def fills_up(path, text, write_text=Path.write_text, **options):
        if name in path.name:
            write_text(path, text[:5], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fills_up)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, start(), "a: 1\n")
    assert starts_of(tmp_path) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    write(tmp_path, start(), "")
    assert len(starts_of(tmp_path)) == 1


def test_why_a_start_ended(tmp_path):
    ended(tmp_path, "nothing has started")
    assert not os.listdir(tmp_path)
    for metrics in ("1.jsonl", "2.jsonl"):
        write(tmp_path, start(metrics=metrics), "")
    ended(tmp_path, "", 137, metrics="1.jsonl")  # this launcher's start is not the last one
    assert [one.end for one in starts_of(tmp_path)] == [{}, {}]
    for by_training, by_launcher, why in [
        ("", "", "exit code 1"),
        ("RolloutError: a worker died", "", "RolloutError: a worker died"),
        ("SystemExit: 143", "stopped", "stopped"),
    ]:
        ended(tmp_path, by_training, None if by_training else 1)
        ended(tmp_path, by_launcher, 1, metrics="2.jsonl")
        end = starts_of(tmp_path)[1].end
        assert (end["why"], end["exit_code"]) == (why, 1)


def test_starts_are_found_from_the_checkpoints(tmp_path):
    write(tmp_path / "run", start(), "")
    inside, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    for folder in (inside, elsewhere):
        starts.link(tmp_path / "run", folder)
        folder.mkdir(exist_ok=True)
        assert len(starts_of(folder)) == 1
    assert not os.listdir(inside)


@pytest.mark.parametrize("text", ["a: [", "", "time: '2026'\nfiles: {}\n"])
def test_a_damaged_manifest_says_so(tmp_path, text):
    (write(tmp_path, start(), "") / "start.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"start.yaml: cannot be read: .* Put back"):
        starts_of(tmp_path)


def test_a_manifest_of_an_older_state_is_read(tmp_path):
    text = "time: '2026-01-01T00:00:00+00:00'\nmachine: x\nconfiguration: {a: 1}\n"
    (write(tmp_path, start(), "") / "start.yaml").write_text(text)
    (read,) = starts_of(tmp_path)
    assert read.start.commit == "" and read.start.configuration == {"a": 1}


def test_other_code_is_a_warning(tmp_path, monkeypatch):
    ours = starts.here({})
    before = RecordedStart(tmp_path / "1", replace(ours, commit="0ff"), {})
    (warning,) = code_change(before, ours)
    assert warning.startswith("the code is not that of start 1: commit 0ff -> ")
    assert code_change(RecordedStart(tmp_path / "1", ours, {}), ours) == []
    assert "verl" in ours.versions
    monkeypatch.setattr(starts, "__file__", str(tmp_path / "a" / "b" / "starts.py"))
    assert starts.here({}).commit == ""
