"""Reads verl's `algorithm` block: the settings of GDPO, or a ValueError that says what to set.

verl's own `algorithm.gdpo_reward_keys` and `algorithm.gdpo_reward_weights` can be used instead of
`algorithm.gdpo.rewards`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError

from verl_gdpo.algorithm.settings import (
    DIALECTS,
    MEANT,
    SETTING_KEYS,
    WHERE,
    GdpoSettings,
    SettingsError,
    hint,
)
from verl_gdpo.algorithm.variants import Bounds

REWARDS = f"{WHERE}.rewards"
KEYS = "algorithm.gdpo_reward_keys"
WEIGHTS = "algorithm.gdpo_reward_weights"
# In these keys null means that the user leaves the choice to the default. In others it is refused.
MAY_BE_NULL = ("rewards", "normalize_by_std", "batch_eps", "dialect", "keep_groups")
# Parts of pydantic's places that are no keys of the configuration.
MARKS = ("number", "schedule", "[key]")


def read_settings(
    algorithm: Any, declared: Mapping[str, Bounds | None] | None = None
) -> GdpoSettings:
    """Read verl's `algorithm` block. Nothing else reads which rewards count, and with what.

    Args:
        algorithm: a mapping or DictConfig.
        declared: {reward: bounds} of its scorers, None where they disagree; bounds in
            `algorithm` replace them.

    Raises:
        SettingsError: for each mistake, it names the key, its value and the allowed values.
    """
    settings, mistakes = settings_and_mistakes(algorithm, declared)
    if mistakes:
        raise SettingsError(mistakes)
    return settings


def settings_and_mistakes(
    algorithm: Any, declared: Mapping[str, Bounds | None] | None = None
) -> tuple[GdpoSettings, list[str]]:
    """Return the settings as far as they can be read, and a message for each mistake.

    A key with a mistake has its default in the settings, so that they can be looked at for further
    mistakes. No run may use them. See `read_settings` for the arguments.
    """
    # Replay hands over a plain dict, and training a DictConfig with interpolations.
    block = plain(algorithm.get("gdpo")) or {}
    if not isinstance(block, Mapping):
        return GdpoSettings(), [f"{WHERE}: expected a mapping of settings, got {block!r}"]
    mistakes = []
    set_keys = {}
    for key, value in block.items():
        if key not in SETTING_KEYS:
            meant = MEANT.get(str(key), key)
            mistakes.append(f"{WHERE}.{key}: unknown setting{hint(meant, SETTING_KEYS)}")
        elif value is not None or key not in MAY_BE_NULL:
            set_keys[key] = value
    written = set_keys.pop("rewards", None)
    # If verl's lists are wrong, what stands under our own key is looked at nevertheless.
    where = REWARDS
    rewards = written
    try:
        where, rewards = _rewards_of(algorithm, written)
    except ValueError as error:
        mistakes.append(str(error))

    # A dialect sets the keys that the user leaves out.
    inherited = bool(algorithm.get("norm_adv_by_std_in_grpo", True))
    defaults = dict(DIALECTS.get(str(block.get("dialect")), DIALECTS["paper"]))
    defaults["normalize_by_std"] = inherited
    settings, of_values = _made_of(defaults, {**set_keys, "rewards": rewards}, where)
    mistakes += of_values
    mistakes += _mistakes_of_rewards(settings, where)
    mistakes += _mistakes_of_method(settings, set_keys.keys(), inherited)
    return _filled_in(settings, declared or {}, written), mistakes


def plain(value: Any) -> Any:
    """Return OmegaConf containers as plain dicts and lists, and other values unchanged."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _rewards_of(algorithm: Any, rewards: Any) -> tuple[str, Any]:
    """Return where the rewards are named, and them; verl's two lists are another way to do so.

    Args:
        rewards: `algorithm.gdpo.rewards`.

    Raises:
        ValueError: verl's lists cannot be read, or both ways are used.
    """
    keys = plain(algorithm.get("gdpo_reward_keys"))
    weights = plain(algorithm.get("gdpo_reward_weights"))
    if keys is None and weights is None:
        return REWARDS, rewards
    if rewards is not None:
        raise ValueError(
            f"{REWARDS} and {KEYS}/gdpo_reward_weights say the same thing; give one of them"
        )
    are_names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not are_names or len(set(keys)) < len(keys):
        raise ValueError(f"{KEYS}: expected a list of different names, got {keys!r}")
    if weights is None:
        return KEYS, dict.fromkeys(keys, 1.0)
    if not isinstance(weights, list) or len(weights) != len(keys):
        raise ValueError(
            f"{WEIGHTS}: expected {len(keys)} numbers, one for each of "
            f"gdpo_reward_keys={keys}, got {weights!r}"
        )
    return WEIGHTS, dict(zip(keys, weights, strict=True))


def _made_of(
    defaults: Mapping[str, Any], set_keys: Mapping[str, Any], where: str
) -> tuple[GdpoSettings, list[str]]:
    """Return the settings, and a message for each value that is refused.

    Args:
        defaults: what holds for a key that the user does not set, or whose value is refused.
        where: the key under which the rewards are named.
    """
    try:
        return GdpoSettings(**{**defaults, **set_keys}), []
    except ValidationError as error:
        refused = error.errors(include_url=False)
    # If one key is wrong, pydantic makes nothing, so it is asked again without that key.
    wrong_keys = {mistake["loc"][0] for mistake in refused}
    right = {key: value for key, value in set_keys.items() if key not in wrong_keys}
    settings = GdpoSettings(**{**defaults, **right})
    return settings, [_message(mistake, where) for mistake in refused]


