"""Runs verl's losses, penalties and learning rates with a run's settings, on two made-up rows."""

import math
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import ACTOR, MODEL, ROLLOUT, Roles, engine_key
from verl_gdpo.tools.check.verl_questions import trains_critic

CORRECTION = "algorithm.rollout_correction"
# of two rows, with prompts of one token: small differences, as a step has them
LENGTHS = (3, 2)
LOG_PROBS = (-1.0, -0.5, -0.8, -1.2, -0.3)
LATER_LOG_PROBS = (-0.9, -0.6, -0.7, -1.1, -0.4)
ADVANTAGES = (1.0, 1.0, 1.0, -1.0, -1.0)
# of weights as a language model has them, and how many of them have to change in so many steps
WEIGHTS, DEVIATION = 10_000, 0.02
SMALL_STEPS, LEAST_CHANGED = 30, 0.5


def look_at_losses(config: Any, roles: Roles, answers: Answers) -> None:
    """Ask for the loss of the actor and of the critic, and for what stands before them."""
    if roles.actor is not None:
        answers.ask(ACTOR, _actor_loss, roles.actor)
    if roles.critic is not None:
        answers.ask("critic", _critic_loss, roles.critic)
    correction = config.algorithm.get("rollout_correction")
    if correction is not None:
        _look_at_correction(config, correction, answers)
    if config.algorithm.use_kl_in_reward:
        kind = config.algorithm.kl_penalty
        answers.ask(f"algorithm.kl_penalty={kind}", _penalty, kind)


def _look_at_correction(config: Any, correction: Any, answers: Answers) -> None:
    is_used = bool(correction.get("rollout_is") or correction.get("rollout_rs"))
    skips = bool(correction.get("bypass_mode", False))
    if is_used:
        answers.ask(CORRECTION, _correct, correction)
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    missing = (
        f"with {ROLLOUT}.calculate_log_probs=False: the rollout's probabilities are not there, so "
    )
    remedy = f". Set {ROLLOUT}.calculate_log_probs=True"
    if skips:
        # verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob asks for them
        answers.problems.append(
            f"{CORRECTION}.bypass_mode=True {missing}the run would end at its first step{remedy}"
        )
    elif is_used:
        # PPOTrainer._compute_advantage corrects only where they are there
        name = "rollout_is" if correction.get("rollout_is") else "rollout_rs"
        answers.warnings.append(
            f"{CORRECTION}.{name}={correction[name]} {missing}verl would correct nothing{remedy}"
        )


def _nested(values: tuple[float, ...], more: int = 0, dtype: Any = torch.float32) -> Any:
    """Return a row of each length, each longer by `more` zeros in front."""
    tensors = []
    start = 0
    for length in LENGTHS:
        row = torch.tensor(values[start : start + length], dtype=dtype)
        tensors.append(torch.cat([torch.zeros(more, dtype=dtype), row]))
        start += length
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def _batch(**columns: Any) -> Any:
    """Return the rows as verl's losses get them."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    ones = (1,) * sum(LENGTHS)
    prompts = [torch.ones(1, dtype=torch.int64) for _ in LENGTHS]
    fields = {
        "prompts": torch.nested.as_nested_tensor(prompts, layout=torch.jagged),
        "responses": _nested(ones, dtype=torch.int64),
        "response_mask": _nested(ones, dtype=torch.int64),
        **columns,
    }
    batch = TensorDict(fields, batch_size=len(LENGTHS))
    sizes = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
    tensordict_utils.assign_non_tensor(batch, **sizes)
    return batch


def _actor_loss(actor: Any) -> None:
    from verl.workers.utils.losses import ppo_loss

    batch = _batch(
        old_log_probs=_nested(LOG_PROBS),
        advantages=_nested(ADVANTAGES),
        ref_log_prob=_nested(LOG_PROBS),
    )
    output = {"log_probs": _nested(LATER_LOG_PROBS, 1), "entropy": _nested(LATER_LOG_PROBS, 1)}
    _must_be_finite(ppo_loss(actor, output, batch)[0])


def _critic_loss(critic: Any) -> None:
    from verl.workers.utils.losses import value_loss

    batch = _batch(values=_nested(LOG_PROBS), returns=_nested(ADVANTAGES))
    _must_be_finite(value_loss(critic, {"values": _nested(LATER_LOG_PROBS, 1)}, batch)[0])


def _must_be_finite(loss: Any) -> None:
    if not math.isfinite(float(loss)):
        raise ValueError(f"the loss of two made-up rows is {float(loss)}")


def _correct(correction: Any) -> None:
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    tensors = {
        "old_log_probs": torch.tensor([LATER_LOG_PROBS]),
        "rollout_log_probs": torch.tensor([LOG_PROBS]),
        "response_mask": torch.ones(1, len(LOG_PROBS)),
    }
    compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors=tensors), correction)


def look_at_advantages(config: Any, answers: Answers) -> None:
    """Ask for the advantages of a few rows. Those of gdpo are ours."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    estimator = str(config.algorithm.adv_estimator)
    if estimator in ADV_ESTIMATOR_REGISTRY and estimator != "gdpo":
        remedy = "Take another estimator"
        if config.trainer.get("use_v1", False):
            remedy += ", or the legacy trainer (trainer.use_v1=False) if it has it"
        answers.ask(f"algorithm.adv_estimator={estimator}", _advantages, config, remedy=remedy)


