"""Tool calls, GSM8K and code in each batch of verl's own trainer, without a GPU.

The tasks share some names of rewards and lack the others: tool calls and GSM8K have `format` and
`correctness`, in other ranges; `integer`, `pass`, `length` and `bug` belong to one of the three.
"""

import json
import re

import oracle
import pytest
import yaml
from repository import REPO
from rollout_check import BATCH, SAMPLES, SIZES
from start_verl import run_verl
from tool_rows import numbered

from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tasks.preparation.prepared_files import parquet_rows, write_parquets
from verl_gdpo.tools import data
from verl_gdpo.tools.summary import reward_table
from workshop.tiny_policy.train import make_policy

MIXED = ("tool_rl", "gsm8k", "coding")
REWARDS = {
    "rlla": {"format", "correctness"},
    "verl_gdpo/gsm8k": {"format", "correctness", "integer"},
    "verl_gdpo/coding": {"pass", "length", "bug"},
}
[LINE] = re.findall(
    r"'(\+\+algorithm.gdpo.rewards=.* pass: .*)'\n", (REPO / "recipes/README.md").read_text()
)
WEIGHTS = yaml.safe_load(LINE.partition("=")[2])
NAMES = [*WEIGHTS]
STEPS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{task: folder} of a third of a batch for each task, as `verl-gdpo data` makes them."""
    found = {task: tmp_path_factory.mktemp(task) for task in MIXED}
    for task in MIXED:
        rows = ["--synthetic", str(BATCH // len(MIXED)), "--synthetic-test", "1"]
        assert data.main([task, *rows, "--out", str(found[task])]) == 0
    return found


@pytest.fixture(scope="module")
def policy(folders, tmp_path_factory):
    """Knows these rows by heart, with bad habits: layouts, and programs that do not run."""
    rows = [row for path in folders.values() for row in [*parquet_rows(path / "train.parquet")]]
    for row in rows[-BATCH // len(MIXED) :]:
        truth = json.loads(row["reward_model"]["ground_truth"]) | {"solution": "undefined"}
        rows.append({**row, "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)}})
    folder = tmp_path_factory.mktemp("policy")
    write_parquets({folder / "rows.parquet": numbered(rows, "train")})
    small = {"hidden_size": 64, "num_hidden_layers": 2, "batch_size": 8}
    return make_policy(folder / "model", data=folder / "rows.parquet", steps=300, **small)


def check_step(rows, metrics):
    """Each row has its own task's rewards, and the advantages are those of the oracle.

    Returns the data sources with a sample that trains.
    """
    rows = [row for row in rows if not row["is_padding"]]
    assert len(rows) == BATCH * SAMPLES
    for row in rows:
        score = TASK_BY_SOURCE[row["data_source"]].score
        again = score(row["output"], row["gts"], response_tokens=row["response_tokens"])
        assert {*again} == REWARDS[row["data_source"]]
        assert row["rewards"] == pytest.approx({**dict.fromkeys(NAMES), **again}, abs=1e-6)
        weighted = sum(WEIGHTS[name] * value for name, value in again.items())
        assert row["score"] == pytest.approx(weighted, abs=1e-5)
    columns = {name: [row["rewards"].get(name) for row in rows] for name in NAMES}
    expected = oracle.gdpo(
        [[value or 0.0 for value in values] for values in zip(*columns.values(), strict=True)],
        [row["group"] for row in rows],
        present=[[v is not None for v in values] for values in zip(*columns.values(), strict=True)],
        weights=[*WEIGHTS.values()],
    )
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-5)
    for name, column in columns.items():
        present = [value for value in column if value is not None]
        assert metrics[f"gdpo/{name}/missing"] == pytest.approx(1 - len(present) / len(rows))
        assert metrics[f"gdpo/{name}/mean"] == pytest.approx(sum(present) / len(present))
    for source, names in REWARDS.items():
        of_source = [row["rewards"] for row in rows if row["data_source"] == source]
        for name in names:
            mean = sum(rewards[name] for rewards in of_source) / len(of_source)
            assert metrics[f"gdpo/{name}/mean/{source}"] == pytest.approx(mean)
    # what the coding scorer notes is logged, and is no reward
    assert metrics["gdpo/scoring/stopped"] == 0 and metrics["gdpo/scoring/seconds_waited"] > 0
    return {row["data_source"] for row in rows if abs(row["advantage"]) > 0.01}


def test_three_tasks_in_each_batch(folders, policy, tmp_path):
    def files(name):
        return f"[{','.join(str(folder / name) for folder in folders.values())}]"

    run = run_verl(
        tmp_path,
        [
            f"data.train_files={files('train.parquet')}",
            f"data.val_files={files('test.parquet')}",
            "data.max_prompt_length=96",
            "data.max_response_length=64",
            f"actor_rollout_ref.model.path={policy}",
            *SIZES,
            "+reward.reward_kwargs.length_needs_pass=true",  # of the coding task alone
            LINE,
            f"trainer.total_training_steps={STEPS}",
            f"trainer.test_freq={STEPS}",
            "trainer.val_before_train=False",
            "trainer.save_freq=-1",
        ],
    )
    assert run.exit_code == 0, run.last_lines()
    metrics = run.steps()
    trained = [check_step(run.dump(step), metrics[step]) for step in range(1, STEPS + 1)]
    assert set().union(*trained) == {*REWARDS}
    # the table has a line for each reward of each task
    table = {cells[0]: cells[1:] for cells in reward_table(metrics)}
    assert {*table} == {f"{name} ({source})" for source in REWARDS for name in REWARDS[source]}
    assert "-" not in [after for *_, after in table.values()]  # validation has them all too
