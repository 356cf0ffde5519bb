"""The starts of a run in its summary and report."""

import re

import pytest
import yaml
from run_folder_writer import make_run

from verl_gdpo.tools.report import main as report
from verl_gdpo.tools.report.page import build_page
from verl_gdpo.tools.run.starts import StartManifest, ended, write
from verl_gdpo.tools.summary import main as summary

N = "actor_rollout_ref.rollout.n"


def recorded(folder, changes=()):
    """A run with a manifest; with `changes`, of its second start too."""
    make_run(folder, steps=4, configuration=False)
    configuration = {"arm": "gdpo", "algorithm": {"adv_estimator": "gdpo"}}
    metrics = str(folder / "metrics" / "1.jsonl")
    one = StartManifest("2026-01-02T03:04:05+00:00", metrics=metrics, configuration=configuration)
    write(folder, one, yaml.safe_dump(configuration))
    ended(folder, "RolloutError: a worker died", 1)
    if changes:
        two = StartManifest(
            "2026-01-02T04:04:05+00:00",
            configuration=configuration,
            checkpoint="checkpoints/global_step_3",
            changes=dict(changes),
        )
        write(folder, two, yaml.safe_dump(configuration))
    return folder


def test_the_starts_of_a_run_are_shown(tmp_path, capsys):
    run = recorded(tmp_path / "run", changes={N: [8, 4, "on request"]})
    assert summary([str(run)]) == 0
    said = capsys.readouterr().out
    first = "start 1 +2026-01-02 03:04, after step 0; end: RolloutError: a worker died"
    second = "start 2 +2026-01-02 04:04, after step 3; end: not recorded"
    changed = rf" +changed: {re.escape(N)}: 8 -> 4 \(on request\)"
    assert re.search(f"^{first}\n{second}\n{changed}$", said, re.M)


def test_a_long_reason_takes_one_short_line(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    why = "ActorDiedError: The actor died unexpectedly " + "before finishing\nthis task " * 20
    ended(run, why, 1)
    assert summary([str(run)]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "ActorDiedError" in text]
    assert len(line) < 140 and "The actor died unexpectedly before finishing" in line
    assert yaml.safe_load((run / "starts" / "1" / "end.yaml").read_text())["why"] == why


DAMAGES = {
    "cut": "time: '2026",
    "a list": "[1]",
    "filled by aliases": "a: &a [1, 1]\n" + "".join(f"b{i}: &b{i} [*b{i}]\n" for i in range(9)),
}


@pytest.mark.parametrize("file", ["start.yaml", "end.yaml"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_manifest_is_damaged(tmp_path, capsys, file, damage):
    run = recorded(tmp_path / "run")
    (run / "starts" / "1" / file).write_text(DAMAGES[damage])
    # what else there is comes all the same
    assert f"{file}: cannot be read" in build_page([run]).remarks[0].text
    assert summary([str(run)]) == 0
    printed = capsys.readouterr()
    assert f"{file}: cannot be read" in printed.err and "\nlog " in printed.out


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_configuration_is_damaged(tmp_path, capsys, damage):
    run = recorded(tmp_path / "run")
    (run / "starts" / "1" / "composed.yaml").write_text(DAMAGES[damage] + ": {")
    assert summary([str(run)]) == 0
    printed = capsys.readouterr()
    assert "composed.yaml: cannot be read" in printed.err and "start 1" in printed.out
    assert report([str(run), "--out", str(tmp_path / "page")]) == 0
    assert "composed.yaml: cannot be read" in capsys.readouterr().err
    assert (tmp_path / "page" / "index.html").exists()
