"""The starts of a run in its summary and report, and how they decide what is pooled."""

import json

import pytest
import yaml
from run_folder_writer import make_run

from verl_gdpo.run.starts import StartManifest, ended, write
from verl_gdpo.tools.report.arms import read_arms
from verl_gdpo.tools.report.tables import starts
from verl_gdpo.tools.summary import main as summary

N = "actor_rollout_ref.rollout.n"


def recorded(folder, seed=0, size=7, rows="rows.parquet", changes=(), n=4):
    """A run with a manifest; with `changes`, of its second start too."""
    make_run(folder, seed=seed, steps=4, configuration=False)
    configuration = {
        "arm": "gdpo",
        "data_dir": str(folder),
        "data": {"seed": seed, "train_files": rows},
        "actor_rollout_ref": {"rollout": {"n": n}},
        "algorithm": {"adv_estimator": "gdpo"},
    }
    files = {"data.train_files": [[size, 1]]}
    metrics = str(folder / "metrics" / "1.jsonl")
    one = StartManifest(
        "2026-01-02T03:04:05+00:00", files, metrics=metrics, configuration=configuration
    )
    write(folder, one, yaml.safe_dump(configuration))
    ended(folder, "RolloutError: a worker died", 1)
    if changes:
        two = StartManifest(
            "2026-01-02T04:04:05+00:00",
            files,
            configuration=configuration,
            checkpoint="checkpoints/global_step_3",
            changes=dict(changes),
        )
        write(folder, two, yaml.safe_dump(configuration))
    return folder


def pooled(*runs):
    return [len(arm.runs) for arm in read_arms(runs)]


def test_seeds_are_pooled_by_the_content_of_their_data(tmp_path):
    first = recorded(tmp_path / "first")
    moved = recorded(tmp_path / "moved", seed=1, rows="elsewhere.parquet")
    assert pooled(first, moved) == [2]
    other = recorded(tmp_path / "other", seed=2, size=8)  # under the same name
    assert pooled(first, moved, other) == [2, 1]


def test_a_run_that_was_changed_is_not_pooled(tmp_path):
    whole = recorded(tmp_path / "whole")
    changed = recorded(tmp_path / "changed", seed=1, changes={N: [8, 4, "on request"]})
    assert pooled(whole, changed) == [1, 1]
    free = recorded(tmp_path / "free", seed=2, changes={"trainer.save_freq": [1, 2, "free"]})
    assert pooled(whole, free) == [2]


def test_the_starts_of_a_run_are_shown(tmp_path, capsys):
    run = recorded(tmp_path / "run", changes={N: [8, 4, "on request"]})
    table = starts(read_arms([run]))
    assert table.rows == [
        ("run", "1", "2026-01-02 03:04", "0", "4", "RolloutError: a worker died", "-"),
        ("run", "2", "2026-01-02 04:04", "3", "-", "not recorded", f"{N}: 8 -> 4 (on request)"),
    ]
    assert starts(read_arms([recorded(tmp_path / "one")])) is None
    assert summary([str(run)]) == 0
    said = capsys.readouterr().out
    assert f"start 2 changed: {N}: 8 -> 4 (on request)" in said
    assert "start 1 changed" not in said and "RolloutError: a worker died" in said


def test_a_long_reason_takes_one_short_line(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    why = "ActorDiedError: The actor died unexpectedly " + "before finishing\nthis task " * 20
    ended(run, why, 1)
    assert summary([str(run)]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "ActorDiedError" in text]
    assert len(line) < 140 and "The actor died unexpectedly before finishing" in line
    assert yaml.safe_load((run / "starts" / "1" / "end.yaml").read_text())["why"] == why


def test_a_run_whose_manifest_is_damaged_is_refused(tmp_path):
    run = recorded(tmp_path / "run")
    (run / "starts" / "1" / "start.yaml").write_text(json.dumps([1])[:-1])
    with pytest.raises(ValueError, match=r"start\.yaml: cannot be read"):
        read_arms([run])
