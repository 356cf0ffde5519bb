"""What a configuration cannot mean: what verl refuses, soon or late, and what trains nothing.

verl refuses much of it late: after the model was loaded, or at the first step. The rules are those
of verl 0.9: `ActorRolloutRefWorker.init_model`, `train_mini_batch`, and the names that
`verl_questions.py` looks up.
"""

import re
import sys
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from omegaconf import ListConfig, OmegaConf, open_dict

from verl_gdpo.algorithm.settings import GdpoSettings, SettingsError, hint
from verl_gdpo.hooks import configuration
from verl_gdpo.scoring.function_list import refuse_without_v1
from verl_gdpo.tools.check import verl_questions
from verl_gdpo.tools.check.output import message_of

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
# Keys whose value has to be a number, and the lowest one.
LOWEST: dict[str, float] = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.data_parallel_size": 1,
    "reward.num_workers": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    f"{ACTOR}.optim.lr": 0,
    f"{ACTOR}.ppo_epochs": 0,
    f"{ACTOR}.clip_ratio": 0,
    f"{ACTOR}.clip_ratio_low": 0,
    f"{ACTOR}.clip_ratio_high": 0,
    f"{ACTOR}.kl_loss_coef": 0,
    f"{ROLLOUT}.temperature": 0,
    "trainer.total_epochs": 0,
    "trainer.critic_warmup": 0,
    # Of shares, engines refuse more once the model is loaded.
    f"{ROLLOUT}.top_p": 0.001,
    f"{ROLLOUT}.val_kwargs.top_p": 0.001,
    f"{ROLLOUT}.gpu_memory_utilization": 0.001,
}
HIGHEST = {
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.val_kwargs.top_p": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 1,
    # A learning rate above 1 is hardly meant.
    f"{ACTOR}.optim.lr": 1,
}
NAMED = (
    "algorithm.adv_estimator",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.strategy",
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.agent.default_agent_loop",
    "trainer.logger",
    "trainer.resume_mode",
)
# What estimators do with one response; `configuration.py` refuses it with gdpo.
ALONE = {
    "grpo": "its advantage is its score",
    "grpo_vectorized": "its advantage is its score",
    "rloo": "its advantage is its score",
    "opo": "its advantage is its score",
    "rloo_vectorized": "its advantage is 0",
    "grpo_passk": "verl stops at the first step",
}
LARGE_RATE = 0.01
# They compare the responses to one prompt; others have a baseline of another kind.
COMPARING = ("gdpo", *ALONE)
# A sentence, and whether it is true of a configuration.
Sentence = tuple[bool, str]


def unusable_values(config: Any, defaults: Any) -> dict[str, str]:
    """{key: what is expected} of values with which nothing else can be asked.

    Args:
        defaults: verl's own configuration.
    """
    wrong = verl_questions.wrong_types(config, defaults)
    for key, lowest in LOWEST.items():
        value = OmegaConf.select(config, key)
        if value is None and key in verl_questions.MAY_BE_NULL:
            continue
        highest = HIGHEST.get(key, sys.float_info.max)
        # NaN is not between them.
        if type(value) not in (int, float) or not lowest <= value <= highest:
            wrong[key] = f"expected a number of {lowest} or more"
            if key in HIGHEST:
                wrong[key] += f", up to {highest}"
    return wrong


def with_defaults(config: Any, defaults: Any, keys: Iterable[str]) -> Any:
    """The configuration with verl's own values under these keys, so that the rest can be asked.

    A key that verl does not have is left out.
    """
    mended = deepcopy(config)
    for key in keys:
        block, _, name = key.rpartition(".")
        if name in (OmegaConf.select(defaults, block) or {}):
            OmegaConf.update(mended, key, OmegaConf.select(defaults, key), force_add=True)
        else:
            with open_dict(mended):
                del OmegaConf.select(mended, block)[name]
    return mended


def broken_rules(config: Any) -> list[str]:
    """A sentence for each rule that the configuration breaks."""
    table = []
    if not validates_only(config):
        table.extend(_what_trains_nothing(config))
    table.extend(_token_budgets(config))
    table.extend(_what_does_not_fit(config))
    return _true_ones(table, config)


