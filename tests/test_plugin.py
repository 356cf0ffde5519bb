"""The plugin in new processes: how it is loaded, what it registers, and how it refuses to run."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from quick_composition import compose_quickly
from repository import REPO

from verl_gdpo.cpu.plugin import ON_CPU, OWN_ROLLOUT
from verl_gdpo.hooks.before_training import COMPARED, code_files
from verl_gdpo.hooks.extend import Extension
from verl_gdpo.plugin import CALLED_BY_TOOLS, EXTENSIONS
from verl_gdpo.tools.run import plugin as run_plugin
from verl_gdpo.tools.run import stacks

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
extension = getattr(PPOTrainer.__init__, "verl_gdpo_extension", None)
print("trainers", extension and extension.replacement)
print("times", len([*unwrapped(PPOTrainer._setup)]))
"""

OURS = """light True
same True
estimator verl_gdpo.hooks.estimator
other verl.trainer.ppo.core_algos
manager verl_gdpo.hooks.reward_manager
trainers verl_gdpo.hooks.trainer:construct
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
        pytest.param({"VERL_USE_EXTERNAL_MODULES": "verl_gdpo.plugin"}, marks=pytest.mark.slow),
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
    lambda: need_critic(config(old="gdpo")),
    lambda: get_adv_estimator_fn("gdpo")(),
    {attempts}
):
    try:
        print("went on with", attempt())
    except (RuntimeError, ImportError) as error:
        print(error)
"""
# before Ray starts; of an older verl, the gates alone are ours
DEVICE = 'lambda: auto_set_device(config(manager="gdpo")),'
# verl's own manager must not run in the place of ours, and nobody derives one from ours
MANAGER = 'lambda: get_reward_manager_cls("gdpo")(config=None, tokenizer=None),'
SUBCLASS = """lambda: type(
    "Mine", (__import__("verl_gdpo.hooks.reward_manager", fromlist=["x"]).GdpoRewardManager,), {}
)(None, None, None),"""


@pytest.mark.parametrize(
    ("version", "break_verl", "attempts", "reason"),
    [
        pytest.param(
            *("0.8.0", "", MANAGER + SUBCLASS),
            "verl 0.8.0 is not supported (verl 0.8.0; tested: 0.9.0, 0.9.1",
            marks=pytest.mark.slow,
        ),
        (
            "0.11.0",
            "import verl.experimental.agent_loop.agent_loop as a\n"
            "del a.AgentLoopWorker._postprocess",
            DEVICE,
            "verl has no verl.experimental.agent_loop.agent_loop:"
            "AgentLoopWorker._postprocess(inputs) "
            "(verl 0.11.0; tested: 0.9.0, 0.9.1)",
        ),
        (
            "0.9.1",
            "import verl.trainer.ppo.v1.trainer_base as t; del t.PPOTrainer._init_dataloader",
            DEVICE,
            "verl has no verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_dataloader "
            "(verl 0.9.1; tested: 0.9.0, 0.9.1",
        ),
        (
            "0.9.1",
            "import verl.experimental.reward_loop.reward_manager.base as b\n"
            "b.RewardManagerBase.run_single = lambda self, rows: None",
            DEVICE + MANAGER,
            "verl has no verl.experimental.reward_loop.reward_manager.base:"
            "RewardManagerBase.run_single(data) (verl 0.9.1; tested: 0.9.0, 0.9.1",
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
    assert len(refused) == 4 + attempts.count("lambda") and all(
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
NEW = "tested: 0.9.0, 0.9.1"


@pytest.mark.parametrize(
    "version",
    [
        pytest.param("0.9.2", marks=pytest.mark.slow),
        "0.10.0.dev",
        pytest.param("0.9.0.dev", marks=pytest.mark.slow),
        pytest.param("0.10.0rc1", marks=pytest.mark.slow),
        pytest.param("0.11", marks=pytest.mark.slow),
    ],
)
def test_another_verl_with_all_names_runs_with_a_warning(python, version):
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
        ("verl.trainer.ppo.v1", True, True),
        # as verl's branch neo, which has the legacy trainer alone
        ("verl.trainer.ppo.v1", False, False),
    ],
)
def test_another_verl_without_a_module(python, gone, use_v1, is_refused):
    code = NEWER.format(version="0.10.0.dev", gone=[gone], use_v1=use_v1)
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    refusal = rf"verl-gdpo cannot run: verl has no .*{gone}\S*:.* \(verl 0\.10\.0\.dev; {NEW}\)"
    assert bool(re.search(refusal, done.stdout)) == is_refused, done.stderr
    assert ("was not tested with this verl" in done.stderr) != is_refused


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine._build_module"),
        ("verl.utils.fsdp_utils", "_select_fsdp2_wrap_targets"),
    ],
)
@pytest.mark.parametrize("version", [pytest.param("0.9.1", marks=pytest.mark.slow), "0.10.0"])
def test_what_gdpo_does_not_need_is_no_reason_to_refuse_it(python, version, module, name):
    """A verl that lacks the name, of our versions or a newer one."""
    ask = NEWER.format(version=version, gone=[], use_v1=True)
    lose = f"import {module}\ndel {module}.{name}\nimport verl_gdpo.tools.run.plugin\n"
    done = python(f"import verl\n{lose}{ask}", VERL_USE_EXTERNAL_PLUGINS="none")
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    warnings = re.findall("verl-gdpo: (.*)", done.stderr)
    missing = f"WARNING: verl has no {module}:{name}"
    assert warnings[0].startswith(missing), done.stderr
    assert all(each.startswith((missing, "gdpo was not tested")) for each in warnings)


