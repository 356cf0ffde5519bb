"""The settings under `algorithm.gdpo`: their types, bounds and defaults, and a line on each.

docs/settings.md shows the lines as a table. `reward_terms.py` has those of a single reward.
verl's own `algorithm.gdpo_reward_keys` and `algorithm.gdpo_reward_weights` can be used instead of
`rewards`.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from typing import Annotated, Any, Literal

import torch
from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from verl_gdpo.algorithm.equation_inputs import VERL_EPS, BatchNorm, Combine, GroupNorm, Options
from verl_gdpo.algorithm.reward_terms import (
    STRICT,
    Condition,
    NotNegative,
    RewardName,
    RewardTerm,
    WeightedSum,
)
from verl_gdpo.algorithm.variants import VARIANTS, Bounds

WHERE = "algorithm.gdpo"
REWARDS = f"{WHERE}.rewards"
SUM = "sum"
# variants that need the whole batch, which dynamic sampling does not have when it judges a group
BATCH_WIDE = ("dara", "sa_mrpo")

_PAPER = {key: value for key, value in asdict(Options()).items() if key != "combine"}
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


@dataclass(frozen=True)
class CombineSetting:
    """A variant and the parameters that the user sets; the others keep their defaults."""

    name: str
    parameters: Mapping[str, Any]

    @functools.cached_property
    def keywords(self) -> list[str]:
        """What the variant takes."""
        parameters = inspect.signature(VARIANTS[self.name]).parameters.values()
        return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

    @property
    def needs_bounds(self) -> bool:
        return "bounds_K" in self.keywords

    @property
    def is_batch_wide(self) -> bool:
        return self.name in BATCH_WIDE

    def function(self, bounds_K: Sequence[Bounds | None]) -> Combine:
        """Return the `combine` for `compute_gdpo_advantage`, given the bounds of each reward."""
        bounds = {"bounds_K": bounds_K} if self.needs_bounds else {}
        return functools.partial(VARIANTS[self.name], **bounds, **self.parameters)

    def check(self, weights: Sequence[float]) -> None:
        """Raise ValueError if the variant refuses its parameters, or the lowest weights of a run.

        It is tried on one sample.
        """
        zero_BK, there_BK = torch.zeros(1, len(weights)), torch.ones(1, len(weights)) > 0
        weights_K = torch.tensor(weights, dtype=torch.float64)
        sample = zero_BK, zero_BK, torch.tensor([0]), weights_K, there_BK, there_BK[:, 0]
        try:
            self.function([(0.0, 1.0)] * len(weights))(*sample)
        except (TypeError, ValueError) as error:
            taken = [key for key in self.keywords if key != "bounds_K"]
            raise ValueError(
                f"{WHERE}.combine: {error}; {self.name} takes {taken}, as in "
                "{name: NAME, PARAMETER: VALUE}"
            ) from None


def _read_combine(value: Any) -> Any:
    if value is None or isinstance(value, CombineSetting):
        return value
    block = dict(value) if isinstance(value, Mapping) else {"name": value}
    name, known = block.pop("name", None), [SUM, *VARIANTS]
    if name not in known or (name == SUM and block):
        raise ValueError(
            f"expected one of {known}, or {{name: ..., parameter: value}}{hint(name, known)}"
        )
    return None if name == SUM else CombineSetting(name, block)


def _read_terms(rewards: Any) -> Any:
    """Let a mere weight stand for a reward, and leave out those that are null."""
    if not isinstance(rewards, Mapping):
        raise ValueError("expected {name: weight} or null")
    for name, term in rewards.items():
        if isinstance(term, Mapping) and "otherwise" in term and term.get("when") is None:
            raise ValueError(f"{name}.otherwise needs {name}.when")
    return {
        str(name): term if isinstance(term, Mapping | RewardTerm) else {"weight": term}
        for name, term in rewards.items()
        if term is not None
    }


@dataclass(frozen=True, config=STRICT)
class GdpoSettings:
    """The settings of one run. `rewards` None means every reward that the scorer returns."""

    rewards: Annotated[dict[RewardName, RewardTerm], BeforeValidator(_read_terms)] | None = None
    """`{name: weight}`, or more for each; `null`: every reward that is returned, with weight 1"""
    group_norm: GroupNorm = "per_reward"
    """normalise `per_reward` within each group, or their weighted sum (`summed`), as GRPO does"""
    batch_norm: BatchNorm = "sample"
    """normalise over a step's samples with a reward, their tokens (`token`), or not (`none`)"""
    eps: NotNegative = Options.eps
    """is added to both standard deviations; the default is that of the authors' TRL code"""
    normalize_by_std: Annotated[bool, Field(strict=True)] = True
    """`false`: groups are only centred; `null`: verl's `algorithm.norm_adv_by_std_in_grpo`"""
    batch_eps: NotNegative | None = None
    """is added to the standard deviation of the batch, in place of `eps`"""
    batch_var_eps: NotNegative = 0.0
    """is added to the variance of the batch, before the square root"""
    combine: Annotated[CombineSetting | None, BeforeValidator(_read_combine)] = None
    """makes one number of the normalised rewards in another way; see [variants.md](variants.md)"""
    dialect: Literal["paper", "trl", "nemo_rl", "verl_builtin"] | None = field(
        default=None, compare=False
    )
    """the options of another implementation; see [variants.md](variants.md#dialects)"""

    # {reward: (lowest, highest)}, also those that scorers declare
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    # `rewards` as the user has written it, with the rewards that are left out
    said: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_algorithm(
        cls, algorithm: Any, declared: Mapping[str, Bounds | None] | None = None
    ) -> "GdpoSettings":
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
        given = {k: v for k, v in block.items() if v is not None or k not in _MAY_BE_NULL}
        said = given.pop("rewards", None)
        where, rewards = _rewards_of(algorithm, said)
        known = DIALECTS.get(str(block.get("dialect")), _PAPER)
        values = {**known, "normalize_by_std": inherited, **given, "rewards": rewards}
        try:
            settings = cls(**values)
        except ValidationError as error:
            mistakes = error.errors(include_url=False)
            raise ValueError("; ".join(_explained(each, where) for each in mistakes)) from None
        _check_together(settings, where, given, inherited)
        own = {name: term.bounds for name, term in settings.terms.items() if term.bounds}
        return replace(
            settings,
            batch_eps=None if settings.batch_eps == settings.eps else settings.batch_eps,
            bounds={name: pair for name, pair in {**(declared or {}), **own}.items() if pair},
            said={str(name): each for name, each in (said or {}).items()},
        )

    @functools.cached_property
    def terms(self) -> WeightedSum:
        """The configured rewards; empty if none are."""
        return WeightedSum(self.rewards or {})

    @property
    def names(self) -> list[str]:
        """Configured rewards and those that conditions read; empty if `rewards` is None."""
        return self.terms.names

    def terms_for(self, returned: Iterable[str], said: str = "the scorer returned") -> WeightedSum:
        """Return the weighted sum over rewards that are there.

        Args:
            returned: the names that a scorer returned.
            said: who returned them, for messages.

        Raises:
            ValueError: a configured reward is not among the names, or there are no names.
        """
        available = [name for name in returned if name != "score"]
        if self.rewards is None and not available:
            raise ValueError(f"{said} no named reward (`score` is for their sum)")
        for name in self.names:
            if name not in available:
                raise ValueError(
                    f"reward {name!r} is configured, but {said} {available}{hint(name, available)}"
                )
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
        self.check_bounds(name for name, weight in weights.items() if weight != 0)
        return self.combine.function([self.range_of(name) for name in weights])

    def check_bounds(self, names: Iterable[str]) -> None:
        """Raise ValueError if `combine` needs the bounds of one of the rewards."""
        for name in names:
            if self.combine is not None and self.combine.needs_bounds and name not in self.bounds:
                raise ValueError(
                    f"{WHERE}.combine={self.combine.name} needs the bounds of reward {name!r}, and "
                    f"nothing declares them. Set {WHERE}.rewards.{name}="
                    "{weight: WEIGHT, bounds: [LOWEST, HIGHEST]}"
                )

    def range_of(self, name: str) -> Bounds | None:
        """Return the bounds of a reward after its condition, which may set the reward to 0."""
        bounds, term = self.bounds.get(name), self.terms.get(name)
        if bounds and term and term.when is not None and term.otherwise == "zero":
            return min(bounds[0], 0.0), max(bounds[1], 0.0)
        return bounds


