"""Each function of the table by itself: verl goes past it, and the run says so, or ends.

Two ways: verl's functions call another function in its place; or ours is not put in its place. The
runs are those of `past_ours.py`, with the V1 and the legacy trainer, and with grpo where another
estimator would train on rows that nobody has looked at.
"""

import pytest
from played_past_ours import played, trained

from verl_gdpo.plugin import EXTENSIONS

GRPO = "algorithm.adv_estimator=grpo"
V1_ALONE = "verl.trainer.ppo.v1"
# They need Ray's processes: see tests/core/hooks/test_net.py and tests/slow/trainers.py.
OF_PROCESSES = (
    "verl.trainer.main_ppo",
    "verl.utils.device",
    "verl.experimental.fully_async_policy",
)
# What only another configuration of the run needs.
FILTERING = [
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
]
LEGACY_ALONE = ("RayPPOTrainer.", "compute_advantage", "extract_reward", "compute_data_metrics")


def kinds_of(row):
    if row.module.startswith(V1_ALONE):
        return ["v1"]
    if row.path == "AgentLoopWorker._postprocess" or row.path.startswith(LEGACY_ALONE):
        return ["legacy"]
    return ["v1", "legacy"]


def ways_of(row):
    """(how, overrides) of each case."""
    if row.path == "ReplayBuffer._dapo_filtered_keys":
        return [("unused", FILTERING), ("in verl's place", FILTERING)]
    # A constructor has one name.
    if row.name == "__init__":
        return [("in verl's place", []), ("in verl's place", [GRPO])]
    ways = [("unused", []), ("in verl's place", [])]
    # The estimator is looked up for gdpo alone.
    if row.ends_run and row.name != "get_adv_estimator_fn":
        ways.append(("unused", [GRPO]))
    return ways


def all_cases():
    cases = []
    for row in EXTENSIONS:
        if not row.replacement or row.module.startswith(OF_PROCESSES):
            continue
        for kind in kinds_of(row):
            for how, overrides in ways_of(row):
                name = [row.module, row.path]
                cases.append({"kind": kind, "row": name, "how": how, "overrides": overrides})
    return cases


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return played(all_cases(), tmp_path_factory.mktemp("net"))


# What is said of two of them, which other functions of ours had looked for before.
SAID = {
    "PPOTrainer.__init__": "is not extended by verl-gdpo",
    "get_reward_manager_cls": "do not run the manager of verl-gdpo",
}


def test_each_function_without_which_other_numbers_would_be_trained(runs):
    wrong = []
    for row, run in of_rows(runs, ends_run=True):
        said = run.get("raised") or ""
        print(f"{shown(run)}: {said}")
        if SAID.get(row.path, row.path) not in said and row.name not in said:
            wrong.append(run)
    assert wrong == []


def test_each_function_without_which_something_else_is_lost(runs):
    wrong = []
    for row, run in of_rows(runs, ends_run=False):
        told = [line for line in run["warned"] if f"{row.module}:{row.path}: {row.lost}" in line]
        print(f"{shown(run)}: {run.get('raised') or told}")
        if not told or run.get("raised") or run["trained"] != trained():
            wrong.append(run)
    assert wrong == []


def of_rows(runs, *, ends_run):
    rows = {(each.module, each.path): each for each in EXTENSIONS}
    for run in runs:
        row = rows[tuple(run["row"])]
        if row.ends_run == ends_run:
            yield row, run


def shown(run):
    return f"{run['kind']}, {run['row'][1]}, {run['how']}, {run['overrides']}"
