"""Calls each function of verl that our table changes, in a run without gdpo.

    GRPO_CONFIG=verl.yaml TABLE=rows.json python left_alone.py

`test_plugin.py` runs it in a process whose verl has not loaded the plugin. The table says what is
changed: [module, name, whether this is done when a trainer is made]. Each function of verl is
replaced by one that notes its arguments, and takes more of them, as a later verl may. Then the
plugin is loaded, as in any process of verl.
It prints a line for each call that did not arrive as it was made, and how many functions there are.
"""

import asyncio
import functools
import importlib
import inspect
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import torch
import verl  # noqa: F401
from later_verl import later_signature
from omegaconf import OmegaConf

CONFIG = OmegaConf.load(os.environ["GRPO_CONFIG"])
TABLE = json.loads(Path(os.environ["TABLE"]).read_text())


def instance_of(owner):
    """An instance of one of verl's classes, which has nothing but the configuration."""
    concrete = type(owner.__name__, (owner,), {})
    concrete.__abstractmethods__ = frozenset()
    instance = object.__new__(concrete)
    instance.config = CONFIG
    return instance


# --- what verl calls them with -------------------------------------------------------------------


class FusedModel(torch.nn.Module):
    """As verl leaves a model with fused kernels, whose embeddings are not tied."""

    from verl.models.transformers.dense_common import forward_with_torch_backend as forward

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(2, 2)


def output_with(fields):
    """The output of an agent loop, which may use names that we use too."""
    return SimpleNamespace(reward_score=None, extra_fields=dict(fields), metrics=None)


def batch_of_legacy_trainer():
    info = [{}, {"seq_reward": 1.0}]
    return SimpleNamespace(
        non_tensor_batch={"reward_extra_info": info}, meta_info={"reward_extra_keys": []}
    )


OUTPUT = {"tool_seconds": 3, "is_validation": "mine"}
INFOS = {"reward": [1.0, 2.0], "acc": [None, 1.0]}
FSDP_MODEL = SimpleNamespace(
    override_config={"attn_implementation": "sdpa"}, fused_kernel_options={"impl_backend": "torch"}
)

WITH_OWN_FUNCTION = OmegaConf.merge(
    CONFIG, {"reward": {"custom_reward_function": {"path": "mine.py", "name": "score"}}}
)
DUMPED = {
    "inputs": [],
    "outputs": [],
    "gts": [],
    "scores": [],
    "reward_extra_infos_dict": {},
    "dump_path": "folder",
}

# {name: (positional arguments behind `self`, keywords)}
ARGUMENTS = {
    "auto_set_device": ([CONFIG], {}),
    "run_ppo": ([CONFIG, object()], {}),
    "need_critic": ([CONFIG], {}),
    "need_reference_policy": ([CONFIG], {}),
    "get_adv_estimator_fn": (["grpo"], {}),
    "get_reward_manager_cls": (["naive"], {}),
    "AgentLoopWorker._run_agent_loop": ([{}, {"validate": True}], {"agent_name": "tool_agent"}),
    "AgentLoopWorker._compute_score": ([[output_with(OUTPUT)]], {"kwargs": {"index": 0}}),
    "AgentLoopWorker._postprocess": ([[output_with(OUTPUT)]], {"validate": True}),
    "_settle_session_tasks": ([[]], {}),
    "PPOTrainer.__init__": ([CONFIG], {}),
    "PPOTrainer._setup": ([], {}),
    "compute_advantage_for_multi_trajectories": (
        [object(), ["u_0_0"], "grpo"],
        {"config": CONFIG.algorithm},
    ),
    "RayPPOTrainer._create_dataloader": ([None, None], {"collate_fn": None, "train_sampler": None}),
    "compute_advantage": ([object()], {"adv_estimator": "grpo", "config": CONFIG.algorithm}),
    "get_custom_reward_fn": ([WITH_OWN_FUNCTION], {}),
    "extract_reward": ([batch_of_legacy_trainer()], {}),
    "compute_data_metrics": ([SimpleNamespace(batch={})], {"use_critic": False}),
    "process_validation_metrics": ([["x", "x"], ["u", "v"], INFOS], {"seed": 1}),
    "FullyAsyncTrainer.__init__": ([CONFIG, None, {}, None], {"device_name": "cuda"}),
    "FullyAsyncTrainer.fit": ([], {}),
    "FullyAsyncRollouter.fit": ([], {}),
    "FullyAsyncRollouter._streaming_generation_main": ([], {}),
    "FSDPEngine._build_module": ([], {}),
    "FSDPCheckpointManager.load_checkpoint": (["folder/global_step_2/actor"], {}),
    "_select_fsdp2_wrap_targets": ([FusedModel(), ["Layer"]], {}),
    # at construction
    "PPOTrainer._init_dataloader": ([], {}),
    "PPOTrainer._build_replay_buffer": ([], {}),
    "PPOTrainer.fit": ([object()], {}),
    "PPOTrainer._compute_advantage": ([object(), {}], {}),
    "PPOTrainer._log_rollout_data": ([object(), {}, "folder"], {}),
    "PPOTrainer._dump_generations": ([], DUMPED),
    "PPOTrainer._val_metrics_update": ([["x"], ["u"], {"acc": [None]}, []], {}),
    "ReplayBuffer.sample": ([1, "train", 8], {}),
    "ReplayBuffer._sync_metadata_from_transfer_queue": ([], {}),
    "ReplayBuffer._clear_groups": (["train", {"u"}], {}),
    "ReplayBuffer._sampleable_terminal_keys": (["train", (set(), set(), set(), {})], {}),
    "ReplayBuffer._select_prompt_uids": (["train", {"u"}, 8], {}),
    "ReplayBuffer._materialize_batch": (["train", ["u"], {}], {}),
    "ReplayBuffer._terminal_eviction_reasons": ([1, "train"], {}),
    "ReplayBuffer._dapo_filtered_keys": (["train"], {}),
    "RayPPOTrainer.fit": ([], {}),
    "RayPPOTrainer._get_gen_batch": ([object()], {}),
    "RayPPOTrainer._log_rollout_data": ([object(), {}, {}, "folder"], {}),
    "RayPPOTrainer._dump_generations": ([], DUMPED),
    "RayPPOTrainer._val_metrics_update": ([["x"], ["u"], {"acc": [None]}, []], {}),
}


