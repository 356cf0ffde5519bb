"""The functions of verl that `verl-gdpo check` calls; none of them starts Ray or loads a model.

Relies on verl 0.9: `utils.config.validate_config` with `need_reference_policy` and `need_critic`;
`get_trainer_cls`, `load_reward_manager`, `get_dataset_class`, `DataProto.from_dict`; the names in
`ADV_ESTIMATOR_REGISTRY`, `POLICY_LOSS_REGISTRY`, `RolloutReplicaRegistry._registry`,
`_agent_loop_registry` and `Tracking.supported_backend`; `kl_penalty`, which raises
NotImplementedError; `build_optimizer(parameters, FSDPOptimizerConfig)`, which calls torch; and the
classes that blocks of the configuration name under `_target_`, with their annotations.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from importlib.util import find_spec
from io import StringIO
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
import verl
from hydra.utils import get_class
from omegaconf import OmegaConf

from verl_gdpo.hooks.extend import load_all

VERSION: str = verl.__version__
ACTOR = "actor_rollout_ref.actor"
KINDS = {bool: "True or False", float: "a number", int: "a whole number"}
# of numbers for which verl's default is null, so that no type of them is written anywhere
OF_NULL = dict.fromkeys(
    ("data.seed", "data.gen_batch_size", "data.val_batch_size", "trainer.total_training_steps"), int
)
# verl's losses take `clip_ratio` where these are null, whatever the annotation says
MAY_BE_NULL = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")


def wrong_types(config: Any, defaults: Any) -> dict[str, str]:
    """Return {key: what verl takes there} of each value that is no such number or boolean.

    The type is that of the field of verl's class, or of verl's default value. 0 and 1 stand for
    booleans, and None for a value that nobody has set.

    Args:
        defaults: verl's own configuration.
    """
    wrong = {}
    for key, value, hint in _values(config):
        default = OmegaConf.select(defaults, key, throw_on_missing=False)
        kinds = _kinds(hint) or {OF_NULL.get(key, type(default))}
        kind = next((kind for kind in KINDS if kind in kinds), None)
        if kind is None or not kinds <= {*KINDS, NoneType}:
            continue
        if value is None:
            fits = kind is bool or default is None or NoneType in kinds or key in MAY_BE_NULL
        elif kind is bool:
            fits = value in (0, 1)
        else:
            fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not fits:
            wrong[key] = KINDS[kind]
    return wrong


def _values(block: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, annotation or None) of what is set, and not taken from another key."""
    hints = _hints(block.get("_target_"))
    for key in block:
        if OmegaConf.is_missing(block, key) or OmegaConf.is_interpolation(block, key):
            continue
        if OmegaConf.is_dict(block[key]):
            yield from _values(block[key], f"{path}{key}.")
        else:
            yield f"{path}{key}", block[key], hints.get(key)


def _hints(target: str | None) -> dict[str, Any]:
    try:
        return get_type_hints(get_class(target)) if target else {}
    except Exception:  # verl says so, if it makes the class in this run
        return {}


def _kinds(hint: Any) -> set[Any]:
    if hint is None:
        return set()
    return {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}


def unknown_model_keys(config: Any) -> dict[str, list[str]]:
    """Return {key: known names} of keys that verl's class of a model does not take.

    It is only made where the model is, and looks it up.
    """
    blocks = ["actor_rollout_ref.model", *["critic.model"] * trains_critic(config)]
    unknown = {}
    for block in blocks:
        model = OmegaConf.select(config, block)
        known = [*_hints(model.get("_target_"))]
        unknown |= {f"{block}.{key}": known for key in model if known and key not in known}
    return unknown


def make_optimizers(config: Any) -> None:
    """Let torch judge the options of FSDP's optimizers, on one parameter, and verl the strategy.

    Raises:
        ValueError: an option cannot be used.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    actor = config.actor_rollout_ref.actor
    if "fsdp_config" in actor:
        try:
            omega_conf_to_dataclass(
                OmegaConf.merge(actor.fsdp_config, {"strategy": actor.strategy})
            )
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(f"{ACTOR}.strategy={actor.strategy}: {cause}") from error
    for key in (ACTOR, *["critic"] * trains_critic(config)):
        options = OmegaConf.select(config, key).optim
        if not str(options.get("_target_")).endswith("FSDPOptimizerConfig"):
            continue
        try:
            build_optimizer([torch.nn.Parameter(torch.zeros(1))], omega_conf_to_dataclass(options))
        except Exception as error:
            # verl lists all names of the module behind this
            reason = str(error.__cause__ or error).partition(" Available optimizers")[0]
            raise ValueError(f"{key}.optim: {reason}") from error


def unknown_penalties(config: Any) -> list[str]:
    """Return KEY=VALUE of each kind of KL that verl cannot compute."""
    from verl.trainer.ppo.core_algos import kl_penalty

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    kinds = {f"{ACTOR}.kl_loss_type": actor.kl_loss_type} if actor.use_kl_loss else {}
    if algorithm.use_kl_in_reward:
        kinds["algorithm.kl_penalty"] = algorithm.kl_penalty
    unknown = []
    for key, kind in kinds.items():
        try:
            kl_penalty(torch.zeros(1), torch.zeros(1), str(kind))
        except NotImplementedError:
            unknown.append(f"{key}={kind}: unknown to verl")
    return unknown


def advantage_alone(config: Any) -> float:
    """Return what the estimator makes of a response with score 1 and no other to its prompt.

    Raises:
        ValueError: it needs others.
    """
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    one = torch.ones(1, 1)
    advantages, _ = get_adv_estimator_fn(config.algorithm.adv_estimator)(
        token_level_rewards=one, response_mask=one, index=np.array(["uid"]), config=config.algorithm
    )
    return float(advantages.max())


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
    if find_spec("vllm") is None:  # else verl asks it which ranks it takes
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
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSS_REGISTRY,
        "actor_rollout_ref.rollout.name": RolloutReplicaRegistry._registry,
        "actor_rollout_ref.rollout.agent.default_agent_loop": _agent_loop_registry,
        "trainer.logger": Tracking.supported_backend,
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
    }[key]
    return sorted({str(getattr(name, "value", name)) for name in names})


def make_rollout_config_and_dataset_class(config: Any) -> None:
    """Make what verl makes of the configuration in its workers, without starting them.

    Raises:
        Exception: verl refuses `actor_rollout_ref.rollout` or `data.custom_cls`.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import get_dataset_class

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    with redirect_stdout(StringIO()):
        get_dataset_class(config.data)


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
    of_loop = {"__num_turns__": 2, "tool_extra_fields": {}}
    index = {"extra_info": extra_info, "index": extra_info.get("index", 0)}
    columns = {**row, **index, **of_loop, **columns}
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([response]),
            "attention_mask": torch.ones(1, len(prompt) + len(response), dtype=torch.int64),
        },
        non_tensors={k: np.fromiter([value], dtype=object) for k, value in columns.items()},
    )