BROKEN = """
import sys, verl
sys.modules["verl_gdpo.hooks.{broken}"] = None  # as if it could not be imported
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.device import auto_set_device
config = OmegaConf.load({file!r})
config.update(algorithm={{**config.algorithm, "adv_estimator": "grpo"}})
config.reward.reward_manager.name = "naive"
auto_set_device(config)
trainer = get_trainer_cls("sync")(config)
print(type(trainer).__name__, vars(trainer).get("verl_gdpo_record"))
config.algorithm.adv_estimator = "gdpo"
for attempt in (
    lambda: auto_set_device(config),
    lambda: get_trainer_cls("sync")(config),
    lambda: get_adv_estimator_fn("gdpo"),
):
    try:
        print("went on with", attempt())
    except RuntimeError as error:
        print(error)
"""


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory):
    """The configuration of a run on GSM8K."""
    folder = tmp_path_factory.mktemp("composed")
    file, rows = folder / "gsm8k.yaml", folder / "train.jsonl"
    rows.write_text(json.dumps({"data_source": "verl_gdpo/gsm8k"}))
    settings = ["task=gsm8k", "hardware=cpu", f"data.train_files={rows}"]
    config = compose_quickly(REPO / "recipes", "train", settings)
    file.write_text(OmegaConf.to_yaml(config, resolve=True))
    return str(file)


@pytest.mark.parametrize("broken", ["agent_loop", pytest.param("trainer", marks=pytest.mark.slow)])
def test_a_failing_import_of_ours_refuses_gdpo_and_leaves_verl_to_others(python, gsm8k, broken):
    done = python(BROKEN.format(broken=broken, file=gsm8k))
    reasons = re.findall(r"verl-gdpo: gdpo will not run: (.*)", done.stderr)
    assert reasons[0].startswith(f"verl_gdpo.hooks.{broken}: ModuleNotFoundError: "), done.stderr
    # once for each module, of which others may import the broken one
    assert len({reason.partition(":")[0] for reason in reasons}) == len(reasons)
    trainer, *refusals = done.stdout.splitlines()
    assert trainer == "PPOTrainerSync None", done.stderr
    assert refusals == [f"verl-gdpo cannot run: {'; '.join(reasons)}"] * 3


# --- what is loaded ------------------------------------------------------------------------------

# each process of a training imports these, with gdpo or without
LOADED_WITH_TRAINER_AND_MANAGERS = {
    "verl_gdpo",
    "verl_gdpo.cpu",
    "verl_gdpo.cpu.plugin",
    "verl_gdpo.hooks",
    "verl_gdpo.hooks.call",
    "verl_gdpo.hooks.extend",
    "verl_gdpo.hooks.refusal",
    "verl_gdpo.plugin",
    "verl_gdpo.tools",
    "verl_gdpo.tools.run",
    "verl_gdpo.tools.run.plugin",
    "verl_gdpo.tools.run.stacks",
}


