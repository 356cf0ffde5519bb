"""The functions of verl that `verl-gdpo check` calls; none of them starts Ray or loads a model.

Relies on verl 0.9: `utils.config.validate_config` with `need_reference_policy` and `need_critic`;
`get_trainer_cls`, `load_reward_manager`, `get_dataset_class`, `DataProto.from_dict`; the names in
`ADV_ESTIMATOR_REGISTRY`, `POLICY_LOSS_REGISTRY`, `RolloutReplicaRegistry._registry`,
`_agent_loop_registry` and `Tracking.supported_backend`; what `kl_penalty_forward`, `EngineRegistry`
and `_load_checkpoint` compare with; `build_optimizer(parameters, FSDPOptimizerConfig)`, which calls
torch; the classes that blocks of the configuration name under `_target_`, with their types; the
signatures of `AgentLoopWorker` and the columns that `AgentLoopOutput.as_dict` makes; the
filter of `RLHFDataset`, `maybe_filter_out_long_prompts`, which asks `tokens <= max_prompt_length`
of each row, and where a prompt cannot be written takes `max_prompt_length + 1` for its tokens; and
the files of tools that `load_all_tools` reads.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from inspect import signature
from io import StringIO
from typing import Any, get_type_hints

import numpy as np
import torch
import verl
from hydra.errors import InstantiationException
from hydra.utils import get_class
from omegaconf import OmegaConf

from verl_gdpo.hooks.extend import load_all
from verl_gdpo.tools.check.output import missing_module

VERSION: str = verl.__version__
ACTOR = "actor_rollout_ref.actor"
KINDS = {bool: "True or False", int: "a whole number", float: "a number"}
# verl's default is null, so that no type is written anywhere.
OF_NULL = {
    "data.seed": int,
    "data.gen_batch_size": int,
    "data.val_batch_size": int,
    "trainer.total_training_steps": int,
}
# verl's losses take `clip_ratio` where these are null, whatever the annotation says.
MAY_BE_NULL = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
# verl reads a band in a text too, as in "0.5_2.0".
MAY_BE_TEXT = ("algorithm.rollout_correction.rollout_is_threshold",)
PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "torchtitan", "veomni", "automodel")


def wrong_types(block: Any, defaults: Any, path: str = "") -> dict[str, str]:
    """Return {key: what verl takes there} of each value that is no such number or boolean.

    The type is that of the field in verl's class of the block (`_target_`), or of verl's default.

    Args:
        defaults: the same block of verl's own configuration; None if verl has none.
        path: what stands before each key.
    """
    wrong: dict[str, str] = {}
    hints = _hints(block.get("_target_"))
    for key in block:
        name = f"{path}{key}"
        if OmegaConf.is_missing(block, key) or OmegaConf.is_interpolation(block, key):
            continue
        value = block[key]
        default = None
        if OmegaConf.is_dict(defaults) and not OmegaConf.is_missing(defaults, key):
            default = defaults.get(key)
        if OmegaConf.is_dict(value):
            wrong |= wrong_types(value, default, f"{name}.")
            continue
        if isinstance(value, str) and name in MAY_BE_TEXT:
            # verl's own function reads it later, see `asked.losses`.
            continue
        annotation = hints.get(key, OF_NULL.get(name, type(default)))
        kind = _kind_of(annotation)
        if kind is None or value == default:
            continue
        may_be_null = annotation != kind or kind is bool or name in MAY_BE_NULL
        if value is None and may_be_null:
            continue
        if type(value) is kind or (kind is float and type(value) is int):
            continue
        wrong[name] = f"expected {KINDS[kind]}"
    return wrong


def _kind_of(annotation: Any) -> type | None:
    """Return the kind of number that an annotation asks for, alone or beside None."""
    for kind in KINDS:
        if annotation in (kind, kind | None):
            return kind
    return None


@cache  # A configuration has some 140 blocks, most of them of the same few classes.
def _hints(target: str | None) -> Mapping[str, Any]:
    """Return the annotations of a class of verl's; none if it cannot be had."""
    if not target:
        return {}
    try:
        return get_type_hints(get_class(target))
    except Exception:
        # verl says so, if it makes the class in this run.
        return {}


def make_optimizer(config: Any) -> None:
    """Let torch judge the options of FSDP's optimizer, on one parameter.

    Raises:
        ValueError: an option cannot be used.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    parameter = torch.nn.Parameter(torch.zeros(1))
    options = config.actor_rollout_ref.actor.optim
    try:
        if options._target_.endswith("FSDPOptimizerConfig"):
            build_optimizer([parameter], omega_conf_to_dataclass(options))
    except InstantiationException:
        # It names the key itself.
        raise
    except Exception as error:
        # The names of a whole module follow.
        reason, _, _ = str(error).partition(" Available")
        raise ValueError(f"{ACTOR}.optim: {reason}") from error


def what_validation_prints(config: Any) -> list[str]:
    """Let verl validate the configuration, except the critic's model; return what it prints.

    That model would be looked up on a hub.

    Raises:
        Exception: the exception of verl for a wrong configuration.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    without_model = deepcopy(config)
    without_model.critic.model = None
    if find_spec("vllm") is None:
        # verl would ask vLLM which ranks it takes.
        without_model.actor_rollout_ref.model.update(lora_rank=0, lora={})
    with redirect_stdout(StringIO()) as printed:
        validate_config(without_model, need_reference_policy(config), need_critic(config))
    return [line for line in printed.getvalue().splitlines() if "checks passed" not in line]


