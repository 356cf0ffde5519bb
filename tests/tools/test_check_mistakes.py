"""What share of mistakes `verl-gdpo check` says, and of healthy configurations it refuses.

`check_mistakes.txt` and `check_healthy.txt` are the lists; docs/check.md has the counts.
"""

import importlib
import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from quick_composition import compose_quickly
from repository import REPO
from rows_for_check import write_check_data
from tool_rows import tool_row

from verl_gdpo.tools import compose
from verl_gdpo.tools.check import main

HERE = Path(__file__).parent
(COMMAND,) = re.findall(
    r"^verl-gdpo check (--elsewhere .*?)```", (REPO / "docs/check.md").read_text(), re.M | re.S
)
SHORT = {
    "V": "algorithm.adv_estimator=grpo reward.reward_manager.name=naive",
    "M": "data.train_files=DATA/math.parquet data.val_files=DATA/math.parquet",
    "A": "actor_rollout_ref.actor",
    "R": "actor_rollout_ref.rollout",
    "F": "reward.custom_reward_function",
}


def lines_of(name):
    lines = (HERE / f"check_{name}.txt").read_text().splitlines()
    return [
        re.sub(r"(?<!\S)([AFMRV])(?=[.\s])", lambda match: SHORT[match[1]], line)
        for line in lines
        if not line.startswith("#")
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    importlib.import_module("verl.trainer.ppo.v1")  # it logs while it is imported
    folder = tmp_path_factory.mktemp("data")
    write_check_data(folder)
    rows = [tool_row(i, "train") for i in range(6)]
    asked = [{**row, "prompt": [{"role": "user", "content": ""}]} for row in rows]
    truth, number = {"ground_truth": None}, {"ground_truth": "72"}
    other = {"data_source": "mine"}
    for name, made in {
        "same": [{**row, "prompt": rows[0]["prompt"]} for row in rows],
        "silent": [*asked[:2], *rows[2:]],
        "half": [*rows[:3], *({**row, "reward_model": truth} for row in rows[3:])],
        "numbers": [{**row, **other, "reward_model": number} for row in rows],
    }.items():
        pd.DataFrame(made).to_parquet(folder / f"{name}.parquet")
    answers = [{"result": {"value": value}} for value in ("72", "17")]
    lines = [json.dumps({"response": json.dumps(answer)}) for answer in answers]
    (folder / "answers.jsonl").write_text("\n".join(lines))
    (folder / "mistakes.py").write_text((REPO / "tests/help/mistaken_rewards.py").read_text())
    return folder


@pytest.fixture
def told(data, monkeypatch, capfd, tmp_path):
    """The exit code and all warnings and problems, each in one line, of the command with more."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(compose, "compose_config", compose_quickly)
    monkeypatch.chdir(tmp_path)

    def run(added):
        command = shlex.split(f"{COMMAND} {added}".replace("\\\n", " ").replace("DATA", str(data)))
        code = main(["--rows", "2", "--brief", *command])
        printed = capfd.readouterr()
        return code, printed.err, printed.out if code == 0 else ""

    return run


MISTAKES = [line.split(" | ") for line in lines_of("mistakes")]


@pytest.mark.parametrize(("added", "words"), MISTAKES)
def test_a_mistake_is_said(told, added, words):
    _, problems, warnings = told(added)
    for part in words.split(" & "):
        assert part in problems + warnings


@pytest.mark.parametrize("added", lines_of("healthy"))
def test_a_healthy_configuration_is_not_refused(told, added):
    code, problems, _ = told(added)
    assert code == 0, problems
