"""Settings that verl 0.9.1 has in its configuration and does not read in the run at hand.

They are not misspelt, so nobody refuses them, and the run goes on as if they were not there. Some
are never read in such a run; others have a switch, which is off.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, ROLLOUT
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


# --- settings with a switch ----------------------------------------------------------------------


@dataclass(frozen=True)
class Switch:
    """A key without which verl does not read others.

    keys: {key that it turns on: with this value, nothing is meant}.
    off: with this value of the switch, they are not read.
    effect: what the run does then.
    remedy: what to set.
    others: more keys that turn them on.
    """

    key: str
    off: Any
    keys: Mapping[str, Any]
    effect: str
    remedy: str
    others: tuple[str, ...] = ()


CORRECTION = "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss"
SWITCHES = (
    Switch(
        f"{ACTOR}.use_kl_loss",
        False,
        {f"{ACTOR}.kl_loss_coef": 0.001, f"{ACTOR}.kl_loss_type": "low_var_kl"},
        "the loss has no KL penalty",
        f"{ACTOR}.use_kl_loss=True",
    ),
    Switch(
        "algorithm.use_kl_in_reward",
        False,
        {
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "algorithm.kl_ctrl.type": "fixed",
            "algorithm.kl_ctrl.target_kl": 0.1,
            "algorithm.kl_penalty": "kl",
        },
        "the rewards have no KL penalty",
        "algorithm.use_kl_in_reward=True",
    ),
    Switch(
        "algorithm.filter_groups.enable",
        False,
        {
            "algorithm.filter_groups.metric": "reward",
            "algorithm.filter_groups.max_num_gen_batches": 0,
        },
        "no group is filtered out",
        "algorithm.filter_groups.enable=True",
    ),
    Switch(
        f"{MODEL}.lora_rank",
        0,
        {
            f"{MODEL}.lora_alpha": 16,
            f"{MODEL}.target_modules": "all-linear",
            f"{MODEL}.exclude_modules": None,
        },
        "the whole model is trained, without an adapter",
        f"{MODEL}.lora_rank=16",
        others=(f"{MODEL}.lora.rank", f"{MODEL}.lora_adapter_path"),
    ),
    Switch(
        f"{CORRECTION}.rollout_is",
        None,
        {f"{CORRECTION}.rollout_is_threshold": 2.0},
        "no sample gets a weight",
        f"{CORRECTION}.rollout_is=token",
    ),
    Switch(
        f"{CORRECTION}.rollout_rs",
        None,
        {f"{CORRECTION}.rollout_rs_threshold": None},
        "no sample is rejected",
        f"{CORRECTION}.rollout_rs=seq_mean_k1",
    ),
    Switch(
        f"{CORRECTION}.bypass_mode",
        False,
        {f"{CORRECTION}.loss_type": "ppo_clip"},
        f"the loss is that of {LOSS}.loss_mode",
        f"{CORRECTION}.bypass_mode=True",
    ),
    Switch(
        f"{ACTOR}.optim.lr_scheduler_type",
        "constant",
        {f"{ACTOR}.optim.min_lr_ratio": 0.0, f"{ACTOR}.optim.num_cycles": 0.5},
        "the learning rate stays",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        others=(f"{ACTOR}.optim.warmup_style",),
    ),
    Switch(
        f"{LOSS}.loss_mode",
        "vanilla",
        {f"{LOSS}.kl_cov_ratio": 0.0002, f"{LOSS}.ppo_kl_coef": 0.1},
        "the loss is the usual one",
        f"{LOSS}.loss_mode=kl_cov",
    ),
    Switch(
        f"{LOSS}.loss_mode",
        "vanilla",
        {f"{LOSS}.clip_cov_ratio": 0.0002, f"{LOSS}.clip_cov_lb": 1.0, f"{LOSS}.clip_cov_ub": 5.0},
        "the loss is the usual one",
        f"{LOSS}.loss_mode=clip_cov",
    ),
    Switch(
        f"{ACTOR}.loss_agg_mode",
        "token-mean",
        {f"{ACTOR}.loss_scale_factor": None},
        "the loss is the mean of all tokens",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    Switch(
        "reward.reward_model.enable",
        False,
        {"reward.reward_model.model_path": None},
        "no reward model is started",
        "reward.reward_model.enable=True",
    ),
    Switch(
        f"{ACTOR}.clip_ratio_low",
        0.2,
        {f"{ACTOR}.clip_ratio": 0.2},
        "ratios are clipped at the bounds of verl's default",
        f"{ACTOR}.clip_ratio_low and {ACTOR}.clip_ratio_high",
        others=(f"{ACTOR}.clip_ratio_high",),
    ),
)


def look_at_switches(config: Any, given: Collection[str], answers: Answers) -> None:
    """Warn of settings on the command line whose switch is off, and is not there.

    Many scripts have a setting beside its switch, so that one word turns it on: who writes the
    switch too knows of it. What a file of the configuration has, its writer may have meant so.

    Args:
        given: the keys of the command line.
    """
    if not VERSION.startswith("0.9."):
        return
    for switch in SWITCHES:
        state = OmegaConf.select(config, switch.key)
        if state != switch.off or switch.key in given or _is_on_by_another(switch, config, given):
            continue
        for key, default in switch.keys.items():
            value = OmegaConf.select(config, key)
            # Scripts write 0 where they mean nothing.
            if key not in given or value is None or value in (default, 0):
                continue
            answers.warnings.append(
                f"{key}={value} with {switch.key}={state}: verl does not read the former, so "
                f"{switch.effect}. Set {switch.remedy}, or leave it out"
            )


def _is_on_by_another(switch: Switch, config: Any, given: Collection[str]) -> bool:
    for key in switch.others:
        is_off = OmegaConf.select(config, key) in (None, 0, switch.off)
        if key in given or not is_off:
            return True
    return False
