"""What a user may set under `algorithm.gdpo`: types, bounds and defaults, and a line on each.

`read_settings.py` makes these records of verl's configuration; docs/keys.md shows the lines as
tables.

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

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.dataclasses import dataclass

from verl_gdpo.algorithm.values import LARGEST, SCORER, check_name
from verl_gdpo.algorithm.variants import VARIANTS, Bounds, Combine, CombineSetting
from verl_gdpo.algorithm.zero import is_at_least

WHERE = "algorithm.gdpo"
# No run has more training steps than this.
LONGEST_RUN = 1_000_000

# The authors' code and TRL have this one.
PAPER_EPS = 1e-4
# verl's own grpo and gdpo have this one.
VERL_EPS = 1e-6

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class Options:
    """The keywords that choose the method.

    ============  =============  ================  =================================
    group_norm    batch_norm     normalize_by_std  method
    ============  =============  ================  =================================
    per_reward    sample         True              GDPO
    per_reward    none           True              GDPO without batch norm
    per_reward    token          True              verl's built-in `gdpo`
    summed        none           True              GRPO
    summed        none           False             GRPO without std (Dr. GRPO)
    summed        sample         True              GRPO + batch norm
    ============  =============  ================  =================================
    """

    group_norm: Literal["per_reward", "summed"] = "per_reward"
    """normalise `per_reward` within each group, or their weighted sum (`summed`), as GRPO does"""
    batch_norm: Literal["sample", "token", "none"] = "sample"
    """normalise over a step's samples with a reward, their tokens (`token`), or not (`none`)"""
    eps: NotNegative = PAPER_EPS
    """is added to both standard deviations; the default is that of the authors' TRL code"""
    normalize_by_std: Annotated[bool, Field(strict=True)] = True
    """`false`: groups are only centred; `null`: verl's `algorithm.norm_adv_by_std_in_grpo`"""
    batch_eps: NotNegative | None = None
    """is added to the standard deviation of the batch, in place of `eps`"""
    batch_var_eps: NotNegative = 0.0
    """is added to the variance of the batch, before the square root"""


# {a name that users write under `algorithm.gdpo`: the key that they mean}, where the letters tell
# of another key, or of none.
MEANT = {
    "conditions": "rewards",
    "gates": "rewards",
    "reward_keys": "rewards",
    "reward_names": "rewards",
    "reward_weights": "rewards",
    "variant": "combine",
    "weights": "rewards",
}


def read_options(options: Mapping[str, Any]) -> Options:
    """Return the keywords of a call as `Options`, or raise what names each that is wrong.

    Raises:
        TypeError: there is no option of this name.
        ValueError: an option has a wrong value.
    """
    known = [each.name for each in fields(Options)]
    for name in options:
        if name not in known:
            raise TypeError(unknown_option(name, known))
    try:
        return Options(**options)
    except ValidationError as error:
        reasons = []
        for mistake in error.errors(include_url=False):
            reasons.append(f"{mistake['loc'][0]}: got {mistake['input']!r}; {mistake['msg']}")
        raise ValueError("; ".join(reasons)) from None


def unknown_option(name: str, known: Sequence[str]) -> str:
    """Return the message about a keyword that a function does not take, with those that it takes.

    >>> unknown_option("batchnorm", ["eps", "batch_norm"])
    "unknown option 'batchnorm'; did you mean 'batch_norm'? The options are eps, batch_norm"
    """
    guess = hint(name, known).partition("; did you mean ")[2]
    question = f"; did you mean {guess}" if guess else "."
    return f"unknown option {name!r}{question} The options are {', '.join(known)}"


