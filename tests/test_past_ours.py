"""Verl goes past one function of ours, and a run says so, or ends.

The runs are those of `help/past_ours.py`; `slow/net.py` has one for each function of the table.
"""

import pytest
from played_past_ours import WITHOUT_GDPO, played, trained

from verl_gdpo.plugin import EXTENSIONS

ROWS = {(each.module.rpartition(".")[2], each.path): each for each in EXTENSIONS}
GRPO = ["algorithm.adv_estimator=grpo"]


def case(kind, module, path, how="unused", overrides=()):
    row = ROWS[module, path]
    return {
        "kind": kind,
        "row": [row.module, row.path],
        "how": how,
        "overrides": [*overrides],
    }


CASES = [
    {"kind": "v1"},
    {"kind": "legacy"},
    # Its trainer and its rollouter have a `fit` of their own.
    {"kind": "fully_async"},
    # Another function than ours would train, and nothing would tell.
    case("v1", "trainer_base", "PPOTrainer._compute_advantage", overrides=GRPO),
    case("legacy", "ray_trainer", "compute_advantage", overrides=GRPO),
    case("v1", "trainer_base", "PPOTrainer._dump_generations"),
]
# What a frame holds is read in a run with gdpo that lacks ours, and in no other.
OTHERS = [
    {"kind": "v1", "overrides": WITHOUT_GDPO},
    {"kind": "legacy", "overrides": WITHOUT_GDPO},
    case("v1", "trainer_base", "PPOTrainer._compute_advantage", overrides=GRPO),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What became of the cases, and of the others; one process plays them all."""
    results = played([*CASES, *OTHERS], tmp_path_factory.mktemp("past_ours"))
    return results[: len(CASES)], results[len(CASES) :]


def name_of(run):
    return f"{run['row'][0]}:{run['row'][1]}"


def test_a_run_says_where_verl_goes_past_ours(runs):
    for run in runs[0]:
        if not run.get("row"):
            assert run.get("raised") is None and run["warned"] == [], run
            assert run["trained"] == trained()
            continue
        module, path = run["row"]
        row = ROWS[module.rpartition(".")[2], path]
        assert any(name_of(run) in line and row.lost in line for line in run["warned"]), run
        if row.ends_run:
            assert name_of(run) in run["raised"] and row.lost in run["raised"], run
        else:
            assert run.get("raised") is None and run["trained"] == trained(), run


def test_a_run_without_gdpo_is_not_looked_at(runs):
    """What a frame holds is not read: Python keeps what was read until the function returns."""
    *without, missing = runs[1]
    for run in without:
        assert run.get("raised") is None and run["warned"] == [], run
        assert len(run["trained"]) == 8 and run["metrics"] == []
        assert run["looked"] == 0
    assert missing["looked"] == 1