def _true_ones(table: Iterable[Sentence], config: Any) -> list[str]:
    """The sentences that are true, with KEY=VALUE in the place of each [KEY]."""

    def with_value(match: re.Match[str]) -> str:
        return f"{match[1]}={OmegaConf.select(config, match[1])}"

    sentences = []
    for is_true, text in table:
        if is_true:
            sentences.append(re.sub(r"\[([\w.]+)\]", with_value, text))
    return sentences


def validates_only(config: Any) -> bool:
    """Whether the run ends after its first validation."""
    return bool(config.trainer.val_only and config.trainer.val_before_train)


def _what_trains_nothing(config: Any) -> list[Sentence]:
    actor = config.actor_rollout_ref.actor
    steps = config.trainer.total_training_steps
    is_greedy = config.actor_rollout_ref.rollout.temperature <= 0
    estimator = config.algorithm.adv_estimator
    nothing = "nothing would be trained"
    return [
        (config.trainer.total_epochs < 1, f"[trainer.total_epochs]: {nothing}"),
        (steps is not None and steps < 1, f"[trainer.total_training_steps]: {nothing}"),
        (actor.optim.lr <= 0, f"[{ACTOR}.optim.lr]: the policy would stay as it is"),
        (actor.ppo_epochs < 1, f"[{ACTOR}.ppo_epochs]: {nothing}"),
        (
            is_greedy and estimator in COMPARING,
            f"[{ROLLOUT}.temperature]: all responses to a prompt would be the same, so "
            f"adv_estimator={estimator} would compare nothing",
        ),
    ]


def _is_fsdp(config: Any) -> bool:
    return "fsdp_config" in config.actor_rollout_ref.actor


def _gpus_of_a_sequence(config: Any) -> int:
    """Return how many GPUs share one sequence; 1 for another engine than FSDP."""
    actor = config.actor_rollout_ref.actor
    if not _is_fsdp(config):
        return 1
    of_engine = actor.fsdp_config.ulysses_sequence_parallel_size
    size: int = max(actor.ulysses_sequence_parallel_size, of_engine)
    return size


def _token_budgets(config: Any) -> list[Sentence]:
    """Compare the budgets of dynamic micro-batches with the longest row."""
    actor = config.actor_rollout_ref.actor
    if not _is_fsdp(config) or not actor.use_dynamic_bsz:
        return []
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {}
    # The rollout's budget follows the actor's, unless it is given.
    if rollout.log_prob_max_token_len_per_gpu != actor.ppo_max_token_len_per_gpu:
        budgets[f"{ROLLOUT}.log_prob_max_token_len_per_gpu"] = (
            rollout.log_prob_max_token_len_per_gpu
        )
    budgets[f"{ACTOR}.ppo_max_token_len_per_gpu"] = actor.ppo_max_token_len_per_gpu
    table = []
    for key, tokens in budgets.items():
        is_too_small = tokens * _gpus_of_a_sequence(config) < longest
        text = (
            f"[{key}]: a micro-batch has to hold the longest row, which may have {longest} "
            "tokens ([data.max_prompt_length] and [data.max_response_length]); verl stops at "
            "a row that is longer"
        )
        table.append((is_too_small, text))
    return table