def hint(name: object, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them.

    >>> hint("formt", ["correctness", "format"])
    "; did you mean 'format'?"
    """
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower)
    if not close:
        return f"; known: {list(known)}"
    return f"; did you mean {lower[close[0]]!r}?"


class SettingsError(ValueError):
    """A configuration that cannot work. Its text has a line for each mistake.

    mistakes: a message for each, with the key, its value and what to set instead.

    >>> print(SettingsError(["a=1: too low", "b=2: too high"]))
    the configuration has 2 mistakes:
      a=1: too low
      b=2: too high
    """

    def __init__(self, mistakes: Iterable[str]) -> None:
        # Two checks may find the same mistake. A dict keeps the order and has each once.
        self.mistakes = list(dict.fromkeys(mistakes))
        # Ray carries the error to other processes, where pickle makes it of these arguments.
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        if len(self.mistakes) == 1:
            return self.mistakes[0]
        # A message of a task of the user's may have several lines itself.
        lines = [" ".join(mistake.splitlines()) for mistake in self.mistakes]
        return "\n  ".join([f"the configuration has {len(lines)} mistakes:", *lines])


def _reward_name(name: Any) -> Any:
    if name == "score":
        raise ValueError("'score' is verl's name for the sum; name its rewards instead")
    return check_name(name)


def _low_below_high(bounds: Bounds) -> Bounds:
    if not bounds[0] < bounds[1]:
        raise ValueError("expected the lowest value below the highest")
    return bounds


def _low_not_above_high(bounds: Bounds) -> Bounds:
    if not bounds[0] <= bounds[1]:
        raise ValueError("expected the lowest mean, and then the highest")
    return bounds


def _without_null(value: Any) -> Any:
    """Leave out rewards that are null: Hydra merges mappings, and null takes out what one has."""
    if not isinstance(value, Mapping):
        raise ValueError("expected {NAME: [lowest mean, highest mean]} or null")
    return {str(name): bounds for name, bounds in value.items() if bounds is not None}


def _otherwise(value: Any) -> Any:
    if value is None or value in ("zero", "missing"):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError("expected zero, missing or a finite number")
    return float(value)


def _in_order_of_steps(weights: dict[int, float]) -> dict[int, float]:
    # `np.interp` reads a schedule, and needs its steps in order.
    return dict(sorted(weights.items()))


def _kind_of_weight(value: Any) -> str:
    if isinstance(value, Mapping):
        return "schedule"
    return "number"


RewardName = Annotated[str, BeforeValidator(_reward_name)]
Factor = Annotated[Number, Field(ge=-LARGEST, le=LARGEST)]
Schedule = Annotated[
    dict[Annotated[int, Field(strict=True, ge=0)], Factor],
    Field(min_length=1),
    AfterValidator(_in_order_of_steps),
]
# pydantic tries the kind that a value has, and not both: a user gets one message and not two.
Weight = Annotated[
    Annotated[Factor, Tag("number")] | Annotated[Schedule, Tag("schedule")],
    Discriminator(_kind_of_weight),
]


@dataclass(frozen=True, config=STRICT)
class Condition:
    """A sample meets it if its raw value of `reward` is present and at least `at_least`."""

    reward: RewardName
    """the name of another reward that the scorer returns"""
    at_least: Number
    """the lowest raw value of that reward that meets the condition"""

    def holds(self, raw: Mapping[str, float | None]) -> bool:
        value = raw[self.reward]
        return value is not None and bool(is_at_least(value, self.at_least))


@dataclass(frozen=True, config=STRICT)
class RewardTerm:
    """One term of the weighted sum."""

    weight: Weight = 1.0
    """a factor on the normalised reward, or a schedule: `{training step: weight}`"""
    when: Condition | None = None
    """the condition of a sample: `{reward: NAME, at_least: NUMBER}`"""
    otherwise: Annotated[Literal["zero", "missing"] | float | None, PlainValidator(_otherwise)] = (
        None
    )
    """what a sample gets that fails the condition: a number, `zero`, or no reward (`missing`)"""
    bounds: Annotated[tuple[Number, Number], AfterValidator(_low_below_high)] | None = None
    """the lowest and the highest value; a value outside stops the run"""

    @property
    def fallback(self) -> float | None:
        """The value of a sample that does not meet the condition; None means missing.

        Without `otherwise` it is 0, which `conditions.py` refuses where 0 is better than what can
        be reached by meeting the condition.
        """
        if self.otherwise == "missing":
            return None
        if self.otherwise is None or self.otherwise == "zero":
            return 0.0
        return self.otherwise

    @property
    def weights(self) -> dict[int, float]:
        """The weight as a schedule."""
        if isinstance(self.weight, Mapping):
            return dict(self.weight)
        return {0: self.weight}

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
        # A weight without a schedule is the same at any step, also where the step is not known.
        steps = list(self.weights)
        return float(np.interp(step or 0, steps, list(self.weights.values())))


def _term(value: Any, make: ValidatorFunctionWrapHandler) -> Any:
    """Return the term of a reward, for which a mere weight may stand.

    Args:
        make: pydantic's own step, which makes a term of a mapping.
    """
    if isinstance(value, RewardTerm):
        return value
    if not isinstance(value, Mapping):
        return make({"weight": value})
    known = [each.name for each in fields(RewardTerm)]
    reasons = []
    for key in value:
        if key not in known:
            reasons.append(f"{key}: unknown setting{hint(key, known)}")
    # An unknown key may be a misspelt `when`, so this is no mistake of its own beside one.
    if not reasons and value.get("otherwise") is not None and value.get("when") is None:
        reasons.append("otherwise needs when")
    if not reasons:
        return make(value)
    mistakes: list[Any] = []
    for reason in reasons:
        context = {"error": ValueError(reason)}
        mistakes.append({"type": "value_error", "loc": (), "input": value, "ctx": context})
    # The keys that are known may have mistakes too, and all are shown at once.
    try:
        make({key: each for key, each in value.items() if key in known})
    except ValidationError as error:
        mistakes += error.errors(include_url=False)
    raise ValidationError.from_exception_data("reward", mistakes)


class WeightedSum(dict[str, RewardTerm]):
    """{reward: term}, in the order of the configuration: all that is known of the weighted sum."""

    @cached_property
    def names(self) -> list[str]:
        """The rewards, and those that conditions read."""
        read = [term.when.reward for term in self.values() if term.when]
        # A dict keeps the order and has each name once.
        return list(dict.fromkeys(list(self) + read))

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
                values[name] = term.fallback
        return values

    def score(self, raw: Mapping[str, float | None], step: int | None = None) -> float:
        """Return the score of one sample for verl. A missing value adds nothing."""
        weights = self.weights_at(step)
        values = self.gate(raw)
        return sum(weight * (values[name] or 0.0) for name, weight in weights.items())

    def silent_step(self, steps: int | None) -> int | None:
        """Return the first training step at which all weights are 0, or None.

        Args:
            steps: how many steps are trained; None if this is not known.
        """
        schedules = [term.weights for term in self.values()]
        last = steps
        if last is None:
            # Behind the last point of its schedule, a weight stays as it is.
            last = 1
            for schedule in schedules:
                last = max(last, max(schedule))
        step_S = np.arange(1, min(last, LONGEST_RUN) + 1)
        is_silent_S = np.ones(len(step_S), dtype=bool)
        for schedule in schedules:
            weight_S = np.interp(step_S, list(schedule), list(schedule.values()))
            is_silent_S &= weight_S == 0
        if not is_silent_S.any():
            return None
        return int(step_S[is_silent_S][0])


def _rewards(value: Any) -> Any:
    """Leave out rewards that are null."""
    if not isinstance(value, Mapping):
        raise ValueError("expected {name: weight} or null")
    return {str(name): term for name, term in value.items() if term is not None}


def _combine(value: Any) -> CombineSetting | None:
    if value is None or isinstance(value, CombineSetting):
        return value
    parameters = {"name": value}
    if isinstance(value, Mapping):
        parameters = dict(value)
    name = parameters.pop("name", None)
    known = ["sum", *VARIANTS]
    is_sum = name == "sum"
    if name not in known or (is_sum and parameters):
        form = "or {name: ..., parameter: value}"
        raise ValueError(f"expected one of {known}, {form}{hint(name, known)}")
    if is_sum:
        return None
    return CombineSetting(name, parameters)


Term = Annotated[RewardTerm, WrapValidator(_term)]
MeanRange = Annotated[tuple[Number, Number], AfterValidator(_low_not_above_high)]


@dataclass(frozen=True, config=STRICT)
class GdpoSettings(Options):
    """The settings of one run. `rewards` None means every reward that the scorer returns."""

    rewards: Annotated[dict[RewardName, Term], BeforeValidator(_rewards)] | None = None
    """`{name: weight}`, or more for each; `null`: every reward that is returned, with weight 1"""
    combine: Annotated[CombineSetting | None, BeforeValidator(_combine)] = None
    """makes one number of the normalised rewards in another way; see [variants](variants.md)"""
    dialect: Literal["paper", "trl", "nemo_rl", "verl_builtin"] | None = field(
        default=None, compare=False
    )
    """the options of another implementation; see [dialects](variants.md#dialects)"""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.1
    """the run ends if functions fail for a larger share of the samples of a step or validation"""
    min_group: Annotated[int, Field(ge=1)] = 2
    """a group leaves as a whole if fewer of its samples stay after `on_error: drop`"""

    rubric_weights: Literal["divided", "as_written"] = "divided"
    """the weights of [criteria](rewards.md#rubrics): `divided` by their sum, or `as_written`"""

    keep_groups: Annotated[dict[RewardName, MeanRange], BeforeValidator(_without_null)] | None = (
        None
    )
    """`{NAME: [LOW, HIGH]}`: [dynamic sampling](#dynamic-sampling) keeps groups by their mean"""

    # {reward: (lowest, highest)}, also those that scorers declare. This field and the next are no
    # settings: `read_settings` fills them in.
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    # The block `rewards` as it stands in the configuration, with the rewards that null leaves out.
    rewards_as_written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def terms(self) -> WeightedSum:
        """The configured rewards; empty if none are."""
        return WeightedSum(self.rewards or {})

    @property
    def names(self) -> list[str]:
        """Configured rewards and those that conditions read; empty if `rewards` is None."""
        return self.terms.names

    def terms_for(self, returned: Iterable[str], origin: str = SCORER) -> WeightedSum:
        """Return the weighted sum over rewards that are there.

        Args:
            returned: the names that a scorer returned.
            origin: who returned them, for messages.

        Raises:
            ValueError: a configured reward is not among the names, or there are no names.
        """
        available = [name for name in returned if name != "score"]
        if self.rewards is None and not available:
            raise ValueError(f"{origin} no named reward (`score` is for their sum)")
        for name in self.names:
            if name not in available:
                close = hint(name, available)
                raise ValueError(f"reward {name!r} is configured, but {origin} {available}{close}")
        return self.terms or WeightedSum(dict.fromkeys(available, RewardTerm()))

    def combine_for(self, weights: Mapping[str, float]) -> Combine | None:
        """Return the function for step 2 with these rewards; None for the weighted sum.

        Args:
            weights: {reward: weight}.

        Raises:
            ValueError: the variant needs the bounds of a reward, and they are not declared.
        """
        if self.combine is None:
            return None
        # A reward of weight 0 changes nothing, so no variant reads its bounds.
        self.check_bounds(name for name, weight in weights.items() if weight != 0)
        return self.combine.function([self.range_of(name) for name in weights])

    def check_bounds(self, names: Iterable[str]) -> None:
        """Raise SettingsError if `combine` needs bounds of these rewards that nothing declares."""
        if self.combine is None or not self.combine.needs_bounds:
            return
        mistakes = []
        for name in names:
            if name not in self.bounds:
                mistakes.append(
                    f"{WHERE}.combine={self.combine.name} needs the bounds of reward {name!r}, and "
                    f"nothing declares them. Set {WHERE}.rewards.{name}="
                    "{weight: WEIGHT, bounds: [LOWEST, HIGHEST]}"
                )
        if mistakes:
            raise SettingsError(mistakes)

    def range_of(self, name: str) -> Bounds | None:
        """Return the bounds of a reward after its condition, which may give it another value."""
        bounds = self.bounds.get(name)
        term = self.terms.get(name)
        if bounds is None or term is None or term.when is None or term.fallback is None:
            return bounds
        lowest, highest = bounds
        return min(lowest, term.fallback), max(highest, term.fallback)


# What a user may set. `read_settings` fills the other fields in.
FILLED_IN = ("bounds", "rewards_as_written")
SETTING_KEYS = [each.name for each in fields(GdpoSettings) if each.name not in FILLED_IN]

_PAPER = asdict(Options())
# The results agree to 1e-5 if every group has at least two samples and the batch has variance. We
# do not copy what the others do in special cases: NaN or 0 for a missing reward (TRL leaves it out
# as we do), rounding errors instead of 0 for a constant reward, the raw reward for a group of one.
DIALECTS: Mapping[str, Mapping[str, Any]] = {
    "paper": _PAPER,
    # TRL 1.16 GRPOTrainer, multi_objective_aggregation="normalize_then_sum"
    "trl": _PAPER,
    # NeMo-RL GDPOAdvantageEstimator, use_leave_one_out_baseline=False; no eps in the batch step
    "nemo_rl": _PAPER | {"eps": 1e-6, "batch_eps": 0.0},
    # verl 0.9 compute_gdpo_outcome_advantage; its whitening divides by sqrt(variance + 1e-8)
    "verl_builtin": _PAPER
    | {"batch_norm": "token", "eps": VERL_EPS, "batch_eps": 0.0, "batch_var_eps": 1e-8},
}