def import_parts(config: Any) -> None:
    """Import verl's trainer and reward managers, and all that we put in the place of verl's.

    Raises:
        ImportError: a module cannot be imported; `name` is that module of verl.
    """
    trainer = "v1" if config.trainer.get("use_v1", False) else "ray_trainer"
    for part in (f"trainer.ppo.{trainer}", "experimental.reward_loop.reward_manager"):
        try:
            importlib.import_module(f"verl.{part}")
        except ImportError as error:
            raise ImportError(str(error), name=f"verl.{part}") from error
    load_all()


def known_names(key: str) -> list[str]:
    """Names that verl knows for a key of the configuration, with those that others registered."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    names = {
        "algorithm.adv_estimator": ADV_ESTIMATOR_REGISTRY,
        f"{ACTOR}.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        "actor_rollout_ref.rollout.name": RolloutReplicaRegistry._registry,
        "actor_rollout_ref.rollout.agent.default_agent_loop": _agent_loop_registry,
        "trainer.logger": Tracking.supported_backend,
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
        f"{ACTOR}.kl_loss_type": [kind + end for kind in PENALTIES for end in ("", "+")],
        f"{ACTOR}.strategy": STRATEGIES,
    }[key]
    return sorted({str(getattr(name, "value", name)) for name in names})


def make_rollout_config(config: Any) -> None:
    """Make what verl makes of the rollout's block in its workers, without starting them.

    Raises:
        Exception: verl refuses `actor_rollout_ref.rollout`.
    """
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


def trains_critic(config: Any) -> bool:
    """Whether verl trains a critic."""
    from verl.trainer.ppo.utils import need_critic

    return bool(need_critic(config))


def make_v1_trainer(config: Any) -> None:
    """Make the trainer, whose constructor checks the configuration and starts nothing.

    Raises:
        Exception: verl or the trainer refuses the configuration.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    get_trainer_cls(config.trainer.v1.trainer_mode)(deepcopy(config))


def make_reward_manager(config: Any, tokenizer: Any, **server: Any) -> Any:
    """Make the configured reward manager; `server` holds keywords for a reward model."""
    from verl.trainer.ppo.reward import load_reward_manager

    return load_reward_manager(config, tokenizer, **server)


def one_rollout(
    prompt: list[int], response: list[int], row: Mapping[str, Any], **columns: Any
) -> Any:
    """Return a batch of one rollout, as verl's agent loop passes it to a reward manager.

    Args:
        prompt, response: token ids.
        row: of the data.
        columns: more non-tensor columns.
    """
    extra_info = dict(row.get("extra_info") or {})
    fields = dict(row)
    fields["extra_info"] = extra_info
    fields["index"] = extra_info.get("index", 0)
    fields["__num_turns__"] = 2
    fields["tool_extra_fields"] = {}
    fields.update(columns)
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([response]),
            "attention_mask": torch.ones(1, len(prompt) + len(response), dtype=torch.int64),
        },
        non_tensors={key: np.fromiter([value], dtype=object) for key, value in fields.items()},
    )


# --- columns of the rows --------------------------------------------------------------------------


def names_beside_columns(config: Any) -> set[str]:
    """Return the names of arguments that verl's agent loop passes beside the columns of a row.

    A row may name its agent loop: that argument comes from a column.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    names = set()
    for function in (AgentLoopWorker._run_agent_loop, AgentLoopWorker._agent_loop_postprocess):
        for parameter in signature(function).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                names.add(parameter.name)
    names.remove("agent_name")
    if config.trainer.get("use_v1", False):
        # `AgentLoopWorkerTQ._run_prompt` adds it, which no signature says.
        names.add("session_id")
    return names


def names_of_rollouts(config: Any) -> set[str]:
    """Return the names under which a V1 trainer has the tokens and numbers of a rollout.

    `AgentLoopWorkerTQ._agent_loop_postprocess` puts the columns of the row over them.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    if not config.trainer.get("use_v1", False):
        return set()
    output = AgentLoopOutput(
        prompt_ids=[0],
        response_ids=[0],
        response_mask=[1],
        response_logprobs=[0.0],
        reward_score=0.0,
        metrics=AgentLoopMetrics(),
        extra_fields={},  # verl 0.9.0 leaves out what nobody has set, and then looks it up
    )
    names = {"extra_fields"}
    for name, value in output.as_dict().items():
        if isinstance(value, torch.Tensor):
            names.add(name)
    return names


