"""The plugin in new processes: how it is loaded, what it registers, and how it refuses to run."""

import os
import re
import subprocess
import sys

import pytest
from verl_gdpo.hooks.relied_on import RELIED_ON, missing

from verl_gdpo.plugin import EXTENDS

REPORT = """
import sys, verl
light = not any(m.startswith(("verl.trainer", "verl.experimental")) for m in sys.modules)
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.v1 import PPOTrainer
def unwrapped(function):
    while hasattr(function, "__wrapped__"):
        yield function
        function = function.__wrapped__
print("light", light)
print("same", get_adv_estimator_fn("gdpo") is get_adv_estimator_fn(AdvantageEstimator.GDPO))
print("estimator", get_adv_estimator_fn("gdpo").__module__)
print("other", get_adv_estimator_fn("rloo").__module__)
print("manager", get_reward_manager_cls("gdpo").__module__)
print("trainers", getattr(PPOTrainer.__new__, "__module__", None))
print("times", len([*unwrapped(PPOTrainer._setup)]))
"""

OURS = """light True
same True
estimator verl_gdpo.plugin
other verl.trainer.ppo.core_algos
manager verl_gdpo.hooks.reward_manager
trainers verl_gdpo.hooks.v1_trainer
times 1
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
        {"VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"},
        pytest.param(
            {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["entry point", "both", "external module"],
)
def test_registered_once_by_either_way_in(python, env):
    done = python(REPORT, **env)
    assert (done.stdout, done.returncode) == (OURS, 0), done.stderr


def test_left_out_on_request(python):
    done = python(REPORT, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "manager verl.experimental" in done.stdout, done.stderr
    assert "\ntrainers None\ntimes 0\n" in done.stdout


def test_the_package_itself_is_light():
    code = """
import sys, verl_gdpo, verl_gdpo.tasks.tool_rl.score
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
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import need_critic
from verl.utils.device import auto_set_device
print(get_adv_estimator_fn("rloo").__module__)
def config(estimator="grpo", manager="naive", old=None):
    return OmegaConf.create(dict(
        algorithm=dict(adv_estimator=estimator), reward=dict(reward_manager=dict(name=manager)),
        reward_model=dict(reward_manager=old), critic=dict(enable=None),
        trainer=dict(device="cuda")))
auto_set_device(config())
print(need_critic(config()), need_critic(config("gae")))
for attempt in (
    lambda: need_critic(config("gdpo")),
    lambda: need_critic(config(manager="gdpo")),
    lambda: auto_set_device(config(manager="gdpo")),
    lambda: need_critic(config(old="gdpo")),
    lambda: get_adv_estimator_fn("gdpo")(),
    {attempts}
):
    try:
        print("went on with", attempt())
    except (RuntimeError, ImportError) as error:
        print(error)
