"""Each function of the table by itself: verl goes past it, and the run says so, or ends.

Two ways: verl's functions call another function in its place; or ours is not put in its place. The
runs are those of `past_ours.py`: the trainers that use the function, verl's main module for what it
calls, and grpo where another estimator would train on rows that nobody has looked at.
"""

import os
import re
import subprocess
import sys

import pytest
from played_past_ours import FAILED, HELP, KINDS, played, trained

from verl_gdpo.plugin import EXTENSIONS

GRPO = "algorithm.adv_estimator=grpo"
V1_ALONE = "verl.trainer.ppo.v1"
OF_MAIN = ("verl.trainer.main_ppo", "verl.utils.device")
FULLY_ASYNC = "verl.experimental.fully_async_policy"
# What only another configuration of the run needs.
FILTERING = [
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
]
LEGACY_ALONE = ("RayPPOTrainer.", "compute_advantage", "extract_reward", "compute_data_metrics")


def kinds_of(row):
    if row.module.startswith(OF_MAIN):
        return ["main"]
    if row.module.startswith(FULLY_ASYNC):
        return ["fully_async"]
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
    cases = [{"kind": kind} for kind in KINDS]
    for row in EXTENSIONS:
        if not row.replacement:
            continue
        for kind in kinds_of(row):
            for how, overrides in ways_of(row):
                name = [row.module, row.path]
                cases.append({"kind": kind, "row": name, "how": how, "overrides": overrides})
    return cases


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return played(all_cases(), tmp_path_factory.mktemp("net"))


# What is said of three of them, which other functions of ours had looked for before.
SAID = {
    "compute_advantage_for_multi_trajectories": (
        "did not call verl's compute_advantage_for_multi_trajectories"
    ),
    "PPOTrainer.__init__": "is not extended by verl-gdpo",
    "get_reward_manager_cls": "do not run the manager of verl-gdpo",
}


def test_a_run_with_all_of_them(runs):
    for run in runs[: len(KINDS)]:
        assert run.get("raised") is None and run["warned"] == [], run
        assert run["trained"] == trained()
        assert run.get("rollouter") == (FAILED if run["kind"] == "fully_async" else None)


def test_each_function_without_which_other_numbers_would_be_trained(runs):
    wrong = []
    for row, run in of_rows(runs, ends_run=True):
        said = run.get("raised") or ""
        print(f"{shown(run)}: {said}")
        if SAID.get(row.path, f"{row.module}:{row.path} (") not in said:
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
    for run in runs[len(KINDS) :]:
        row = rows[tuple(run["row"])]
        if row.ends_run == ends_run:
            yield row, run


def shown(run):
    return f"{run['kind']}, {run['row'][1]}, {run['how']}, {run['overrides']}"


# --- actors ---------------------------------------------------------------------------------------

SEND = """
from pathlib import Path
import ray
from verl.experimental.fully_async_policy import fully_async_rollouter, fully_async_trainer
for cls in (fully_async_trainer.FullyAsyncTrainer, fully_async_rollouter.FullyAsyncRollouter):
    cls = cls.__ray_metadata__.modified_class
    Path(cls.__name__).write_bytes(ray.cloudpickle.dumps(cls))
"""
RECEIVE = """
import inspect
import sys
from pathlib import Path
import ray
import verl
from verl_batch import verl_config
from verl_gdpo.hooks import legacy
cls = ray.cloudpickle.loads(Path(sys.argv[1]).read_bytes())
assert getattr(sys.modules[cls.__module__], cls.__name__).__ray_metadata__.modified_class is not cls
for name in sys.argv[2:]:
    setattr(cls, name, inspect.unwrap(getattr(cls, name)))
legacy.extend(object.__new__(cls), verl_config())
"""


def warned_of(folder, *arguments):
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), str(HELP)]))
    command = [sys.executable, "-W", "ignore", "-c", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return re.findall(r"go past ours for \S+:(\S+): ", done.stderr)


def test_the_classes_that_ray_sends_to_actors(tmp_path):
    """There they are other classes than those of their modules."""
    assert warned_of(tmp_path, SEND) == []
    for name in ("FullyAsyncTrainer", "FullyAsyncRollouter"):
        assert warned_of(tmp_path, RECEIVE, name) == []
        assert warned_of(tmp_path, RECEIVE, name, "fit") == [f"{name}.fit"]
    missing = "_streaming_generation_main"
    found = warned_of(tmp_path, RECEIVE, "FullyAsyncRollouter", missing)
    assert found == [f"FullyAsyncRollouter.{missing}"]