# --- prompts --------------------------------------------------------------------------------------


class _Rows(list[Mapping[str, Any]]):
    """Rows in the place of a dataset's data frame. They are filtered here, in no other process."""

    def filter(self, is_kept: Callable[[Mapping[str, Any]], bool], **_options: Any) -> "_Rows":
        return _Rows([row for row in self if is_kept(row)])


class _NoLimit(int):
    """A limit in the place of `max_prompt_length` that no prompt reaches. It keeps their tokens."""

    def __init__(self, _value: int) -> None:
        self.tokens_of_rows: list[int] = []

    def __ge__(self, tokens: int) -> bool:
        # Python asks this side of `tokens <= limit` first, because its class is derived from int.
        self.tokens_of_rows.append(tokens)
        return True


def count_tokens(
    config: Any, tokenizer: Any, tools: Sequence[Any], rows: Sequence[Mapping[str, Any]]
) -> list[int | None]:
    """Return the tokens of each row's prompt, as the filter of verl's dataset counts them.

    It is None for a prompt that the chat template does not write. Pictures are not counted.

    Args:
        tools: their schemas, see `tool_schemas`.
    """
    from verl.utils.dataset.rl_dataset import RLHFDataset

    class Dataset(RLHFDataset):  # type: ignore[misc]  # verl is seen as Any
        def _download(self, *_: Any, **__: Any) -> None:
            """The rows are here already."""

        def _read_files_and_tokenize(self) -> None:
            """Nothing is filtered before the tools are known."""

    # It would make the tools, and some of verl's own start Ray.
    without_tools = {"tool_config_path": None, "function_tool_path": None}
    data = OmegaConf.merge(config.data, without_tools, {"filter_overlong_prompts": True})
    dataset = Dataset(data_files=[], tokenizer=tokenizer, config=data)
    dataset.tool_schemas = list(tools) or None
    limit = _NoLimit(sys.maxsize)
    dataset.max_prompt_length = limit
    dataset.maybe_filter_out_long_prompts(_Rows(rows))
    counted = limit.tokens_of_rows
    if len(counted) != len(rows):
        raise ValueError(
            f"verl {VERSION} counts prompts in another way than verl 0.9, so nothing here can say "
            "which prompts are too long"
        )
    return [tokens if tokens < sys.maxsize else None for tokens in counted]


def tool_schemas(config: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the schemas of the tools that verl's dataset counts in each prompt.

    The second list names classes of tools whose schema no file has, because only the tool itself
    tells it, and files that are not here, or import a package that is not.
    No tool is made. A file of functions is imported.

    Raises:
        ValueError: a file is not what verl reads; the message names the key.
    """
    schemas: list[Any] = []
    unknown: list[str] = []
    for key, read in (
        ("tool_config_path", _tools_of_classes),
        ("function_tool_path", _tools_of_functions),
    ):
        path = config.data.get(key)
        if not path:
            continue
        try:
            of_file, without_schema = read(str(path))
        except FileNotFoundError:
            # That it is not here is said of the rollout's keys, which these follow.
            unknown.append(str(path))
            continue
        except Exception as error:
            if missing_module(error) is not None:
                # That is said of the rollout's keys too: on another machine, it may be there.
                unknown.append(str(path))
                continue
            raise ValueError(
                f"data.{key}={path}, usually of actor_rollout_ref.rollout.multi_turn: the tools "
                f"cannot be read. {type(error).__name__}: {error}"
            ) from error
        schemas += of_file
        unknown += without_schema
    dumped = [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]
    return dumped, unknown


def _tools_of_classes(path: str) -> tuple[list[Any], list[str]]:
    """Read a file of `class_name`, `config` and `tool_schema`, as verl's tool registry does."""
    from verl.experimental.agent_loop.agent_loop import resolve_config_path
    from verl.tools.schemas import OpenAIFunctionToolSchema

    schemas = []
    without_schema = []
    read: Any = OmegaConf.to_container(OmegaConf.load(resolve_config_path(path)), resolve=True)
    for tool in read["tools"]:
        if tool.get("tool_schema") is None:
            without_schema.append(str(tool["class_name"]))
        else:
            schemas.append(OpenAIFunctionToolSchema.model_validate(tool["tool_schema"]))
    return schemas, without_schema


def _tools_of_functions(path: str) -> tuple[list[Any], list[str]]:
    """Import a file of functions with verl's decorator `function_tool`."""
    from verl.experimental.agent_loop.agent_loop import resolve_config_path
    from verl.tools.function_tool import load_function_tools_from_path

    tools = load_function_tools_from_path(resolve_config_path(path))
    return [tool.tool_schema for tool in tools], []