SETTING_KEYS = [each.name for each in fields(GdpoSettings) if each.name not in ("bounds", "said")]
_MAY_BE_NULL = ("rewards", "normalize_by_std", "batch_eps", "dialect")


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


def _check_together(
    settings: GdpoSettings, where: str, given: Mapping[str, Any], inherited: bool
) -> None:
    """Raise ValueError for settings that are right each by itself, and not together."""
    terms, combine = settings.terms, settings.combine
    if settings.rewards is not None and not any(term.is_used for term in terms.values()):
        what = "all weights are 0, so nothing would be trained" if terms else "got none"
        raise ValueError(f"{where}: expected at least one reward with a weight; {what}")
    for name, term in terms.items():
        if term.when is not None and term.when.reward == name:
            raise ValueError(f"{where}.{name}.when.reward: expected another reward than {name!r}")
    if settings.normalize_by_std != inherited:
        raise ValueError(
            f"{WHERE}.normalize_by_std={settings.normalize_by_std} contradicts "
            f"algorithm.norm_adv_by_std_in_grpo={inherited}; set the latter alone"
        )
    for key, value in DIALECTS[settings.dialect].items() if settings.dialect else ():
        if (got := getattr(settings, key)) != value:
            # a key that is not given can only differ through verl's own setting
            set_key = f"gdpo.{key}" if key in given else "norm_adv_by_std_in_grpo"
            raise ValueError(
                f"algorithm.{set_key}={got} contradicts {WHERE}.dialect={settings.dialect}, which "
                f"stands for {key}={'null' if value is None else value}; leave one of them out"
            )
    if combine is None:
        return
    if settings.dialect:
        raise ValueError(
            f"{WHERE}.combine={combine.name} contradicts {WHERE}.dialect={settings.dialect}, which "
            "adds the rewards up; leave one of them out"
        )
    if settings.group_norm == "summed":
        raise ValueError(
            f"{WHERE}.combine={combine.name} with group_norm=summed: the rewards are already added "
            "before they are normalised. Set group_norm=per_reward or combine=sum"
        )
    if combine.name == "dvao" and not settings.normalize_by_std:
        raise ValueError(
            f"{WHERE}.combine=dvao divides by standard deviations of its own, so "
            "algorithm.norm_adv_by_std_in_grpo=False would do nothing; set it to True"
        )
    combine.check([min(term.weights.values()) for term in terms.values()] or [1.0])