@pytest.mark.parametrize("asked", [None, "1"])
def test_stacks_are_registered_where_the_launcher_reads_them(python, asked):
    code = (
        "import os, verl\nfrom verl_gdpo.tools.run import stacks\n"
        "print(len(stacks.files_of(os.getpid())))"
    )
    done = python(code, **({stacks.VARIABLE: asked} if asked else {}))
    assert done.stdout == f"{1 if asked else 0}\n", done.stderr


LOADED = """
import json, sys, verl
def loaded():
    return {{name: module.__file__ for name, module in sys.modules.items()
             if name.partition(".")[0] == "verl_gdpo" and getattr(module, "__file__", None)}}
import verl.trainer.ppo.v1
import verl.experimental.reward_loop.reward_manager
early = loaded()
from datasets import Dataset
from omegaconf import OmegaConf
from types import SimpleNamespace
from verl_gdpo.hooks.extend import load, record_of, table
config = OmegaConf.load({file!r})
trainer = verl.trainer.ppo.v1.get_trainer_cls("sync")(config)
row = dict(data_source="verl_gdpo/gsm8k", reward_model=dict(ground_truth="72"))
trainer.train_dataset = trainer.val_dataset = SimpleNamespace(dataframe=Dataset.from_list([row]))
record_of(trainer).check_rows(trainer)
for extension in table:
    if extension.at_construction or "compute_advantage" in extension.path:
        load(extension.replacement)
load("verl_gdpo.hooks.estimator:compute_gdpo")
print(json.dumps([early, loaded()]))
"""


def test_what_verls_processes_load(python, gsm8k):
    done = python(LOADED.format(file=gsm8k))
    assert done.returncode == 0, done.stderr
    early, late = json.loads(done.stdout.splitlines()[-1])
    assert {*early} == LOADED_WITH_TRAINER_AND_MANAGERS
    # the look at checkpoints imports the standard library alone
    of_run = {name for name in late if name.startswith("verl_gdpo.tools")}
    assert of_run == {
        "verl_gdpo.tools",
        "verl_gdpo.tools.run",
        "verl_gdpo.tools.run.attention",
        "verl_gdpo.tools.run.checkpoints",
        "verl_gdpo.tools.run.plugin",
        "verl_gdpo.tools.run.checkpoint_loading",
        "verl_gdpo.tools.run.stacks",
    }
    assert not any(name.startswith("verl_gdpo.tasks.sandbox") for name in late)
    # the nodes of a cluster compare what scores and what trains
    package = REPO / "verl_gdpo"
    compared = {package / file for file in code_files(package, COMPARED)}
    assert {name for name, file in late.items() if Path(file) not in compared} == {
        "verl_gdpo.cpu",
        "verl_gdpo.cpu.plugin",
        "verl_gdpo.terminal",
        *of_run,
    }


# --- the table -----------------------------------------------------------------------------------

CHANGED = (*EXTENSIONS, *run_plugin.EXTENSIONS)
ALL = (*CHANGED, *CALLED_BY_TOOLS)


@pytest.fixture(scope="session")
def grpo(tmp_path_factory):
    """verl's own configuration of a run with grpo and fused kernels."""
    file = tmp_path_factory.mktemp("grpo") / "grpo.yaml"
    settings = [
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.strategy=fsdp2"),
        *("actor_rollout_ref.model.use_fused_kernels=True", f"trainer.default_local_dir={file}"),
    ]
    config = compose_quickly(None, "ppo_trainer", settings)
    assert config.reward.reward_manager.name == "naive"
    file.write_text(OmegaConf.to_yaml(config, resolve=True))
    return str(file)


def test_a_run_without_gdpo_calls_verls_own_functions(python, grpo, tmp_path):
    """Each of the table, with verl's own arguments; what was called is left as it was."""
    changed = []
    for each in CHANGED:
        row = [each.module, each.path, each.at_construction]
        if each.replacement and row not in changed:  # two tables may change one function
            changed.append(row)
    table = tmp_path / "table.json"
    table.write_text(json.dumps(changed))
    code = (REPO / "tests" / "help" / "left_alone.py").read_text()
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none", GRPO_CONFIG=grpo, TABLE=str(table))
    assert (done.stdout, done.returncode) == (f"{len(changed)} functions\n", 0), done.stderr


