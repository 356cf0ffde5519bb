"""The check before training: yes or no, and why, without Ray or a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from test_e2e import tool_row

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [tool_row(i, "train") for i in range(4)]
    pd.DataFrame(rows).to_parquet(folder / "good.parquet")
    rows[2]["reward_model"]["ground_truth"] = "<tool_call>\nnot json\n</tool_call>"
    pd.DataFrame(rows).to_parquet(folder / "bad.parquet")
    pd.DataFrame([{"prompt": json.dumps("x")}]).to_parquet(folder / "columns.parquet")
    return folder


def check(data, *overrides):
    return subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "verl_gdpo", "check"),
            *("hardware=cpu", f"data.val_files={data}/good.parquet"),
            *overrides,
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
    )


def test_yes(data):
    done = check(data, f"data.train_files={data}/good.parquet")
    assert done.returncode == 0, done.stderr
    assert f"data.train_files: 4 rows in {data}/good.parquet" in done.stdout
    assert "adv_estimator=gdpo" in done.stdout
    assert "'correctness': (-3.0, 3.0)" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_files={data}/none.parquet"], r"data.train_files: .*none.parquet does not"),
        (["data.train_files={data}/columns.parquet"], r"lacks the columns \['data_source'"),
        (["data.train_files={data}/bad.parquet"], r"row 2 .* tool_call line 1 of 1"),
        (["+algorithm.gdpo.batchnorm=none"], "algorithm.gdpo.batchnorm: unknown setting"),
        (
            ["+algorithm.gdpo.rewards={{mine: 1.0}}", "+algorithm.gdpo.combine=sa_mrpo"],
            r"between which values reward 'mine' lies",
        ),
        (["data.train_batch_sise=4"], "train_batch_sise"),
    ],
)
def test_no_in_one_message(data, overrides, message):
    done = check(data, *(override.format(data=data) for override in overrides))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr
