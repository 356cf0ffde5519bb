"""Each function of our tables hands on what another verl may add to the parameters of its own.

Of each function of verl, a version is made that has three parameters more: one before those that we
know, one behind them, and a keyword. Ours stands in its place, in a run with gdpo, and all that it
uses besides is a stub.
"""

import ast
import asyncio
import contextlib
import copy
import importlib
import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from composed_recipes import composed
from later_verl import later_signature
from omegaconf import OmegaConf
from repository import REPO

from verl_gdpo.cpu.plugin import ON_CPU, OWN_ROLLOUT, ROLLOUTS
from verl_gdpo.hooks import driver, extend, legacy, trainer
from verl_gdpo.hooks.extend import RECORD
from verl_gdpo.plugin import EXTENSIONS
from verl_gdpo.tools.run import plugin as run_plugin
from verl_gdpo.tools.run import record

CHANGED = [
    each
    for each in (*EXTENSIONS, *run_plugin.EXTENSIONS, *ON_CPU, *OWN_ROLLOUT)
    if each.replacement
]
# It keeps a layer of vLLM as it is, and so calls nothing of vLLM's.
CALLS_NOTHING = "verl_gdpo.cpu.plugin:keep_weights"
HANDING_ON = [each for each in CHANGED if each.replacement != CALLS_NOTHING]


# --- verl's functions in a later version ---------------------------------------------------------


class Later:
    """A function of a later verl: it notes what it gets, and returns `result`."""

    def __init__(self, own, result, *, is_method):
        self.signature = later_signature(own, is_method)
        self.got = []

        def note(*args, **kwargs):
            self.got.append(self.signature.bind(*args, **kwargs).arguments)
            return result

        async def wait(*args, **kwargs):
            return note(*args, **kwargs)

        self.function = wait if inspect.iscoroutinefunction(own) else note
        self.function.__signature__ = self.signature


@pytest.mark.parametrize("is_method", [False, True])
def test_a_later_version(is_method):
    def own(a, b=2, *, c=3, **others):
        raise AssertionError

    later = Later(own, "result", is_method=is_method)
    names = ["a", "first"] if is_method else ["first", "a"]
    assert list(later.signature.parameters) == [*names, "b", "last", "c", "keyword", "others"]
    assert later.function(1, 2, keyword=3, more=4) == "result"
    assert later.got == [{names[0]: 1, names[1]: 2, "keyword": 3, "others": {"more": 4}}]


# --- what stands around them in a run with gdpo --------------------------------------------------


@pytest.fixture(scope="module")
def config():
    config = composed("hardware=cpu", "task=gsm8k")
    OmegaConf.set_struct(config, False)
    return config


@pytest.fixture
def stubs(monkeypatch):
    """In the place of all that ours does besides."""
    for module, name in (
        (driver, "check_run"),
        (driver, "probing"),
        (trainer, "AdvantageStep"),
        (trainer, "TokenAdvantages"),
        (trainer, "check_reward_workers"),
        (trainer, "queue_actors"),
        (trainer, "zero_masks"),
        (legacy, "AdvantageStep"),
        (legacy, "TokenAdvantages"),
        (record, "_keep_metrics"),
        (record, "hand_over"),
        (record, "recorded_start"),
        (record, "write_into_run_dir"),
    ):
        monkeypatch.setattr(module, name, MagicMock(name=name))
    step = MagicMock()
    step.rows.is_padding_B.any.return_value = False
    monkeypatch.setattr(trainer, "current_step", lambda: step)
    monkeypatch.setattr(driver, "naming_the_trainer", contextlib.nullcontext)
    monkeypatch.setattr(record, "naming_the_trainer", contextlib.nullcontext)
    monkeypatch.setitem(ROLLOUTS, "hf", ("module", "adapter"))


def instance_of(extension, config):
    """The trainer, buffer, worker or engine whose method is called."""
    instance = MagicMock()
    instance.config = config
    instance.filter_groups_metric = None
    if extension.path.startswith("AgentLoopWorker."):  # it makes its record itself
        setattr(instance, RECORD, None)
        return instance
    own_record = MagicMock(busy=set(), has_manager=True, ended_by=None)
    own_record.is_early.return_value = False
    own_record.check_rows.return_value = None
    setattr(instance, RECORD, own_record)
    return instance


