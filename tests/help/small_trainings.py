"""Rows, a model and settings for trainings of a minute or two, and how one has to fail."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import varied_reward
from rollout_check import SIZES
from tool_rows import tool_row

from verl_gdpo.cpu.tiny_model import make_tiny_model

REWARD_FILE = Path(varied_reward.__file__)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    train = [tool_row(i, "train") for i in range(32)]
    pd.DataFrame(train).to_parquet(folder / "train.parquet")
    pd.DataFrame([tool_row(i, "test") for i in range(8)]).to_parquet(folder / "test.parquet")
    for split, count in (("train", 32), ("test", 8)):
        mixed = [
            tool_row(i, split, data_source=["rlla", "other"][i // 4 % 2]) for i in range(count)
        ]
        pd.DataFrame(mixed).to_parquet(folder / f"mixed_{split}.parquet")
    broken = json.loads(json.dumps(train))
    broken[11]["reward_model"]["ground_truth"] = None
    pd.DataFrame(broken).to_parquet(folder / "no_ground_truth.parquet")
    texts = [row["reward_model"]["ground_truth"] for row in train]
    make_tiny_model(folder / "model", texts=texts, initializer_range=0.1, seed=1)
    return folder


def overrides(assets, *more, scorer="compute_score"):
    return [
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/test.parquet",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.model.path={assets}/model",
        *SIZES,
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(
            [
                f"reward.custom_reward_function.path={REWARD_FILE}",
                f"reward.custom_reward_function.name={scorer}",
            ]
            if scorer
            else []
        ),
        "trainer.total_epochs=10",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *more,
    ]


def check_error(run, message):
    """One readable message, the last that the run says, and exit code 1."""
    assert run.exit_code == 1, run.last_lines()
    raised = [line for line in run.output.splitlines() if re.search(r"Error: ", line)]
    assert re.search(message, raised[-1]), raised[-3:]
