"""Reads `algorithm.gdpo`, and checks the rest of a verl configuration against it before training.

    algorithm:
      adv_estimator: gdpo
      gdpo:
        rewards: null              # null: every reward that the scorer returns, with weight 1
        group_norm: per_reward     # per_reward | summed
        batch_norm: sample         # sample | token | none
        eps: 1e-4
        normalize_by_std: null     # null: the value of algorithm.norm_adv_by_std_in_grpo
        batch_eps: null            # eps of the batch step; null: the value of eps
        batch_var_eps: 0.0         # added to the variance in the batch step, before the square root
        combine: sum               # see combine_option.py
        dialect: null              # see dialects.py

`reward_terms.py` shows what `rewards` may hold. verl's own `algorithm.gdpo_reward_keys` and
`algorithm.gdpo_reward_weights` can be used instead of `rewards`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from omegaconf import OmegaConf

from verl_gdpo.advantage.equation import BatchNorm, Combine, GroupNorm
from verl_gdpo.rewards import TASK_OF, check_options, declared_bounds
from verl_gdpo.settings.combine_option import (
    SUM,
    CombineSetting,
    check_combine,
    no_bounds,
    read_combine,
)
from verl_gdpo.settings.dialects import check_dialect, read_dialect
from verl_gdpo.settings.reward_terms import (
    RewardTerm,
    check_keys,
    choice,
    hint,
    number,
    plain,
    rewards_of,
    silent_step,
)

SETTING_KEYS = (
    "rewards",
    "group_norm",
    "batch_norm",
    "eps",
    "normalize_by_std",
    "batch_eps",
    "batch_var_eps",
    "combine",
    "dialect",
)


@dataclass(frozen=True)
class GdpoSettings:
    """The settings of one run. `rewards` None means every reward that the scorer returns."""

    rewards: Mapping[str, RewardTerm] | None = None
    group_norm: GroupNorm = "per_reward"
    batch_norm: BatchNorm = "sample"
    eps: float = 1e-4
    normalize_by_std: bool = True
    batch_eps: float | None = None  # None: the value of eps
    batch_var_eps: float = 0.0
    combine: CombineSetting | None = None  # None: the weighted sum
    # {reward: (lowest, highest)}; `from_algorithm` fills in the configured bounds, and
    # `settings_of_run` adds the bounds that scorers declare
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_algorithm(cls, algorithm: Any) -> "GdpoSettings":
        """Read verl's `algorithm` block (a mapping or DictConfig).

        Raises:
            ValueError: names the key, its value and the allowed values.
        """
        block = plain(algorithm.get("gdpo")) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"algorithm.gdpo: expected a mapping of settings, got {block!r}")
        where = "algorithm.gdpo"
        check_keys(where, block, SETTING_KEYS)
        dialect = read_dialect(f"{where}.dialect", block.get("dialect"))
        rewards = rewards_of(algorithm, block)
        terms = (rewards or {"": RewardTerm()}).values()
        group_norm = block.get("group_norm", dialect["group_norm"])
        batch_norm = block.get("batch_norm", dialect["batch_norm"])
        eps, batch_var_eps = (
            number(f"{where}.{key}", block.get(key, dialect[key]), minimum=0.0)
            for key in ("eps", "batch_var_eps")
        )
        settings = cls(
            rewards=rewards,
            group_norm=choice(f"{where}.group_norm", group_norm, get_args(GroupNorm)),
            batch_norm=choice(f"{where}.batch_norm", batch_norm, get_args(BatchNorm)),
            eps=eps,
            normalize_by_std=_normalize_by_std(algorithm, block),
            batch_eps=_batch_eps(f"{where}.batch_eps", block, dialect, eps),
            batch_var_eps=batch_var_eps,
            combine=read_combine(
                f"{where}.combine",
                block.get("combine", SUM),
                [term.lowest_weight for term in terms],
            ),
            bounds={name: term.bounds for name, term in (rewards or {}).items() if term.bounds},
        )
        if block.get("dialect") is not None:
            check_dialect(settings, block)
        check_combine(settings.combine, settings.group_norm, settings.normalize_by_std)
        return settings

    @property
    def names(self) -> list[str]:
        """Configured rewards and those that conditions read; empty if `rewards` is None."""
        terms = self.rewards or {}
        read = [term.when.reward for term in terms.values() if term.when is not None]
        return list(dict.fromkeys([*terms, *read]))

    def combine_for(self, weights: Mapping[str, float]) -> Combine | None:
        """Return the function for step 2 with these rewards; None for the weighted sum.

        Args:
            weights: {reward: weight}.

        Raises:
            ValueError: the variant needs the bounds of a reward, and they are not declared.
        """
        if self.combine is None:
            return None
        for name, weight in weights.items():
            if self.combine.needs_bounds and weight != 0 and name not in self.bounds:
                raise ValueError(no_bounds(name, self.combine))
        return self.combine.function([self.range_of(name) for name in weights])

    def range_of(self, name: str) -> tuple[float, float] | None:
        """Return the bounds of a reward after its condition, which may set the reward to 0."""
        bounds, term = self.bounds.get(name), (self.rewards or {}).get(name)
        if bounds and term and term.when is not None and term.otherwise == "zero":
            return min(bounds[0], 0.0), max(bounds[1], 0.0)
        return bounds

    def terms_for(self, returned: Iterable[str]) -> dict[str, RewardTerm]:
        """Return {reward: term} of the weighted sum.

        Args:
            returned: the names that a scorer returned.

        Raises:
            ValueError: a configured reward is not among the names, or there are no names.
        """
        available = [name for name in returned if name != "score"]
        if self.rewards is None:
            if not available:
                raise ValueError("the scorer returned no named reward (`score` is for their sum)")
            return dict.fromkeys(available, RewardTerm())
        for name in self.names:
            if name not in available:
                raise ValueError(
                    f"reward {name!r} is configured, but the scorer returned {available}"
                    f"{hint(name, available)}"
                )
        return dict(self.rewards)


def settings_of_run(
    config: Any, sources: Iterable[str] | None = None, *, has_manager: bool | None = None
) -> GdpoSettings | None:
    """Check a verl configuration and return its settings.

    Args:
        sources: the data sources of the training rows; their scorers may declare bounds. Pass None
            if they are not known yet: then all data sources that we score are used, and bounds on
            which their scorers disagree are left out.
        has_manager: whether the reward manager is ours or a subclass of ours. With None, the
            manager's name decides.

    Returns:
        The settings, or None if neither the estimator nor the reward manager is gdpo.

    Raises:
        ValueError: a setting cannot work with GDPO. The message says why and what to set instead.
    """
    uses_estimator = config.algorithm.adv_estimator == "gdpo"
    has_manager = uses_gdpo_manager(config) if has_manager is None else has_manager
    if not (uses_estimator or has_manager):
        return None
    settings = GdpoSettings.from_algorithm(config.algorithm)
    if uses_estimator:
        _refuse_for_estimator(config)
    _refuse_reward_model(config.reward)
    _refuse_filtering_without_weights(config, settings)
    _check_scorer_options(config, sources)
    declared, disagreed = scorers_bounds(config, sources) if has_manager else ({}, set())
    settings = replace(settings, bounds={**declared, **settings.bounds})
    if uses_estimator and settings.combine is not None and settings.combine.needs_bounds:
        for name, term in (settings.rewards or {}).items():
            later = sources is None and name in disagreed
            if term.is_used and name not in settings.bounds and not later:
                raise ValueError(no_bounds(name, settings.combine))
    return settings


def _refuse_for_estimator(config: Any) -> None:
    """Raise ValueError for what leaves adv_estimator=gdpo nothing to work with."""
    refuse_kl_in_reward(config.algorithm)
    if OmegaConf.select(config, "actor_rollout_ref.rollout.n") == 1:
        raise ValueError(
            "actor_rollout_ref.rollout.n=1 with adv_estimator=gdpo: a group of one sample has no "
            "spread, so every advantage would be 0. Set it to 2 or more"
        )


def _refuse_filtering_without_weights(config: Any, settings: GdpoSettings) -> None:
    """Raise ValueError for a schedule after which dynamic sampling would drop every group."""
    if not OmegaConf.select(config, "algorithm.filter_groups.enable"):
        return
    steps = OmegaConf.select(config, "trainer.total_training_steps")
    if settings.rewards and (step := silent_step(settings.rewards, steps)) is not None:
        raise ValueError(
            f"algorithm.gdpo.rewards: all weights are 0 at step {step}, and "
            "algorithm.filter_groups.enable=True would drop every group there and never end. Give "
            "a weight another schedule, or end the run before with trainer.total_training_steps"
        )


def _refuse_reward_model(reward: Any) -> None:
    """Raise ValueError for a reward model that leaves no named rewards."""
    reward_model = reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        raise ValueError(
            "reward.reward_model.enable=True with enable_resource_pool=False: a colocated reward "
            "model hands the reward manager no ground truth, so there are no named rewards. Set "
            "reward.reward_model.enable_resource_pool=True"
        )
    if reward_model.enable and reward.custom_reward_function.path is None:
        raise ValueError(
            "reward.reward_model.enable=True with reward.custom_reward_function.path=null: verl "
            "takes the model's single score without a reward manager. Set a custom reward "
            "function that queries the model and returns {name: value}"
        )


def scorers_bounds(
    config: Any, sources: Iterable[str] | None
) -> tuple[dict[str, tuple[float, float]], set[str]]:
    """Return {reward: bounds} where our scorers agree, and the names of the other rewards."""
    declared: dict[str, set[tuple[float, float]]] = {}
    if config.reward.custom_reward_function.path is None:
        options = plain(config.reward.get("reward_kwargs")) or {}
        declared = declared_bounds(TASK_OF if sources is None else sources, options)
    agreed = {name: pairs.copy().pop() for name, pairs in declared.items() if len(pairs) == 1}
    return agreed, {*declared} - {*agreed}


def refuse_kl_in_reward(algorithm: Any) -> None:
    """Raise ValueError if verl's `algorithm` block puts the KL penalty into the reward."""
    if algorithm.get("use_kl_in_reward", False):
        raise ValueError(
            "algorithm.use_kl_in_reward=True with adv_estimator=gdpo: each reward is normalised by "
            "itself, which leaves no place for a penalty on their sum. Set it to False and use "
            "actor_rollout_ref.actor.use_kl_loss=True"
        )


