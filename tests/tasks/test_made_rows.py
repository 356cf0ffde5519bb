"""Synthetic rows of every task: they depend on the seed alone, and the splits share no problem."""

import json
import os

import pytest
from processes import completed
from repository import REPO

from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.preparation.schema import checked
from verl_gdpo.tasks.preparation.sources import sources_of
from verl_gdpo.tools.data import main

PROGRAM = """
import json
from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.preparation.sources import sources_of
makers = [sources_of(TASKS[name]).make_rows for name in TASKS]
print(json.dumps([[*make_rows(9, split="train", seed=5)] for make_rows in makers]))
"""


@pytest.mark.parametrize("name", TASKS)
def test_more_rows_continue_fewer_and_the_seed_matters(name):
    make_rows = sources_of(TASKS[name]).make_rows
    rows = [*make_rows(30, split="test", seed=1)]
    assert [*make_rows(10, split="test", seed=1)] == rows[:10]
    assert [*make_rows(30, split="test", seed=2)] != rows != [*make_rows(30, split="train", seed=1)]


@pytest.mark.parametrize("name", TASKS)
def test_a_good_response_to_a_row_has_full_marks(name):
    task = TASKS[name]
    full = {reward: high for reward, (_, high) in task.bounds().items()}
    rows = [*sources_of(task).make_rows(8, split="train", seed=3)]
    best = []
    for truth in (row["reward_model"]["ground_truth"] for row in rows):
        best.append(task.score(task.good_response(truth), truth, response_tokens=9))
    present = [{k: v for k, v in scores.items() if v is not None} for scores in best]
    assert any(scores.items() <= full.items() for scores in present)
    assert {row["data_source"] for row in rows} == {task.data_sources[0]}
    numbered = [
        (number, {**row, "extra_info": {"index": number, "split": "train"}})
        for number, row in enumerate(rows)
    ]
    assert [*checked(numbered, "here")] == numbered


@pytest.mark.parametrize("name", TASKS)
def test_the_splits_share_no_problem(tmp_path, capsys, name):
    options = ["--synthetic", "300", "--synthetic-test", "99"]
    assert main([name, "--out", str(tmp_path), *options]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("in train 0") == 2


def test_the_same_rows_in_another_process():
    here = [[*sources_of(TASKS[name]).make_rows(9, split="train", seed=5)] for name in TASKS]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = completed("-c", PROGRAM, cwd=REPO, env=environment)
        assert json.loads(done.stdout) == here