OUTPUT = SimpleNamespace(
    reward_score=0.5,
    extra_fields={},
    metrics=SimpleNamespace(tool_calls=0.0),
    response_mask=[1, 1],
)
BATCH = SimpleNamespace(keys=[], partition_id="train", tags=[])
# {function of verl: {parameter: what it is called with}}; others get a stub
ARGUMENTS = {
    "get_adv_estimator_fn": {"name_or_enum": "grpo"},
    "get_reward_manager_cls": {"name": "naive"},
    "get_rollout_class": {"rollout_name": "vllm"},
    "version": {"distribution_name": "verl"},
    "AgentLoopWorker._run_agent_loop": {"sampling_params": {}, "trajectory": {"validate": False}},
    "AgentLoopWorker._compute_score": {"outputs": [OUTPUT], "kwargs": {}},
    "AgentLoopWorker._postprocess": {"inputs": [OUTPUT]},
    "_settle_session_tasks": {"tasks": []},
    "PPOTrainer._compute_advantage": {"batch": BATCH, "metrics": {}},
    "PPOTrainer._dump_generations": {"reward_extra_infos_dict": {"uid": ["u_0_0"]}},
    "PPOTrainer._val_metrics_update": {
        "data_sources": ["s"],
        "sample_uids": ["u"],
        "reward_extra_infos_dict": {"a": [1.0]},
        "expected_acc_counts": {("s", "u"): 1},
    },
    "RayPPOTrainer._dump_generations": {"reward_extra_infos_dict": {"uid": ["u_0_0"]}},
    "RayPPOTrainer._log_rollout_data": {"reward_extra_infos_dict": {}},
    "RayPPOTrainer._val_metrics_update": {
        "data_sources": ["s"],
        "sample_uids": ["u"],
        "reward_extra_infos_dict": {"a": [1.0]},
    },
    "compute_advantage": {"adv_estimator": "grpo"},
    "process_validation_metrics": {
        "data_sources": ["s"],
        "sample_uids": ["u"],
        "infos_dict": {"a": [1.0]},
    },
    "ReplayBuffer._clear_groups": {"partition_id": "train", "uids": set()},
    "ReplayBuffer._sampleable_terminal_keys": {"partition_id": "train"},
    "ReplayBuffer._select_prompt_uids": {"partition_id": "train", "sampleable_keys": set()},
    "ReplayBuffer._materialize_batch": {
        "partition_id": "train",
        "selected_prompt_uids": [],
        "partition_snapshot": {},
    },
    "ReplayBuffer._dapo_filtered_keys": {"partition_id": "train"},
    "FSDPCheckpointManager.load_checkpoint": {"local_path": None},
    "_select_fsdp2_wrap_targets": {"model": object()},
}
# {function of verl: what it returns}; others return a stub
RESULTS = {
    "fsdp2_sharded_save_to_cpu": ({}, "spec"),
    "ReplayBuffer.sample": (BATCH, {}),
    "ReplayBuffer._select_prompt_uids": (["u"], {"u_0_0": {}}),
    "extract_reward": (MagicMock(), {}),
    "compute_data_metrics": {},
}
# {function of verl: the arguments that ours changes}
CHANGES = {
    "run_ppo": {"task_runner_class"},
    "AgentLoopWorker._run_agent_loop": {"sampling_params"},
    "PPOTrainer._dump_generations": {"reward_extra_infos_dict"},
    "PPOTrainer._val_metrics_update": {"reward_extra_infos_dict", "expected_acc_counts"},
    "RayPPOTrainer._dump_generations": {"reward_extra_infos_dict"},
    "RayPPOTrainer._val_metrics_update": {"reward_extra_infos_dict"},
    "RayPPOTrainer._log_rollout_data": {"reward_extra_infos_dict"},
    "ReplayBuffer._materialize_batch": {"partition_snapshot"},
    "get_custom_reward_fn": {"config"},
    "initialize_global_process_group_ray": {"backend"},
    "CPUOffloadPolicy": {"pin_memory"},
}


@pytest.mark.parametrize("by_keyword", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("extension", HANDING_ON, ids=lambda each: f"{each.table}-{each.path}")
def test_what_a_later_verl_adds_is_handed_on(extension, by_keyword, config, stubs):
    owner, name = extend._place(importlib.import_module(extension.module), extension.path)
    own = inspect.unwrap(getattr(owner, name))
    is_method = inspect.isclass(owner)
    result = RESULTS.get(extension.path, MagicMock())
    later = Later(own, result, is_method=is_method)
    stand_in = extend._standing_for(later.function, extension)

    given = {}
    for parameter in later.signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            given[parameter.name] = MagicMock(name=parameter.name)
    if "config" in given:
        given["config"] = config
    given |= copy.deepcopy(ARGUMENTS.get(extension.path, {}))
    if is_method:
        given["self"] = instance_of(extension, config)
    args, kwargs = [], dict(given)
    for parameter in later.signature.parameters.values():
        in_place = parameter.name == "self" or not by_keyword
        if in_place and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            args.append(kwargs.pop(parameter.name))

    returned = stand_in(*args, **kwargs)
    if inspect.iscoroutine(returned):
        asyncio.run(returned)
    (got,) = later.got
    assert got.keys() == given.keys()
    changes = {name for name in given if got[name] is not given[name]}
    assert changes <= CHANGES.get(extension.path, set())


# --- the source ----------------------------------------------------------------------------------


def functions_of(module):
    tree = ast.parse((REPO / f"{module.replace('.', '/')}.py").read_text())
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def names_asked(module, function):
    """The names that a function asks its `call` for, also where it gives the call to another."""
    known = functions_of(module)
    node = known[function]
    required, optional = set(), set()
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and ast.unparse(each.value) == "call":
            required.add(ast.literal_eval(each.slice))
        if isinstance(each, ast.Call):
            called = ast.unparse(each.func)
            if called in ("call.get", "call.takes"):
                optional.add(ast.literal_eval(each.args[0]))
            if called == "call.changed":
                required |= {keyword.arg for keyword in each.keywords}
            hands_over = any(ast.unparse(argument) == "call" for argument in each.args)
            if called in known and called != function and hands_over:
                of_other = names_asked(module, called)
                required |= of_other[0]
                optional |= of_other[1]
        if isinstance(each, ast.Compare) and ast.unparse(each.comparators[0]) == "call":
            optional.add(ast.literal_eval(each.left))
    return required, optional


@pytest.mark.parametrize("extension", CHANGED, ids=lambda each: f"{each.table}-{each.path}")
def test_ours_takes_a_call_and_asks_it_for_what_the_table_says(extension):
    module, _, name = extension.replacement.partition(":")
    node = functions_of(module)[name]
    assert ast.unparse(node.args) == "call: Call"
    required, optional = names_asked(module, name)
    # `load` gives the call to the function of another module.
    if extension.replacement == "verl_gdpo.hooks.estimator:compute_in_step":
        required, optional = names_asked("verl_gdpo.hooks.legacy", name)
    assert required - optional <= set(extension.needs) <= required | optional
