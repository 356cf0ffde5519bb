"""Reads verl's `algorithm` block: the settings of GDPO, or a ValueError that says what to set.

verl's own `algorithm.gdpo_reward_keys` and `algorithm.gdpo_reward_weights` can be used instead of
`algorithm.gdpo.rewards`.
"""

import re
import shlex
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError

from verl_gdpo.algorithm.settings import (
    DIALECTS,
    SETTING_KEYS,
    WHERE,
    GdpoSettings,
    RewardTerm,
    hint,
)
from verl_gdpo.algorithm.variants import Bounds

REWARDS = f"{WHERE}.rewards"
_MAY_BE_NULL = ("rewards", "normalize_by_std", "batch_eps", "dialect")


def read_settings(
    algorithm: Any, declared: Mapping[str, Bounds | None] | None = None
) -> GdpoSettings:
    """Read verl's `algorithm` block. Nothing else reads which rewards count, and with what.

    Args:
        algorithm: a mapping or DictConfig.
        declared: {reward: bounds} of its scorers, None where they disagree; bounds in
            `algorithm` replace them.

    Raises:
        ValueError: names the key, its value and the allowed values.
    """
    block = plain(algorithm.get("gdpo")) or {}
    if not isinstance(block, Mapping):
        raise ValueError(f"{WHERE}: expected a mapping of settings, got {block!r}")
    for key in block:
        if key not in SETTING_KEYS:
            raise ValueError(f"{WHERE}.{key}: unknown setting{hint(key, SETTING_KEYS)}")
    inherited = bool(algorithm.get("norm_adv_by_std_in_grpo", True))
    set_keys = {k: v for k, v in block.items() if v is not None or k not in _MAY_BE_NULL}
    written = set_keys.pop("rewards", None)
    where, rewards = _rewards_of(algorithm, written)
    dialect = DIALECTS.get(str(block.get("dialect")), DIALECTS["paper"])
    values = {**dialect, "normalize_by_std": inherited, **set_keys, "rewards": rewards}
    try:
        settings = GdpoSettings(**values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        raise ValueError("; ".join(_message(each, where) for each in mistakes)) from None
    _check_rewards(settings.terms, settings.rewards is not None, where)
    _check_method(settings, {*set_keys}, inherited)
    bounds = {name: term.bounds for name, term in settings.terms.items() if term.bounds}
    return replace(
        settings,
        batch_eps=None if settings.batch_eps == settings.eps else settings.batch_eps,
        bounds={name: pair for name, pair in {**(declared or {}), **bounds}.items() if pair},
        rewards_as_written={str(name): each for name, each in (written or {}).items()},
    )


def plain(value: Any) -> Any:
    """Return OmegaConf containers as plain dicts and lists, and other values unchanged."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _message(mistake: Any, where: str) -> str:
    """Return the key of a mistake, its value, and the reason: our own words, or pydantic's."""
    loc, reason = mistake["loc"], mistake.get("ctx", {}).get("error") or mistake["msg"]
    if "[key]" in loc:  # the name is wrong, and not its weight
        where = where.replace("gdpo_reward_weights", "gdpo_reward_keys")
    start = where if loc[0] == "rewards" else f"{WHERE}.{loc[0]}"
    # a reward may have the name of one of pydantic's own marks
    keys = [*loc[1:2], *(key for key in loc[2:] if key not in ("number", "schedule", "[key]"))]
    return f"{'.'.join([start, *map(str, keys)])}: got {mistake['input']!r}; {reason}"


def _rewards_of(algorithm: Any, rewards: Any) -> tuple[str, Any]:
    """Return where the rewards are named, and them; verl's two lists are another way to do so."""
    keys, weights = (plain(algorithm.get(f"gdpo_reward_{what}")) for what in ("keys", "weights"))
    if keys is None and weights is None:
        return REWARDS, rewards
    where, where_weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    if rewards is not None:
        raise ValueError(
            f"{REWARDS} and {where}/gdpo_reward_weights say the same thing; give one of them"
        )
    names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not names or len({*keys}) < len(keys):
        raise ValueError(f"{where}: expected a list of different names, got {keys!r}")
    if weights is None:
        return where, dict.fromkeys(keys, 1.0)
    if not isinstance(weights, list) or len(weights) != len(keys):
        raise ValueError(
            f"{where_weights}: expected {len(keys)} numbers, one for each of "
            f"gdpo_reward_keys={keys}, got {weights!r}"
        )
    return where_weights, dict(zip(keys, weights, strict=True))


def _check_rewards(terms: Mapping[str, RewardTerm], are_named: bool, where: str) -> None:
    """Raise ValueError for rewards that nothing would train, and conditions on themselves."""
    if are_named and not any(term.is_used for term in terms.values()):
        what = "all weights are 0, so nothing would be trained" if terms else "got none"
        raise ValueError(f"{where}: expected at least one reward with a weight; {what}")
    for name, term in terms.items():
        if term.when is not None and term.when.reward == name:
            raise ValueError(f"{where}.{name}.when.reward: expected another reward than {name!r}")


def _check_method(settings: GdpoSettings, set_keys: Set[str], inherited: bool) -> None:
    """Raise ValueError for settings that are right each by itself, and not together.

    Args:
        set_keys: the keys under `algorithm.gdpo` that are not left to their defaults.
        inherited: verl's `algorithm.norm_adv_by_std_in_grpo`.
    """
    dialect, combine = settings.dialect, settings.combine
    if settings.normalize_by_std != inherited:
        raise ValueError(
            f"{WHERE}.normalize_by_std={settings.normalize_by_std} contradicts "
            f"algorithm.norm_adv_by_std_in_grpo={inherited}; set the latter alone"
        )
    for key, value in DIALECTS[dialect].items() if dialect else ():
        if (got := getattr(settings, key)) != value:
            # a key that is not set can only differ through verl's own setting
            set_key = f"gdpo.{key}" if key in set_keys else "norm_adv_by_std_in_grpo"
            raise ValueError(
                f"algorithm.{set_key}={got} contradicts {WHERE}.dialect={dialect}, which "
                f"stands for {key}={'null' if value is None else value}; leave one of them out"
            )
    if combine is None:
        return
    why = ""
    if dialect:
        why = f"contradicts {WHERE}.dialect={dialect}, which adds the rewards up; leave one out"
    elif settings.group_norm == "summed":
        why = "needs group_norm=per_reward: summed adds the rewards before they are normalised"
    elif combine.name == "dvao" and not settings.normalize_by_std:
        why = "divides by its own std, so set algorithm.norm_adv_by_std_in_grpo=True, not False"
    if why:
        raise ValueError(f"{WHERE}.combine={combine.name} {why}")
    combine.check([min(term.weights.values()) for term in settings.terms.values()] or [1.0])


def line_of(key: str, value: Any) -> str:
    """Return the override that sets a key, for a shell; `++` works whether it exists or not.

    >>> line_of("algorithm.gdpo.rewards", {"format": 0.5, "correctness": {"bounds": [-3, 3]}})
    "'++algorithm.gdpo.rewards={format: 0.5, correctness: {bounds: [-3, 3]}}'"
    """
    return shlex.quote(f"++{key}={_in_hydras_words(value)}")


def _in_hydras_words(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = [f"{_in_hydras_words(k)}: {_in_hydras_words(v)}" for k, v in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_hydras_words, value))}]"
    return re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", "null" if value is None else str(value))