def plain(value: Any) -> Any:
    """Return OmegaConf containers as plain dicts and lists, and other values unchanged."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def hint(name: object, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower)
    return f"; did you mean {lower[close[0]]!r}?" if close else f"; known: {list(known)}"


def _explained(mistake: Any, where_rewards: str) -> str:
    """Say of a mistake that pydantic found where it is, what is expected, and what was given."""
    kind, loc, got = mistake["type"], mistake["loc"], mistake["input"]
    keys = [key for i, key in enumerate(loc) if i < 2 or key not in ("number", "schedule")]
    if "[key]" in loc:  # the name is wrong, and not its weight
        where_rewards = where_rewards.replace("gdpo_reward_weights", "gdpo_reward_keys")
    keys = [WHERE, *keys] if keys[0] != "rewards" else [where_rewards, *keys[1:]]
    where = ".".join(str(key) for key in keys if key != "[key]")
    if kind == "unexpected_keyword_argument":
        owner: Any = Condition if "when" in keys[2:-1] else RewardTerm
        return f"{where}: unknown setting{hint(keys[-1], [*owner.__pydantic_fields__])}"
    if kind == "literal_error":
        allowed = [word.strip("'") for word in re.split(", | or ", mistake["ctx"]["expected"])]
        return f"{where}: expected one of {allowed}, got {got!r}{hint(got, allowed)}"
    if kind == "value_error":
        return f"{where}: got {got!r}; {mistake['ctx']['error']}"
    expected = str(mistake["msg"])
    for words, ours in _IN_OUR_WORDS.items():
        expected = expected.replace(words, ours)
    return f"{where}: {expected}, got {got!r}"


_IN_OUR_WORDS = {
    "Input should be": "expected",
    "Field required": "expected {reward: NAME, at_least: NUMBER}",
    "a dictionary or an instance of Condition": "{reward: NAME, at_least: NUMBER}",
    "a valid tuple": "[lowest, highest]",
    "Tuple should have at most 2 items after validation, not 3": "expected [lowest, highest]",
    "Dictionary should have at least 1 item after validation, not 0": "expected {step: weight}",
    "valid number": "finite number",
    "valid integer": "whole number, a training step",
    "a valid boolean": "true, false or null",
    "greater than or equal to": "at least",
}
