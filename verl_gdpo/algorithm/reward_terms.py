"""One reward in the weighted sum: its weight, condition and bounds; and the sum of several.

algorithm:
  gdpo:
    rewards:
      correctness: 1.0       # only the weight
      length:
        weight: 0.5
        when: {reward: correctness, at_least: 1.0}
        otherwise: zero
        bounds: [0, 1]
"""

import re
import shlex
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

LONGEST_RUN = 1_000_000  # training steps

# A reward, or another value that is returned with it, would take the place of what verl's trainers
# keep under these names.
RESERVED_NAMES = {
    **dict.fromkeys(["reward", "acc_success_only"], "a metric of verl's validation"),
    **dict.fromkeys(["input", "output", "gts", "step", "uid"], "a column of verl's dumps"),
    **dict.fromkeys(
        ["data_source", "reward_model", "reward_extra_info", "multi_modal_inputs", "__num_turns__"],
        "a column of verl's batches",
    ),
}
# what verl says of a rollout; it is a reward only if the configuration says so
ROLLOUT_FACTS = ("num_turns", "min_global_steps", "max_global_steps", "num_cached_tokens")


def check_name(name: Any) -> Any:
    """Return a name; raise ValueError if no reward or other returned value can have it."""
    if not isinstance(name, str) or not name.strip() or "/" in name or not name.isprintable():
        raise ValueError(f"name {name!r}: expected text that can be printed, without '/'")
    if name in RESERVED_NAMES:
        raise ValueError(f"name {name!r}: it is {RESERVED_NAMES[name]}; rename it")
    return name


def _reward_name(name: Any) -> Any:
    if name == "score":
        raise ValueError("'score' is verl's name for the sum; name its rewards instead")
    return check_name(name)


def _low_below_high(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError("expected the lowest value below the highest")
    return bounds


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
RewardName = Annotated[str, BeforeValidator(_reward_name)]
Step = Annotated[int, Field(strict=True, ge=0)]
Schedule = Annotated[
    dict[Step, Number],
    Field(min_length=1),
    AfterValidator(lambda weights: dict(sorted(weights.items()))),
]
Weight = Annotated[
    Annotated[Number, Tag("number")] | Annotated[Schedule, Tag("schedule")],
    Discriminator(lambda value: "schedule" if isinstance(value, Mapping) else "number"),
]
Bounds = Annotated[tuple[Number, Number], AfterValidator(_low_below_high)]
STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, config=STRICT)
class Condition:
    """A sample meets it if its raw value of `reward` is present and at least `at_least`."""

    reward: RewardName
    """the name of another reward that the scorer returns"""
    at_least: Number
    """the lowest raw value of that reward that meets the condition"""

    def holds(self, raw: Mapping[str, float | None]) -> bool:
        value = raw[self.reward]
        return value is not None and value >= self.at_least


@dataclass(frozen=True, config=STRICT)
class RewardTerm:
    """One term of the weighted sum."""

    weight: Weight = 1.0
    """a factor on the normalised reward, or a schedule: `{training step: weight}`"""
    when: Condition | None = None
    """the condition of a sample: `{reward: NAME, at_least: NUMBER}`"""
    otherwise: Literal["zero", "missing"] = "zero"
    """without the condition, the value becomes 0 (`zero`), or the sample is left out (`missing`)"""
    bounds: Bounds | None = None
    """the lowest and the highest value; a value outside stops the run"""

    @property
    def weights(self) -> dict[int, float]:
        """The weight as a schedule."""
        return dict(self.weight) if isinstance(self.weight, Mapping) else {0: self.weight}

    @property
    def is_used(self) -> bool:
        """Return whether the weight differs from 0 at any step."""
        return any(self.weights.values())

    def weight_at(self, step: int | None) -> float:
        """Return the weight: linear between the steps of a schedule, constant outside them.

        Raises:
            ValueError: the weight has a schedule and the step is not known.
        """
        if step is None and isinstance(self.weight, Mapping):
            raise ValueError(
                f"weight {dict(self.weight)} needs the training step, which only trainers of verl "
                "hand over; set a number as weight"
            )
        return float(np.interp(step or 0, [*self.weights], [*self.weights.values()]))


class WeightedSum(dict[str, RewardTerm]):
    """{reward: term}, in the order of the configuration: all that is known of the weighted sum."""

    @cached_property
    def names(self) -> list[str]:
        """The rewards, and those that conditions read."""
        read = [term.when.reward for term in self.values() if term.when]
        return list(dict.fromkeys([*self, *read]))

    @cached_property
    def has_conditions(self) -> bool:
        return any(term.when for term in self.values())

    def weights_at(self, step: int | None) -> dict[str, float]:
        """Return {reward: weight} at a training step; see `RewardTerm.weight_at`."""
        return {name: term.weight_at(step) for name, term in self.items()}

    def gate(self, raw: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the values of one sample that enter the sum.

        None means missing. A condition reads raw values, even of a reward that has its own
        condition. A missing value meets no condition.
        """
        values = {name: raw[name] for name in self}
        for name, term in self.items():
            if raw[name] is not None and term.when and not term.when.holds(raw):
                values[name] = 0.0 if term.otherwise == "zero" else None
        return values

    def score(self, raw: Mapping[str, float | None], step: int | None = None) -> float:
        """Return the score of one sample for verl. A missing value adds nothing."""
        weights, values = self.weights_at(step), self.gate(raw)
        return sum(weight * (values[name] or 0.0) for name, weight in weights.items())

    def silent_step(self, steps: int | None) -> int | None:
        """Return the first training step at which all weights are 0, or None.

        Args:
            steps: how many steps are trained; None if this is not known.
        """
        weights = [term.weights for term in self.values()]
        last = max(1, *map(max, weights)) if steps is None else steps
        step_S = np.arange(1, min(last, LONGEST_RUN) + 1)
        weight_KS = [np.interp(step_S, [*each], [*each.values()]) for each in weights]
        silent_S = step_S[~np.any(weight_KS, axis=0)]
        return int(silent_S[0]) if len(silent_S) else None


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
