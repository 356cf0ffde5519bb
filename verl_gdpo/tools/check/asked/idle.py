"""Settings that verl 0.9.1 has in its configuration and does not read in the run at hand.

They are not misspelt, so nobody refuses them, and the run goes on as if they were not there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, ROLLOUT
from verl_gdpo.tools.check.verl_questions import VERSION, trains_critic


@dataclass(frozen=True)
class Idle:
    """A key that is not read in some runs.

    default: with this value, nothing is meant.
    reason: who reads it, or what to set instead.
    in_run: whether this is such a run.
    """

    key: str
    default: Any
    reason: str
    in_run: Callable[[Any], bool]


def _always(_config: Any) -> bool:
    return True


def _is_v1(config: Any) -> bool:
    return bool(config.trainer.get("use_v1", False))


def _is_fsdp(config: Any) -> bool:
    return str(config.actor_rollout_ref.actor.strategy) == "fsdp"


def _has_no_gae(config: Any) -> bool:
    return str(config.algorithm.adv_estimator) != "gae"


# Each was looked up in verl 0.9.1, where no function of such a run has the name.
IDLE = (
    Idle(f"{ACTOR}.grad_clip", 1.0, f"set {ACTOR}.optim.clip_grad", _always),
    Idle("critic.grad_clip", 1.0, "set critic.optim.clip_grad", trains_critic),
    Idle(f"{ACTOR}.freeze_vision_tower", False, "no engine freezes anything", _always),
    Idle(f"{ACTOR}.use_prefix_grouper", False, "only the legacy trainer does", _is_v1),
    Idle(f"{ACTOR}.qat.enable", False, f"set {ACTOR}.fsdp_config.qat.enable", _always),
    Idle(f"{ACTOR}.fsdp_config.offload_policy", False, "only fsdp2 does", _is_fsdp),
    Idle(
        "critic.ulysses_sequence_parallel_size",
        1,
        "set critic.fsdp.ulysses_sequence_parallel_size",
        trains_critic,
    ),
    Idle(f"{ROLLOUT}.over_sample_rate", 0, "no server does", _always),
    Idle(f"{ROLLOUT}.multi_turn.num_repeat_rollouts", None, "no agent loop does", _always),
    Idle(f"{ROLLOUT}.repetition_penalty", 1.0, "the agent loops ask for 1.0", _always),
    Idle(f"{ROLLOUT}.agent.custom_async_server.path", None, "no server does", _always),
    Idle("algorithm.use_pf_ppo", False, "only adv_estimator=gae does", _has_no_gae),
    Idle("trainer.balance_batch", True, "this trainer always balances", _is_v1),
    Idle("trainer.esi_redundant_time", 0, "only the legacy trainer does", _is_v1),
)


def look_at_idle_settings(config: Any, answers: Answers) -> None:
    """Warn of settings that are set and not read. Other versions of verl may read them."""
    if not VERSION.startswith("0.9."):
        return
    for idle in IDLE:
        value = OmegaConf.select(config, idle.key)
        is_set = value is not None and value != idle.default
        if is_set and idle.in_run(config):
            answers.warnings.append(
                f"{idle.key}={value}: verl {VERSION} does not read it in this run: {idle.reason}"
            )
