"""`algorithm.gdpo.*` and what surrounds it in a verl configuration, checked before training.

    algorithm:
      adv_estimator: gdpo
      gdpo:
        rewards: null              # see reward_terms.py; null: all that are returned, weight 1
        group_norm: per_reward     # per_reward | summed
        batch_norm: sample         # sample | token | none
        eps: 1e-4
        normalize_by_std: null     # null inherits algorithm.norm_adv_by_std_in_grpo

verl's own `algorithm.gdpo_reward_keys` and `algorithm.gdpo_reward_weights` are another
way to say `rewards`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from omegaconf import OmegaConf

from verl_gdpo.advantage import BatchNorm, GroupNorm
from verl_gdpo.reward_terms import RewardTerm, check_keys, choice, hint, number, read_terms


@dataclass(frozen=True)
class GdpoSettings:
    """The settings of one run; `rewards` None means every reward that the scorer returns."""

    rewards: Mapping[str, RewardTerm] | None = None
    group_norm: GroupNorm = "per_reward"
    batch_norm: BatchNorm = "sample"
    eps: float = 1e-4
    normalize_by_std: bool = True

    @classmethod
    def from_algorithm(cls, algorithm: Any) -> "GdpoSettings":
        """Read verl's `algorithm` block (a mapping or DictConfig).

        Raises:
            ValueError: names the key, what it holds and what it may hold.
        """
        block = _plain(algorithm.get("gdpo")) or {}
        if not isinstance(block, Mapping):
            raise ValueError(f"algorithm.gdpo: expected a mapping of settings, got {block!r}")
        where = "algorithm.gdpo"
        check_keys(where, block, [field.name for field in fields(cls)])
        group_norm = block.get("group_norm", cls.group_norm)
        batch_norm = block.get("batch_norm", cls.batch_norm)
        return cls(
            rewards=_rewards(algorithm, block),
            group_norm=choice(f"{where}.group_norm", group_norm, get_args(GroupNorm)),
            batch_norm=choice(f"{where}.batch_norm", batch_norm, get_args(BatchNorm)),
            eps=number(f"{where}.eps", block.get("eps", cls.eps), minimum=0.0),
            normalize_by_std=_normalize_by_std(algorithm, block),
        )

    @property
    def names(self) -> list[str]:
        """Every reward that is configured or that a condition reads; none for `rewards` None."""
        terms = self.rewards or {}
        read = [term.when.reward for term in terms.values() if term.when is not None]
        return list(dict.fromkeys([*terms, *read]))

    def terms_for(self, returned: Iterable[str]) -> dict[str, RewardTerm]:
        """The terms of the weighted sum, given the names that a scorer returned.

        Raises:
            ValueError: a configured reward is not among them, or there is none at all.
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


def settings_of_run(config: Any) -> GdpoSettings | None:
    """Check a whole verl configuration; None when neither its estimator nor its manager is gdpo.

    Raises:
        ValueError: a setting that cannot work with GDPO, with the reason and what to do instead.
    """
    uses_estimator = config.algorithm.adv_estimator == "gdpo"
    if not (uses_estimator or uses_gdpo_manager(config)):
        return None
    settings = GdpoSettings.from_algorithm(config.algorithm)
    if uses_estimator and config.algorithm.get("use_kl_in_reward", False):
        raise ValueError(
            "algorithm.use_kl_in_reward=True with adv_estimator=gdpo: each reward is normalised by "
            "itself, which leaves no place for a penalty on their sum. Set it to False and use "
            "actor_rollout_ref.actor.use_kl_loss=True"
        )
    if uses_estimator and OmegaConf.select(config, "actor_rollout_ref.rollout.n") == 1:
        raise ValueError(
            "actor_rollout_ref.rollout.n=1 with adv_estimator=gdpo: a group of one sample has no "
            "spread, so every advantage would be 0. Set it to 2 or more"
        )
    reward_model = config.reward.reward_model
    if reward_model.enable and not reward_model.enable_resource_pool:
        raise ValueError(
            "reward.reward_model.enable=True with enable_resource_pool=False: a colocated reward "
            "model hands the reward manager no ground truth, so there are no named rewards. Set "
            "reward.reward_model.enable_resource_pool=True"
        )
    if reward_model.enable and config.reward.custom_reward_function.path is None:
        raise ValueError(
            "reward.reward_model.enable=True with reward.custom_reward_function.path=null: verl "
            "takes the model's single score and asks no reward manager. Set a custom reward "
            "function that queries the model and returns {name: value}"
        )
    return settings


def uses_gdpo_manager(config: Any) -> bool:
    manager = config.reward.reward_manager
    return bool(manager.source == "register" and manager.name == "gdpo")


def _rewards(algorithm: Any, block: Mapping[str, Any]) -> dict[str, RewardTerm] | None:
    """`rewards`, or verl's two lists; None when neither is set."""
    rewards = block.get("rewards")
    keys = _plain(algorithm.get("gdpo_reward_keys"))
    values = _plain(algorithm.get("gdpo_reward_weights"))
    if rewards is None:
        if keys is not None:
            return read_terms("algorithm.gdpo_reward_keys", _paired(keys, values))
        if values is not None:
            raise ValueError("algorithm.gdpo_reward_weights needs algorithm.gdpo_reward_keys")
        return None
    if keys is not None or values is not None:
        raise ValueError(
            "algorithm.gdpo.rewards and algorithm.gdpo_reward_keys/gdpo_reward_weights say the "
            "same thing; give one of them"
        )
    if not isinstance(rewards, Mapping):
        raise ValueError(
            f"algorithm.gdpo.rewards: expected {{name: weight}} or null, got {rewards!r}"
        )
    return read_terms("algorithm.gdpo.rewards", rewards)


def _paired(keys: Any, values: Any) -> dict[str, Any]:
    if not _is_list(keys) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"algorithm.gdpo_reward_keys: expected a list of names, got {keys!r}")
    doubles = sorted({key for key in keys if keys.count(key) > 1})
    if doubles:
        raise ValueError(f"algorithm.gdpo_reward_keys: named more than once: {doubles}")
    if values is None:
        return dict.fromkeys(keys, 1.0)
    if not _is_list(values) or len(values) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights: expected {len(keys)} numbers, one for each of "
            f"gdpo_reward_keys={keys}, got {values!r}"
        )
    return dict(zip(keys, values, strict=True))


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


def _plain(value: Any) -> Any:
    """Omegaconf containers as plain dicts and lists; anything else as it is."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
