"""What a configuration cannot mean: what verl refuses, soon or late, and what trains nothing.

verl refuses much of it late: after the model was loaded, or at the first step. The rules are those
of verl 0.9: `ActorRolloutRefWorker.init_model`, `train_mini_batch`, and the names that
`hooks/verl_questions.py` looks up.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.hooks.verl_questions import known_names

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOWEST = {  # of what has to be a number
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    f"{ACTOR}.optim.lr": 0,
    f"{ACTOR}.ppo_epochs": 0,
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 0,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.data_parallel_size": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 0,
    "trainer.critic_warmup": 0,
}
NAMED = (
    "algorithm.adv_estimator",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.agent.default_agent_loop",
    "trainer.logger",
)
OLD_KEYS = ("custom_reward_function", "reward_model", "sandbox_fusion")
# they compare the responses to one prompt; others have a baseline of another kind
COMPARING = ("gdpo", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")


def unusable_numbers(config: Any) -> list[str]:
    """A sentence for each key of `LOWEST` that is no such number; else nothing can be asked."""
    values = {key: OmegaConf.select(config, key) for key in LOWEST}
    return [
        f"{key}={value}: expected a number of {LOWEST[key]} or more"
        for key, value in values.items()
        if isinstance(value, bool)
        or not isinstance(value, int | float)
        or not LOWEST[key] <= value < math.inf  # NaN is not
    ]


def broken_rules(config: Any) -> list[str]:
    """A sentence for each rule that the configuration breaks."""
    table = _what_does_not_fit(config)
    if not validates_only(config):
        table = [*_what_trains_nothing(config), *table]
    return [*_true_ones(table, config), *_keys_without_a_reader(config)]


def _true_ones(table: Iterable[tuple[bool, str]], config: Any) -> list[str]:
    """The sentences that are true, with KEY=VALUE in the place of each [KEY]."""

    def with_value(match: re.Match[str]) -> str:
        return f"{match[1]}={OmegaConf.select(config, match[1])}"

    return [re.sub(r"\[([\w.]+)\]", with_value, text) for is_true, text in table if is_true]


def validates_only(config: Any) -> bool:
    """Whether the run ends after its first validation."""
    return bool(config.trainer.val_only and config.trainer.val_before_train)


def _what_trains_nothing(config: Any) -> list[tuple[bool, str]]:
    actor, steps = config.actor_rollout_ref.actor, config.trainer.total_training_steps
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


def _what_does_not_fit(config: Any) -> list[tuple[bool, str]]:
    data, actor = config.data, config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for_one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for_one *= rollout.pipeline_model_parallel_size
    split = 1
    if is_fsdp := "fsdp_config" in actor:
        of_engine = actor.fsdp_config.ulysses_sequence_parallel_size
        split = max(actor.ulysses_sequence_parallel_size, of_engine)
    ranks, samples = max(gpus // split, 1), actor.ppo_mini_batch_size * rollout.n
    longest = data.max_prompt_length + data.max_response_length
    budgets = {  # the first follows the second, unless it is given
        rollout.log_prob_max_token_len_per_gpu: f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        actor.ppo_max_token_len_per_gpu: f"{ACTOR}.ppo_max_token_len_per_gpu",
    }
    return [
        *(
            (
                is_fsdp and actor.use_dynamic_bsz and tokens * split < longest,
                f"[{key}]: a micro-batch has to hold the longest row, which may have {longest} "
                "tokens ([data.max_prompt_length] and [data.max_response_length]); verl stops at "
                "a row that is longer",
            )
            for tokens, key in budgets.items()
        ),
        (
            gpus % for_one != 0,
            f"[{ROLLOUT}.tensor_model_parallel_size]: an engine takes {for_one} GPUs, and the run "
            f"has {gpus}, which is no multiple of that",
        ),
        (
            is_fsdp and samples % ranks != 0,
            f"[{ACTOR}.ppo_mini_batch_size] with [{ROLLOUT}.n]: {samples} samples cannot be shared "
            f"equally by {ranks} GPUs",
        ),
        (
            # V1 trainers pad a batch to whole mini-batches
            not config.trainer.get("use_v1", False)
            and data.train_batch_size % actor.ppo_mini_batch_size != 0,
            f"[data.train_batch_size] with [{ACTOR}.ppo_mini_batch_size]: verl's legacy trainer "
            "needs a multiple of the mini-batch. Change one of them, or set trainer.use_v1=True",
        ),
    ]


def unknown_names(config: Any) -> list[str]:
    """A sentence for each name that verl does not know."""
    # the file of `agent_loop_config_path` names more
    has_loops = config.actor_rollout_ref.rollout.agent.get("agent_loop_config_path")
    problems = []
    for key in NAMED if not has_loops else (k for k in NAMED if not k.endswith("agent_loop")):
        value, known = OmegaConf.select(config, key), known_names(key)
        names = map(str, value if isinstance(value, ListConfig) else [value])
        problems += [
            f"{key}={name}: unknown to verl{hint(name, known)}"
            for name in names
            if name not in known
        ]
    return problems


def _keys_without_a_reader(config: Any) -> Iterator[str]:
    """Old keys; the new ones are those of verl's `migrate_legacy_reward_impl`."""
    renamed = {
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.num_workers": "reward.num_workers",
    }
    keys = {f"{block}.{k}": v for block in OLD_KEYS for k, v in (config.get(block) or {}).items()}
    for key, value in keys.items():
        if value is not None and not OmegaConf.is_dict(value):
            yield (
                f"{key}={value}: this verl does not read the key, and would train without it. "
                f"Set {renamed.get(key, f'reward.{key}')}={value}"
            )


def hardly_meant(config: Any) -> list[str]:
    """Remarks about what a run would do, if that is likely not meant."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    table = [
        (
            validates_only(config),
            "trainer.val_only=True: the run validates once, and trains nothing",
        ),
        (
            estimator in COMPARING and n == 1,
            f"[{ROLLOUT}.n] with adv_estimator={estimator}: there is nothing to compare a response "
            "with, so its advantage is its score",
        ),
        (
            not config.data.get("filter_overlong_prompts", False),
            "data.filter_overlong_prompts=False: if a prompt is longer than "
            "[data.max_prompt_length] tokens, verl silently cuts off its beginning",
        ),
    ]
    return _true_ones(table, config)