def _message(mistake: Any, where: str) -> str:
    """Return the key of a mistake, its value, and the reason: our own words, or pydantic's."""
    # Our own validators raise an error, whose text is the reason.
    place = mistake["loc"]
    reason = mistake.get("ctx", {}).get("error") or mistake["msg"]
    keys = [f"{WHERE}.{place[0]}"]
    if place[0] == "rewards":
        keys = [where]
        if "[key]" in place and where == WEIGHTS:
            # The name is wrong, and not its weight.
            keys = [KEYS]
    # Behind `rewards` stands the name of a reward, which may be that of one of the marks.
    for depth, key in enumerate(place[1:], start=1):
        if depth == 1 or key not in MARKS:
            keys.append(str(key))
    return f"{'.'.join(keys)}: got {mistake['input']!r}; {reason}"


def _mistakes_of_rewards(settings: GdpoSettings, where: str) -> Iterator[str]:
    """Yield a message for rewards that nothing would train, and for conditions on themselves."""
    # A weight of 0 at all steps is allowed beside others: the reward is scored and logged.
    is_trained = any(term.is_used for term in settings.terms.values())
    if settings.rewards is not None and not is_trained:
        what = "got none"
        if settings.terms:
            what = "all weights are 0, so nothing would be trained"
        yield f"{where}: expected at least one reward with a weight; {what}"
    for name, term in settings.terms.items():
        if term.when is not None and term.when.reward == name:
            yield f"{where}.{name}.when.reward: expected another reward than {name!r}"


def _mistakes_of_method(
    settings: GdpoSettings, set_keys: Set[str], inherited: bool
) -> Iterator[str]:
    """Yield a message for settings that are right each by itself, and not together.

    Args:
        set_keys: the keys under `algorithm.gdpo` that are not left to their defaults.
        inherited: verl's `algorithm.norm_adv_by_std_in_grpo`.
    """
    if settings.normalize_by_std != inherited:
        yield (
            f"{WHERE}.normalize_by_std={settings.normalize_by_std} contradicts "
            f"algorithm.norm_adv_by_std_in_grpo={inherited}; set the latter alone"
        )
        # The key has to go, so the rest is looked at without it.
        settings = replace(settings, normalize_by_std=inherited)
    yield from _contradictions_of_dialect(settings, set_keys)
    yield from _mistakes_of_combine(settings)


def _contradictions_of_dialect(settings: GdpoSettings, set_keys: Set[str]) -> Iterator[str]:
    """Yield a message for each key whose value is another than the one of the dialect."""
    if settings.dialect is None:
        return
    for key, value in DIALECTS[settings.dialect].items():
        got = getattr(settings, key)
        if got == value:
            continue
        # A key that is not set can only differ through verl's own setting.
        set_key = "norm_adv_by_std_in_grpo"
        if key in set_keys:
            set_key = f"gdpo.{key}"
        # The user would write None as null.
        shown = "null" if value is None else value
        yield (
            f"algorithm.{set_key}={got} contradicts {WHERE}.dialect={settings.dialect}, which "
            f"stands for {key}={shown}; leave one of them out"
        )


def _mistakes_of_combine(settings: GdpoSettings) -> Iterator[str]:
    """Yield a message for each reason why the variant cannot stand in the place of the sum."""
    combine = settings.combine
    if combine is None:
        return
    where = f"{WHERE}.combine={combine.name}"
    if settings.dialect is not None:
        dialect = f"{WHERE}.dialect={settings.dialect}"
        yield f"{where} contradicts {dialect}, which adds the rewards up; leave one out"
    if settings.group_norm == "summed":
        yield (
            f"{where} needs group_norm=per_reward: summed adds the rewards before they are "
            "normalised"
        )
    if combine.name == "dvao" and not settings.normalize_by_std:
        yield (
            f"{where} divides by its own std, so set algorithm.norm_adv_by_std_in_grpo=True, not "
            "False"
        )
    # A schedule may go below 0, which some variants refuse.
    lowest = [min(term.weights.values()) for term in settings.terms.values()]
    try:
        combine.check(lowest or [1.0])
    except ValueError as error:
        yield str(error)


def _filled_in(
    settings: GdpoSettings, declared: Mapping[str, Bounds | None], written: Any
) -> GdpoSettings:
    """Return the settings with what follows from them, from the scorers and from what was written.

    Args:
        written: `algorithm.gdpo.rewards`, where it is set.
    """
    # What the user writes replaces what a scorer declares, which is None where scorers disagree.
    bounds = dict(declared)
    for name, term in settings.terms.items():
        if term.bounds is not None:
            bounds[name] = term.bounds
    as_written = {}
    if isinstance(written, Mapping):
        as_written = {str(name): each for name, each in written.items()}
    # The same value in both keys is the same method as in `eps` alone, and such settings are equal.
    batch_eps = settings.batch_eps
    if batch_eps == settings.eps:
        batch_eps = None
    return replace(
        settings,
        batch_eps=batch_eps,
        bounds={name: pair for name, pair in bounds.items() if pair is not None},
        rewards_as_written=as_written,
    )


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
        return f"[{', '.join(_in_hydras_words(each) for each in value)}]"
    if value is None:
        return "null"
    # Hydra reads these characters of a bare word as its own grammar, unless a backslash stands
    # before them.
    return re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", str(value))
