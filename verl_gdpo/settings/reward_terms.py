"""The settings of each reward: its weight, its condition and its bounds.

algorithm:
  gdpo:
    rewards:
      correctness: 1.0       # only the weight
      length:
        weight: 0.5
        when: {reward: correctness, at_least: 1.0}
        otherwise: zero      # zero | missing: the value for samples that do not meet `when`
        bounds: [0, 1]       # the lowest and the highest possible value
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from omegaconf import OmegaConf

LONGEST_RUN = 1_000_000  # training steps

Otherwise = Literal["zero", "missing"]


@dataclass(frozen=True)
class Condition:
    """A sample meets it if its raw value of `reward` is present and at least `at_least`."""

    reward: str
    at_least: float


@dataclass(frozen=True)
class RewardTerm:
    """One term of the weighted sum."""

    weight: float | Mapping[int, float] = 1.0
    when: Condition | None = None
    otherwise: Otherwise = "zero"
    bounds: tuple[float, float] | None = None

    @property
    def lowest_weight(self) -> float:
        return min(self.weight.values()) if isinstance(self.weight, Mapping) else self.weight

    @property
    def is_used(self) -> bool:
        """Return whether the weight differs from 0 at any step."""
        return any(self.weight.values()) if isinstance(self.weight, Mapping) else self.weight != 0

    def weight_at(self, step: int | None) -> float:
        """Return the weight: linear between the steps of a schedule, constant outside them.

        Raises:
            ValueError: the weight has a schedule and the step is not known.
        """
        if not isinstance(self.weight, Mapping):
            return self.weight
        if step is None:
            raise ValueError(
                f"weight {dict(self.weight)} needs the training step, which verl's legacy trainer "
                "does not hand over; set trainer.use_v1=True, or a number as weight"
            )
        return float(np.interp(step, list(self.weight), list(self.weight.values())))


def gate(
    raw: Mapping[str, float | None], terms: Mapping[str, RewardTerm]
) -> dict[str, float | None]:
    """Return the values of one sample that enter the sum, in the order of `terms`.

    None means missing. A condition reads raw values, even of a reward that has its own condition.
    A missing value meets no condition.
    """
    values = {}
    for name, term in terms.items():
        values[name] = raw[name]
        if raw[name] is not None and term.when is not None and not _met(term.when, raw):
            values[name] = 0.0 if term.otherwise == "zero" else None
    return values


def weighted_sum(
    values: Mapping[str, float | None], terms: Mapping[str, RewardTerm], step: int | None = None
) -> float:
    """Return the score of one sample for verl. A missing value adds nothing."""
    return sum(term.weight_at(step) * (values[name] or 0.0) for name, term in terms.items())


def read_terms(where: str, rewards: Mapping[Any, Any]) -> dict[str, RewardTerm]:
    """Return {name: term}, read from {name: weight or mapping of settings}.

    Args:
        where: the key in the configuration, for messages.
        rewards: the value of that key.

    Raises:
        ValueError: names the key, its value and the allowed values.
    """
    if not rewards:
        raise ValueError(f"{where}: expected at least one reward, got none")
    if "score" in rewards:
        raise ValueError(f"{where}: 'score' is verl's name for the sum; name its rewards instead")
    terms = {str(name): _read_term(where, str(name), value) for name, value in rewards.items()}
    if not any(term.is_used for term in terms.values()):
        raise ValueError(f"{where}: all weights are 0, so nothing would be trained: {rewards}")
    return terms


def silent_step(terms: Mapping[str, RewardTerm], steps: int | None) -> int | None:
    """Return the first training step at which all weights are 0, or None.

    Args:
        steps: how many steps are trained; None if this is not known.
    """
    weights = [term.weight for term in terms.values()]
    schedules = [weight for weight in weights if isinstance(weight, Mapping)]
    if len(schedules) < len([weight for weight in weights if weight != 0]):
        return None
    last = max(1, *map(max, schedules)) if steps is None else steps
    step_S = np.arange(1, min(last, LONGEST_RUN) + 1)
    weight_KS = [np.interp(step_S, list(each), list(each.values())) for each in schedules]
    silent_S = step_S[(np.array(weight_KS) == 0).all(axis=0)]
    return int(silent_S[0]) if len(silent_S) else None


def rewards_of(algorithm: Any, block: Mapping[str, Any]) -> dict[str, RewardTerm] | None:
    """Return the terms from the block's `rewards` or verl's two lists; None if neither is set."""
    rewards = block.get("rewards")
    keys = plain(algorithm.get("gdpo_reward_keys"))
    values = plain(algorithm.get("gdpo_reward_weights"))
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


def number(where: str, value: Any, minimum: float = -math.inf) -> float:
    """Return a configured number as a float; raise ValueError if it is not finite or too small."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value!r}")
    if value < minimum:
        raise ValueError(f"{where}: expected at least {minimum:g}, got {value!r}")
    return float(value)


def choice(where: str, value: Any, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise ValueError(f"{where}: expected one of {list(choices)}, got {value!r}")
    return value


def plain(value: Any) -> Any:
    """Return OmegaConf containers as plain dicts and lists, and other values unchanged."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def check_keys(where: str, block: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in block:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown setting{hint(key, known)}")


def hint(name: object, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    close = difflib.get_close_matches(str(name), known)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {list(known)}"


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


def _met(condition: Condition, raw: Mapping[str, float | None]) -> bool:
    value = raw[condition.reward]
    return value is not None and value >= condition.at_least


def _read_term(where: str, name: str, value: Any) -> RewardTerm:
    if not isinstance(value, Mapping):
        return RewardTerm(number(f"{where}: weight of {name!r}", value))
    where = f"{where}.{name}"
    check_keys(where, value, ["weight", "when", "otherwise", "bounds"])
    if "otherwise" in value and value.get("when") is None:
        raise ValueError(f"{where}.otherwise={value['otherwise']} needs {where}.when")
    return RewardTerm(
        weight=_read_weight(f"{where}.weight", value.get("weight", RewardTerm.weight)),
        when=_read_condition(f"{where}.when", name, value.get("when")),
        otherwise=choice(
            f"{where}.otherwise", value.get("otherwise", RewardTerm.otherwise), get_args(Otherwise)
        ),
        bounds=_read_bounds(f"{where}.bounds", value.get("bounds")),
    )


def _read_weight(where: str, value: Any) -> float | dict[int, float]:
    if not isinstance(value, Mapping):
        return number(where, value)
    if not value or not all(type(step) is int and step >= 0 for step in value):
        raise ValueError(f"{where}: expected {{training step >= 0: weight}}, got {value!r}")
    return {step: number(f"{where}.{step}", value[step]) for step in sorted(value)}


def _read_bounds(where: str, value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{where}: expected [lowest, highest], got {value!r}")
    low, high = (number(where, bound) for bound in value)
    if not low < high:
        raise ValueError(f"{where}: expected the lowest value below the highest, got {value!r}")
    return low, high


def _read_condition(where: str, name: str, value: Any) -> Condition | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or {*value} != {"reward", "at_least"}:
        raise ValueError(f"{where}: expected {{reward: NAME, at_least: NUMBER}}, got {value!r}")
    if not isinstance(value["reward"], str) or value["reward"] in (name, "score"):
        raise ValueError(
            f"{where}.reward: expected the name of another reward than {name!r}, "
            f"got {value['reward']!r}"
        )
    return Condition(value["reward"], number(f"{where}.at_least", value["at_least"]))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