def _advantages(config: Any) -> None:
    """Hand verl what its trainer hands it: `PPOTrainer._compute_advantage`, and the legacy one."""
    from verl.trainer.ppo import ray_trainer

    # We have wrapped it for runs with gdpo.
    compute = getattr(ray_trainer.compute_advantage, "__wrapped__", ray_trainer.compute_advantage)
    algorithm = config.algorithm
    try:
        compute(
            _rows_to_compare(config),
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
    except (TypeError, KeyError) as error:
        is_our_call = error.__traceback__ is None or error.__traceback__.tb_next is None
        if is_our_call:
            raise  # This verl's function takes other arguments.
        trainer = "the trainer of trainer.use_v1=True"
        if not config.trainer.get("use_v1", False):
            trainer = "the legacy trainer"
        lack = str(error.args[0]).partition(" in TensorDict")[0]
        raise ValueError(f"{trainer} does not give what it needs: {lack}") from error


def _rows_to_compare(config: Any) -> Any:
    """Return the rows of two prompts with the columns that the run's trainer has."""
    from verl.protocol import DataProto

    responses = min(config.actor_rollout_ref.rollout.n, 2)
    uids = [uid for uid in ("a", "b") for _ in range(responses)]
    shape = (len(uids), len(LOG_PROBS))
    rewards = torch.zeros(shape)
    rewards[::2, -1] = 1.0
    log_probs = torch.tensor(LOG_PROBS).expand(shape).clone()
    tensors = {
        "response_mask": torch.ones(shape),
        "token_level_scores": rewards,
        "token_level_rewards": rewards.clone(),
        "old_log_probs": log_probs,
        "rollout_log_probs": log_probs.clone(),
        "ref_log_prob": log_probs.clone(),
    }
    if trains_critic(config):
        tensors["values"] = torch.zeros(shape)
    if not config.trainer.get("use_v1", False):
        # Only the legacy trainer makes these two.
        if config.algorithm.adv_estimator == "remax":
            tensors["reward_baselines"] = torch.zeros(len(uids))
        if config.actor_rollout_ref.actor.get("calculate_sum_pi_squared", False):
            tensors["sum_pi_squared"] = torch.ones(shape)
    columns = {"uid": np.array(uids, dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def _penalty(kind: str) -> None:
    from verl.trainer.ppo.core_algos import kl_penalty

    kl_penalty(torch.tensor(LATER_LOG_PROBS), torch.tensor(LOG_PROBS), kl_penalty=kind)


def look_at_skipping(config: Any, answers: Answers) -> None:
    """Let verl read which steps take their rollouts from a folder."""
    if config.get("skip") is not None and config.trainer.get("use_v1", False):
        answers.ask("skip", _make_skips, config)


def _make_skips(config: Any) -> None:
    from verl.utils.skip import SkipManager

    SkipManager.init(config)


# --- learning rates ------------------------------------------------------------------------------


def look_at_learning_rates(config: Any, roles: Roles, steps: int | None, answers: Answers) -> None:
    """Let verl's FSDP engine make the schedule of the learning rate.

    Args:
        steps: of the run; None if they are not known.
    """
    for key, role in (
        ("actor_rollout_ref.actor.optim", roles.actor),
        ("critic.optim", roles.critic),
    ):
        if role is None or "FSDP" not in type(role.optim).__name__:
            continue
        options = role.optim
        if key == "critic.optim" and options.lr <= 0:
            answers.problems.append(
                f"{key}.lr={options.lr}: the critic would stay as it is; expected more than 0"
            )
        ratio = options.lr_warmup_steps_ratio
        if not 0 <= ratio <= 1:
            answers.problems.append(
                f"{key}.lr_warmup_steps_ratio={ratio}: expected a share of the run's steps, from 0 "
                "to 1. Set it to 0.1 for a tenth of them, or a number of steps as "
                f"{key}.lr_warmup_steps"
            )
            continue
        answers.ask(key, _make_schedule, options, steps or 100)
        warm_up = options.lr_warmup_steps
        if steps is not None and warm_up > steps:
            answers.warnings.append(
                f"{key}.lr_warmup_steps={warm_up}: the run has {steps} steps, so the learning rate "
                f"would never reach {options.lr}"
            )


def _make_schedule(options: Any, steps: int) -> None:
    """Relies on verl 0.9's FSDPEngine, whose method reads these two attributes alone."""
    from verl.workers.config.optimizer import build_optimizer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    of_run = SimpleNamespace(**{name: getattr(options, name) for name in options})
    of_run.total_training_steps = steps
    try:
        optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], options)
    except Exception as error:
        # As `verl_questions.make_optimizer` says it of the actor, so that it is said once.
        raise ValueError(str(error).partition(" Available")[0]) from error
    engine = SimpleNamespace(optimizer_config=of_run, rank=1)
    with redirect_stdout(StringIO()):
        FSDPEngine._build_lr_scheduler(engine, optimizer)


# --- weights in 16 bits --------------------------------------------------------------------------


def look_at_small_steps(config: Any, roles: Roles, answers: Answers) -> None:
    """Let the optimizer of a role take steps on made-up weights, in the type that the role has.

    FSDPEngine._build_module loads the weights in `model_dtype`, and its optimizer gets these: no
    copy in float32 is kept. Other optimizers than torch's Adam may round by chance or keep a copy.
    """
    from verl.utils.torch_dtypes import PrecisionType

    for key, role, model in (
        (ACTOR, roles.actor, MODEL),
        ("critic", roles.critic, "critic.model"),
    ):
        if role is None or "FSDP" not in type(role.engine).__name__:
            continue
        options = role.optim
        is_adam = options.optimizer_impl == "torch.optim" and "Adam" in options.optimizer
        name = role.engine.model_dtype
        is_in_16_bits = PrecisionType.is_bf16(name) or PrecisionType.is_fp16(name)
        if not is_adam or not is_in_16_bits or options.lr <= 0:
            continue
        rank = OmegaConf.select(config, f"{model}.lora_rank") or 0
        _look_at_16_bits(key, role, rank > 0, answers)


def _look_at_16_bits(key: str, role: Any, has_adapter: bool, answers: Answers) -> None:
    from verl.utils.torch_dtypes import PrecisionType

    options = role.optim
    dtype = PrecisionType.to_dtype(role.engine.model_dtype)
    where = f"{engine_key(key)}.model_dtype={role.engine.model_dtype}"
    remedy = "Set fp32: FSDP computes in the type of mixed_precision.param_dtype all the same"
    without_gradient = _after_steps(options, torch.ones(1, dtype=dtype), 0.0, 1)
    if not without_gradient.isfinite().all():
        answers.problems.append(
            f"{where}: in this type, the optimizer makes NaN of a weight without a gradient at the "
            f"first step, because its eps becomes 0. {remedy}"
        )
        return
    if has_adapter:
        # Half of an adapter's weights begin at 0, beside which no step is small.
        return
    share = _share_that_changes(options, dtype)
    if share < LEAST_CHANGED:
        answers.warnings.append(
            f"{where} with {key}.optim.lr={options.lr}: the weights have no copy in float32, and a "
            f"step that is small beside its weight is rounded away: of {WEIGHTS:,} made-up weights "
            f"(normally distributed around 0, with a deviation of {DEVIATION}), {SMALL_STEPS} "
            f"steps of this optimizer change {share:.0%}. {remedy}, which is bf16 by default"
        )


def _share_that_changes(options: Any, dtype: torch.dtype) -> float:
    """Return how many of the made-up weights the optimizer changes, of 1."""
    chance = torch.Generator().manual_seed(1)
    weights = (torch.randn(WEIGHTS, generator=chance) * DEVIATION).to(dtype)
    changed = _after_steps(options, weights, 1.0, SMALL_STEPS) != weights
    return float(changed.float().mean())


def _after_steps(options: Any, weights: Any, gradient: float, steps: int) -> Any:
    """Return some weights after steps of verl's optimizer, which have all the same gradient."""
    from verl.workers.config.optimizer import build_optimizer

    parameter = torch.nn.Parameter(weights.clone())
    optimizer = build_optimizer([parameter], options)
    parameter.grad = torch.full_like(parameter, gradient)
    for _ in range(steps):
        optimizer.step()
    return parameter.detach()