# --- verl's own functions ------------------------------------------------------------------------

calls = []  # (name, {parameter: what verl's function got})
signatures = {}
RESULT = object()


def place_of(module, path):
    """The owner and the name; an actor class of Ray has its methods in another class."""
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    return getattr(getattr(owner, "__ray_metadata__", None), "modified_class", owner), name


def noting(original, path):
    """A function that takes what verl's takes and more, and notes its calls."""
    signature = signatures[path] = later_signature(original, "." in path)
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def note(*args, **kwargs):
            calls.append((path, signature.bind(*args, **kwargs).arguments))
            return RESULT

    else:

        @functools.wraps(original)
        def note(*args, **kwargs):
            calls.append((path, signature.bind(*args, **kwargs).arguments))
            return RESULT

    note.__signature__ = signature
    del note.__wrapped__
    return note


for module, path, _ in TABLE:
    owner, name = place_of(module, path)
    setattr(owner, name, noting(getattr(owner, name), path))

before = OmegaConf.to_container(CONFIG, resolve=True), dict(os.environ)

import verl_gdpo.plugin  # noqa: E402
import verl_gdpo.tools.run.plugin  # noqa: E402, F401
from verl_gdpo.hooks import extend  # noqa: E402
from verl_gdpo.tools.run import stacks  # noqa: E402

# --- the calls -----------------------------------------------------------------------------------

# another trainer of this process has gdpo, so that the methods are extended in verl's classes
for module, path, at_construction in TABLE:
    owner, name = place_of(module, path)
    if at_construction:
        kind = path.partition(".")[0]
        extend.extend_instance(instance_of(owner), kind, SimpleNamespace(busy=set()))


def call(module, path):
    """Call what stands in the place of verl's function; return the arguments."""
    owner, name = place_of(module, path)
    positional, keywords = ARGUMENTS[path]
    positional = [object(), *positional]  # one that a later verl puts before the others
    keywords = {**keywords, "last": object(), "keyword": object()}
    function = getattr(owner, name)
    if not hasattr(function, "verl_gdpo_extension"):
        print(f"{path}: nothing of ours stands in its place")
    if "." in path:
        instance = instance_of(owner)
        instance.model_config = FSDP_MODEL
        positional = [instance, *positional]
    result = function(*positional, **keywords)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if result is not RESULT and name != "__init__":
        print(f"{path}: returned {result!r} instead of verl's own")
    return positional, keywords


def is_same(one, other):
    """Whether two values are one, or hold the same: a call packs *args and **kwargs anew."""
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is type(other) is dict:
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return one is other


for module, path, _ in TABLE:
    calls.clear()
    positional, keywords = call(module, path)
    given = signatures[path].bind(*positional, **keywords).arguments
    if [name for name, _ in calls] != [path]:
        print(f"{path}: the functions of verl that were called are {[name for name, _ in calls]}")
        continue
    ((_, received),) = calls
    if not is_same(given, received):
        print(f"{path}: called with {given}, but verl's own got {received}")

# --- what is left behind -------------------------------------------------------------------------

if (OmegaConf.to_container(CONFIG, resolve=True), dict(os.environ)) != before:
    print("the configuration or the environment has changed")
if ARGUMENTS["AgentLoopWorker._compute_score"][0][0][0].extra_fields != OUTPUT:
    print("what an agent loop had noted is gone")
if stacks.files_of(os.getpid()) or signal.getsignal(stacks.SIGNAL) != signal.SIG_DFL:
    print("a signal is registered")
from transformers import AttentionInterface  # noqa: E402

if "packed_sdpa" in AttentionInterface().valid_keys():
    print("an attention is registered")
print(len(TABLE), "functions")