def uses_gdpo_manager(config: Any) -> bool:
    """Return whether the reward manager is named gdpo. A subclass of ours may have another name."""
    manager = config.reward.reward_manager
    return bool(manager.source == "register" and manager.name == "gdpo")


def _check_scorer_options(config: Any, sources: Iterable[str] | None) -> None:
    """Raise ValueError for `reward.reward_kwargs` that nothing reads."""
    options = plain(config.reward.get("reward_kwargs")) or {}
    if not options or not uses_gdpo_manager(config):  # another manager may read them
        return
    if config.reward.custom_reward_function.path is not None:
        raise ValueError(
            f"reward.reward_kwargs={options}: with reward.custom_reward_function.path set, nothing "
            "reads them. Options of your function go to reward.custom_reward_function.reward_kwargs"
        )
    check_options(options, TASK_OF if sources is None else sources)


def _batch_eps(
    where: str, block: Mapping[str, Any], dialect: Mapping[str, Any], eps: float
) -> float | None:
    value = block.get("batch_eps")
    value = dialect["batch_eps"] if value is None else number(where, value, minimum=0.0)
    return None if value == eps else value


def _normalize_by_std(algorithm: Any, block: Mapping[str, Any]) -> bool:
    inherited = bool(algorithm.get("norm_adv_by_std_in_grpo", True))
    value = block.get("normalize_by_std")
    if value is None:
        return inherited
    if not isinstance(value, bool):
        raise ValueError(
            f"algorithm.gdpo.normalize_by_std: expected true, false or null, got {value!r}"
        )
    if value != inherited:
        raise ValueError(
            f"algorithm.gdpo.normalize_by_std={value} contradicts "
            f"algorithm.norm_adv_by_std_in_grpo={inherited}; set the latter alone"
        )
    return value
