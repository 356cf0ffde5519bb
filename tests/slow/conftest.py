"""What the trainings share."""

import json

import pandas as pd
import pytest
from tool_rows import tool_row

from workshop.tiny_policy.model import make_tiny_model


@pytest.fixture(scope="session")
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