def test_the_tested_verl_has_no_parameter_that_we_do_not_know():
    unknown = {each.symbol: each.unknown_parameters() for each in CHANGED}
    assert {symbol: names for symbol, names in unknown.items() if names} == {}


def test_what_this_verl_also_needs_is_named(python):
    """As with a pull request that gives `_compute_score` a third argument."""
    change = """
import verl.experimental.agent_loop.agent_loop as a
async def compute(self, outputs, kwargs, validate, more=None): pass
a.AgentLoopWorker._compute_score = compute
"""
    code = NEWER.format(version="0.9.2", gone=[], use_v1=True)
    done = python(f"import verl{change}{code}", VERL_USE_EXTERNAL_PLUGINS="none")
    (warning,) = re.findall("verl-gdpo: WARNING: (.*)", done.stderr)
    name = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score"
    assert warning.startswith(f"{name} of this verl also needs validate, which"), done.stderr
    assert done.stdout == ""


def test_nothing_that_we_rely_on_is_missing():
    assert [each.symbol for each in ALL if each.is_missing()] == []


@pytest.mark.parametrize(
    ("module", "path", "needs", "is_there"),
    [
        ("os.path", "join", ("a",), True),
        ("os.path", "join", ("b",), False),
        ("os.path", "joins", (), False),
        ("os.paths", "join", (), False),
        ("pathlib", "Path.exists", ("self",), True),
        ("pathlib", "Path.is", ("self",), False),
    ],
)
def test_how_a_symbol_is_looked_up(module, path, needs, is_there):
    assert Extension(module, path, needs=needs).is_missing() != is_there


def test_each_function_of_ours_is_there():
    for each in (*CHANGED, *ON_CPU, *OWN_ROLLOUT):
        module, _, function = each.replacement.partition(":")
        if function:
            tree = ast.parse((REPO / f"{module.replace('.', '/')}.py").read_text())
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            assert function in {n.name for n in tree.body if isinstance(n, functions)}, each


def test_each_table_has_its_name():
    assert {each.table for each in EXTENSIONS} == {"core"}
    assert {each.table for each in run_plugin.EXTENSIONS} == {"run"}
    assert {each.table for each in (*ON_CPU, *OWN_ROLLOUT)} == {"cpu"}
    assert all(each.is_required for each in EXTENSIONS)
    assert not any(each.is_required for each in run_plugin.EXTENSIONS)


def test_nothing_else_changes_verl():
    """Nowhere else in the source is an attribute of verl set, or a class made late."""
    faults = []
    for path in sorted((REPO / "verl_gdpo").rglob("*.py")):
        faults += [
            f"{path.name}: {fault}" for fault in changes_of_others(ast.parse(path.read_text()))
        ]
    assert faults == [
        "extend.py: setattr(owner, name, stand_in)",
        "extend.py: setattr(module, name, stand_in)",
    ]


FOREIGN = ("verl", "ray", "transfer_queue", "vllm")


def changes_of_others(tree):
    """Assignments to attributes and items of what is imported of others, and classes made late."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(each.asname or each.name.partition(".")[0], each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(each.asname or each.name, node.module or "") for each in node.names]
        else:
            continue
        imported |= {name for name, of in names if of.partition(".")[0] in FOREIGN}
    for node in ast.walk(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for target in targets:
                text = ast.unparse(target)
                owners = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
                is_part = isinstance(target, (ast.Attribute, ast.Subscript))
                if text.endswith(".__class__") or (is_part and owners & imported):
                    yield ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and node.name == "__new__":
            yield "def __new__"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "setattr" or (name == "type" and len(node.args) == 3):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "fault",
    [
        "from verl.utils import debug\ndebug.marked_timer = 1",
        "from verl.a import REGISTRY\nREGISTRY['gdpo'] = 1",
        "import verl.a\nvars(verl.a)['b'] = 1",
        "import verl.a as a\na.B.c = 1",
        "trainer.__class__ = 1",
        "setattr(trainer, 'fit', 1)",
        "type('Mine', (), {})",
        "class A:\n    def __new__(cls): pass",
    ],
)
def test_how_a_change_of_verl_is_found(fault):
    assert [*changes_of_others(ast.parse(fault))]


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
