"""The plugin in new processes: how it is loaded, what it registers, and how it refuses to run."""

import os
import subprocess
import sys

import pytest

REPORT = """
import sys, verl
light = not any(m.startswith(("verl.trainer", "verl.experimental")) for m in sys.modules)
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.v1 import get_trainer_cls
print("light", light)
print("same", get_adv_estimator_fn("gdpo") is get_adv_estimator_fn(AdvantageEstimator.GDPO))
print("estimator", get_adv_estimator_fn("gdpo").__module__)
print("other", get_adv_estimator_fn("rloo").__module__)
print("manager", get_reward_manager_cls("gdpo").__module__)
for mode in ("sync", "colocate_async", "separate_async"):
    names = [c.__module__ + "." + c.__name__ for c in get_trainer_cls(mode).__mro__]
    verls = [name for name in names if name.startswith(f"verl.trainer.ppo.v1.trainer_{mode}")]
    print(mode, names.count("verl_gdpo.verl_hooks.v1_trainer.GdpoTrainer"), *verls)
"""

OURS = """light True
same True
estimator verl_gdpo.plugin
other verl.trainer.ppo.core_algos
manager verl_gdpo.verl_hooks.reward_manager
sync 1 verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync
colocate_async 1 verl.trainer.ppo.v1.trainer_colocate_async.PPOTrainerColocateAsync
separate_async 1 verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync
"""


@pytest.fixture
def python(run_forked):
    def run(code, **env):
        return run_forked(code, {**os.environ, "VERL_LOGGING_LEVEL": "ERROR", **env})

    return run


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"},
        {"VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"},
    ],
    ids=["entry point", "external module", "both"],
)
def test_registered_once_by_either_way_in(python, env):
    done = python(REPORT, **env)
    assert (done.stdout, done.returncode) == (OURS, 0), done.stderr


def test_left_out_on_request(python):
    done = python(REPORT, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "manager verl.experimental" in done.stdout, done.stderr
    assert "\nsync 0 verl.trainer" in done.stdout


def test_the_package_itself_is_light():
    code = """
import sys, verl_gdpo, verl_gdpo.rewards.tool_rl
heavy = {"torch", "verl", "ray", "vllm", "transformers"} & {*sys.modules}
print(heavy)
print(verl_gdpo.compute_gdpo_advantage.__name__)
heavy = {"verl", "ray", "vllm", "transformers"} & {*sys.modules}
print(heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\ncompute_gdpo_advantage\nset()\n"


UNSUPPORTED = """
import verl
verl.__version__ = {version!r}
{break_verl}
import verl_gdpo.plugin
import verl.trainer.ppo.v1
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
print(get_adv_estimator_fn("rloo").__module__)
get_adv_estimator_fn("gdpo")()
"""


@pytest.mark.parametrize(
    ("version", "break_verl", "reason"),
    [
        ("0.7.0", "", "not supported (verl 0.7.0; supported: verl>=0.7.1"),
        ("0.10.0", "", "not supported (verl 0.10.0; supported: verl>=0.7.1"),
        (
            "0.9.1",
            "import verl.trainer.ppo.v1.trainer_base as t; del t.PPOTrainer._init_dataloader",
            "PPOTrainer has no method _init_dataloader (verl 0.9.1; supported: verl>=0.7.1",
        ),
    ],
    ids=["older", "newer", "symbol"],
)
def test_says_loudly_why_it_cannot_work(python, version, break_verl, reason):
    code = UNSUPPORTED.format(version=version, break_verl=break_verl)
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.stdout == "verl.trainer.ppo.core_algos\n"  # other estimators are untouched
    said, raised = done.stderr.split("Traceback", 1)
    assert "verl-gdpo: adv_estimator=gdpo will not run" in said
    assert reason in said
    assert "RuntimeError: verl-gdpo cannot run" in raised
    assert reason in raised
