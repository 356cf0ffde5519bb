"""The classes that verl makes of the blocks of each role: actor, reference, critic and others."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.verl_questions import trains_critic

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
# verl.workers.engine_workers.ActorRolloutRefWorker.init_model gives the block of the reference the
# names that the actor's class has.
NAMES_OF_ACTOR = {
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}


@dataclass
class Roles:
    """verl's objects of the roles that a run has; None for a role that it does not have.

    They are None too if verl refuses the block.
    """

    actor: Any = None
    ref: Any = None
    critic: Any = None
    rollout: Any = None

    def with_engines(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, object) of each role that has an engine which computes with the model."""
        for key, role in ((ACTOR, self.actor), (REF, self.ref), ("critic", self.critic)):
            if role is not None:
                yield key, role


def engine_key(key: str) -> str:
    """Return the key of a role's FSDP engine."""
    return f"{key}.fsdp" if key == "critic" else f"{key}.fsdp_config"


def make_roles(config: Any, roles: Roles, answers: Answers) -> None:
    """Fill in the roles of a run: let verl make them, as its workers do with the model loaded.

    Relies on verl 0.9's `omega_conf_to_dataclass`, `need_reference_policy` and `need_critic`.
    """
    from verl.trainer.distillation import is_distillation_enabled
    from verl.trainer.ppo.utils import need_reference_policy

    roles.actor = answers.ask(ACTOR, _made, config.actor_rollout_ref.actor)
    roles.rollout = answers.ask(ROLLOUT, _made, config.actor_rollout_ref.rollout)
    if need_reference_policy(config) and not reference_is_in_actor(config):
        roles.ref = answers.ask(REF, _made_reference, config)
    if trains_critic(config):
        roles.critic = answers.ask("critic", _made_critic, config)
    if config.reward.reward_model.enable:
        answers.ask("reward.reward_model", _made, config.reward.reward_model)
    if is_distillation_enabled(config.get("distillation")):
        answers.ask("distillation", _made, config.distillation)
    engine = config.actor_rollout_ref.rollout.get("checkpoint_engine")
    if engine is not None:
        answers.ask(f"{ROLLOUT}.checkpoint_engine", _made, engine)


def reference_is_in_actor(config: Any) -> bool:
    """Whether the reference is the actor without its adapter, so that it needs no model.

    As verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup decides it.
    """
    model = config.actor_rollout_ref.model
    return lora_rank(config) > 0 or model.get("lora_adapter_path") is not None


def lora_rank(config: Any) -> int:
    """Return the rank of the adapter as verl's trainer reads it; 0 without an adapter."""
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank", 0)
    return int(rank if rank > 0 else model.get("lora_rank", 0))


def _made(block: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(block)


def _made_reference(config: Any) -> Any:
    block = deepcopy(config.actor_rollout_ref.ref)
    OmegaConf.resolve(block)
    with open_dict(block):
        block.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        for old, new in NAMES_OF_ACTOR.items():
            block[new] = block.pop(old, None)
    return _made(block)


def _made_critic(config: Any) -> Any:
    block = deepcopy(config.critic)
    OmegaConf.resolve(block)
    block.model = None  # It would be looked up on a hub.
    return _made(block)