def _what_does_not_fit(config: Any) -> list[Sentence]:
    data = config.data
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for_one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for_one *= rollout.pipeline_model_parallel_size
    ranks = max(gpus // _gpus_of_a_sequence(config), 1)
    samples = actor.ppo_mini_batch_size * rollout.n
    return [
        (
            gpus % for_one != 0,
            f"[{ROLLOUT}.tensor_model_parallel_size]: an engine takes {for_one} GPUs, and the run "
            f"has {gpus}, which is no multiple of that",
        ),
        (
            _is_fsdp(config) and samples % ranks != 0,
            f"[{ACTOR}.ppo_mini_batch_size] with [{ROLLOUT}.n]: {samples} samples cannot be shared "
            f"equally by {ranks} GPUs",
        ),
        (
            # V1 trainers pad a batch to whole mini-batches.
            not config.trainer.get("use_v1", False)
            and data.train_batch_size % actor.ppo_mini_batch_size != 0,
            f"[data.train_batch_size] with [{ACTOR}.ppo_mini_batch_size]: verl's legacy trainer "
            "needs a multiple of the mini-batch. Change one of them, or set trainer.use_v1=True",
        ),
    ]


def unknown_names(config: Any) -> list[str]:
    """A sentence for each name that verl does not know."""
    # The file of `agent_loop_config_path` names more.
    has_loops = config.actor_rollout_ref.rollout.agent.get("agent_loop_config_path")
    problems = []
    for key in NAMED:
        if has_loops and key.endswith("agent_loop"):
            continue
        value = OmegaConf.select(config, key)
        names = [value]
        if isinstance(value, ListConfig):
            names = list(value)
        known = verl_questions.known_names(key)
        for name in map(str, names):
            if name not in known:
                problems.append(f"{key}={name}: unknown to verl{hint(name, known)}")
    return problems


def hardly_meant(config: Any) -> list[str]:
    """Remarks about what a run would do, if that is likely not meant."""
    estimator = config.algorithm.adv_estimator
    rollout = config.actor_rollout_ref.rollout
    is_cut = rollout.top_p != 1 or rollout.top_k not in (-1, 0)
    rest = config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size
    table = [
        (
            estimator in ALONE and rollout.n == 1,
            f"[{ROLLOUT}.n] with adv_estimator={estimator}: there is nothing to compare a response "
            f"with, so {ALONE.get(estimator)}",
        ),
        (
            config.actor_rollout_ref.actor.optim.lr > LARGE_RATE,
            f"[{ACTOR}.optim.lr]: a policy is lost with steps of this size; verl's default is 1e-6",
        ),
        (
            rollout.val_kwargs.n > 1 and rollout.val_kwargs.temperature <= 0,
            f"[{ROLLOUT}.val_kwargs.n] with [{ROLLOUT}.val_kwargs.temperature]: all responses to a "
            "prompt would be the same. Set a temperature, as 0.6, or val_kwargs.n=1",
        ),
        (
            validates_only(config),
            "trainer.val_only=True: the run validates once, and trains nothing",
        ),
        (
            config.trainer.get("use_v1", False) and rest != 0,
            f"[data.train_batch_size] with [{ACTOR}.ppo_mini_batch_size]: verl fills the batch up "
            "to whole mini-batches, with rows that teach nothing and take time",
        ),
        (
            is_cut and bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")),
            f"[{ROLLOUT}.top_p] and [{ROLLOUT}.top_k] with bypass_mode=True: the old probabilities "
            "are those after the cut, and the policy's are not, so the first update may clip. Do "
            "not cut, or set algorithm.rollout_correction.bypass_mode=False",
        ),
        (
            not config.data.get("filter_overlong_prompts", False),
            "data.filter_overlong_prompts=False: if a prompt is longer than "
            "[data.max_prompt_length] tokens, verl silently cuts off its beginning",
        ),
    ]
    return _true_ones(table, config)


def paid_failures(config: Any, settings: GdpoSettings) -> list[str]:
    """Remarks about values of `otherwise`, written by the user, with which failing is better."""
    return [paid.message for paid in configuration.paid_failures(config, settings)]


def weights_end(settings: GdpoSettings, steps: int) -> None:
    """Raise ValueError if no reward has a weight in the last of so many steps."""
    if not settings.rewards:
        return
    if not any(settings.terms.weights_at(steps).values()):
        raise ValueError(
            "algorithm.gdpo.rewards: all weights are 0 from step "
            f"{settings.terms.silent_step(steps)} on, and the run has {steps} steps. Give one of "
            "them another schedule, or end the run before"
        )
    for name, term in settings.rewards.items():
        first = min(term.weights)
        if first > steps and len(set(term.weights.values())) > 1:
            raise ValueError(
                f"algorithm.gdpo.rewards.{name}.weight: its schedule begins at step {first}, and "
                f"the run has {steps} steps, so the weight would be {term.weight_at(steps):g} in "
                "all of them. Give it another schedule, or train for longer"
            )


def check_trainer(config: Any) -> str:
    """Return the trainer's name; raise ValueError if it refuses the configuration."""
    if not config.trainer.get("use_v1", False):
        configuration.refuse_group_filter(config)
        if configuration.uses_gdpo_manager(config):
            refuse_without_v1(config)
        return "legacy trainer"
    mode = config.trainer.v1.trainer_mode
    try:
        verl_questions.make_v1_trainer(config)
    except SettingsError:
        # Ours says which key is meant.
        raise
    except Exception as error:
        raise ValueError(f"trainer.v1.trainer_mode={mode}: {message_of(error)}") from error
    return f"trainer {mode}"