"""
# verl's own manager must not run in the place of ours, and nobody derives one from ours
MANAGER = 'lambda: get_reward_manager_cls("gdpo")(config=None, tokenizer=None),'
SUBCLASS = 'lambda: __import__("verl_gdpo.hooks.reward_manager"),'


@pytest.mark.parametrize(
    ("version", "break_verl", "attempts", "reason"),
    [
        pytest.param(
            *("0.8.0", "", MANAGER + SUBCLASS),
            "verl 0.8.0 is not supported; supported: verl>=0.9",
            marks=pytest.mark.slow,
        ),
        (
            "0.11.0",
            "import verl.experimental.agent_loop.agent_loop as a\n"
            "del a.AgentLoopWorker._postprocess",
            "",
            "verl has no verl.experimental.agent_loop.agent_loop:"
            "AgentLoopWorker._postprocess(inputs) "
            "(verl 0.11.0; supported: verl>=0.9.dev0,<=0.10.dev0)",
        ),
        (
            "0.9.1",
            "import verl.trainer.ppo.v1.trainer_base as t; del t.PPOTrainer._init_dataloader",
            "",
            "verl has no verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_dataloader "
            "(verl 0.9.1; supported: verl>=0.9",
        ),
        (
            "0.9.1",
            "import verl.experimental.reward_loop.reward_manager.base as b\n"
            "b.RewardManagerBase.run_single = lambda self, rows: None",
            MANAGER,
            "verl has no verl.experimental.reward_loop.reward_manager.base:"
            "RewardManagerBase.run_single(data) (verl 0.9.1; supported: verl>=0.9",
        ),
    ],
    ids=["older", "newer, symbol", "symbol", "parameter"],
)
def test_another_verl_is_refused_before_a_model_is_loaded(
    python, version, break_verl, attempts, reason
):
    code = UNSUPPORTED.format(version=version, break_verl=break_verl, attempts=attempts)
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "verl-gdpo: gdpo will not run" in done.stderr and reason in done.stderr
    # who does not use gdpo notices nothing
    untouched, critic, *refused = done.stdout.splitlines()
    assert (untouched, critic) == ("verl.trainer.ppo.core_algos", "False True"), done.stderr
    assert len(refused) == 5 + attempts.count("lambda") and all(
        reason in line for line in refused
    ), refused


@pytest.mark.parametrize(
    "version", [pytest.param("0.9.0.dev", marks=pytest.mark.slow), "0.10.0.dev"]
)
def test_supported_versions_are_not_refused(python, version):
    code = f"import verl; verl.__version__ = {version!r}\nimport verl_gdpo.plugin\n{REPORT}"
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert (done.stdout, done.returncode) == (OURS, 0), done.stderr


NEWER = """
import sys, verl
verl.__version__ = {version!r}
sys.modules.update({{name: None for name in {gone!r}}})  # as if verl had no such module
import verl_gdpo.plugin
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic
def ask(estimator):
    print(estimator, file=sys.stderr)
    need_critic(OmegaConf.create(dict(
        algorithm=dict(adv_estimator=estimator), critic=dict(enable=None),
        trainer=dict(use_v1={use_v1}))))
ask("grpo")
try:
    ask("gdpo")
    ask("gdpo")
except RuntimeError as error:
    print(error)
"""
NEW = "supported: verl>=0.9.dev0,<=0.10.dev0"


@pytest.mark.parametrize("version", ["0.10.0rc1", "0.10.0", "0.11"])
def test_a_newer_verl_with_all_names_runs_with_a_warning(python, version):
    code = NEWER.format(version=version, gone=[], use_v1=True)
    done = python(code + REPORT, VERL_USE_EXTERNAL_PLUGINS="none")
    # `light` is of what was imported by then, which the names were looked up in
    assert (done.stdout, done.returncode) == (OURS.replace("True", "False", 1), 0), done.stderr
    # whoever does not use gdpo reads nothing about it
    warning = f"verl-gdpo: gdpo was not tested with this verl (verl {version}; {NEW})"
    lines = [line for line in done.stderr.splitlines() if re.match(r"grpo|gdpo|verl-gdpo", line)]
    assert lines == ["grpo", "gdpo", warning, "gdpo"]


@pytest.mark.parametrize(
    ("gone", "use_v1", "is_refused"),
    [
        # what has another name is never imported, so nothing of ours extends it
        ("verl.models.transformers.monkey_patch", True, True),
        ("verl.trainer.ppo.v1", True, True),
        # as verl's branch neo, which has the legacy trainer alone
        ("verl.trainer.ppo.v1", False, False),
    ],
)
def test_a_newer_verl_without_a_module(python, gone, use_v1, is_refused):
    code = NEWER.format(version="0.10.0", gone=[gone], use_v1=use_v1)
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    refusal = rf"verl-gdpo cannot run: verl has no {gone}\S*:.* \(verl 0\.10\.0; {NEW}\)"
    assert bool(re.search(refusal, done.stdout)) == is_refused, done.stderr
    assert ("was not tested with this verl" in done.stderr) != is_refused


def test_nothing_that_we_rely_on_is_missing():
    assert {ours: missing(symbols) for ours, symbols in RELIED_ON.items() if missing(symbols)} == {}
    assert {*EXTENDS.values()} <= {*RELIED_ON}


@pytest.mark.parametrize(
    ("symbol", "is_there"),
    [
        ("os.path:join(a)", True),
        ("os.path:join(b)", False),
        ("os.path:joins", False),
        ("os.paths:join", False),
        ("pathlib:Path.exists(self)", True),
        ("pathlib:Path.is(self)", False),
    ],
)
def test_how_a_symbol_is_looked_up(symbol, is_there):
    assert missing([symbol]) == ([] if is_there else [symbol])
