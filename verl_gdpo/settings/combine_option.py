"""`algorithm.gdpo.combine`: how the normalised rewards of a sample become one number.

algorithm:
  gdpo:
    combine: sum                   # the default
    combine: dara                  # a variant with the default values of its parameters
    combine: {name: rvpo, k: 1.0}  # a variant with parameters
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_gdpo.advantage.equation import Combine
from verl_gdpo.advantage.variants import VARIANTS, Bounds
from verl_gdpo.settings.reward_terms import check_keys, hint

SUM = "sum"
# variants that need the whole batch, which dynamic sampling does not have when it judges a group
BATCH_WIDE = ("dara", "sa_mrpo")


@dataclass(frozen=True)
class CombineSetting:
    """A variant and the parameters that the user sets; the others keep their defaults."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def needs_bounds(self) -> bool:
        return "bounds_K" in _keywords(self.name)

    @property
    def is_batch_wide(self) -> bool:
        return self.name in BATCH_WIDE

    def function(self, bounds_K: Sequence[Bounds | None]) -> Combine:
        """Return the `combine` for `compute_gdpo_advantage`, given the bounds of each reward."""
        bounds = {"bounds_K": bounds_K} if self.needs_bounds else {}
        return functools.partial(VARIANTS[self.name], **self.parameters, **bounds)


def read_combine(where: str, value: Any, weights: Sequence[float]) -> CombineSetting | None:
    """Return the setting of `combine` after a trial on one sample; None for the sum.

    Args:
        where: the key in the configuration, for messages.
        value: the value of that key.
        weights: the lowest weight that each reward has in the run.

    Raises:
        ValueError: names the key, its value and the allowed values.
    """
    block = value if isinstance(value, Mapping) else {"name": value}
    name, known = block.get("name"), [SUM, *VARIANTS]
    if name not in known:
        raise ValueError(
            f"{where}: expected one of {known}, or {{name: one of them, parameter: value}}, "
            f"got {value!r}{hint(name, known)}"
        )
    parameters = {key: value for key, value in block.items() if key != "name"}
    if name == SUM:
        check_keys(where, parameters, ["name"])
        return None
    keywords = {key: p for key, p in _keywords(name).items() if key != "bounds_K"}
    check_keys(where, parameters, ["name", *keywords])
    required = [key for key, p in keywords.items() if p.default is p.empty]
    absent = [key for key in required if key not in parameters]
    if absent:
        raise ValueError(
            f"{where}: {name} needs {absent}, as in {{name: {name}, {absent[0]}: ...}}"
        )
    setting = CombineSetting(name, parameters)
    zero_BK, weights_K = torch.zeros(1, len(weights)), torch.tensor(weights, dtype=torch.float64)
    group_B, present_BK = torch.tensor([0]), zero_BK == 0
    function = setting.function([(0.0, 1.0)] * len(weights))
    try:
        function(zero_BK, zero_BK, group_B, weights_K, present_BK, present_BK[:, 0])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return setting


def check_combine(combine: CombineSetting | None, group_norm: str, normalize_by_std: bool) -> None:
    """Raise ValueError if the variant makes no sense with the other settings."""
    if combine is None:
        return
    where = f"algorithm.gdpo.combine={combine.name}"
    if group_norm == "summed":
        raise ValueError(
            f"{where} with group_norm=summed: the rewards are already added before they are "
            "normalised. Set group_norm=per_reward or combine=sum"
        )
    if combine.name == "dvao" and not normalize_by_std:
        raise ValueError(
            f"{where} divides by standard deviations of its own, so "
            "algorithm.norm_adv_by_std_in_grpo=False would do nothing; set it to True"
        )


def no_bounds(name: str, combine: CombineSetting) -> str:
    """Return the error message for a reward without bounds."""
    return (
        f"algorithm.gdpo.combine={combine.name} needs the bounds of reward {name!r}, and nothing "
        "declares them. Set "
        f"algorithm.gdpo.rewards.{name}={{weight: WEIGHT, bounds: [LOWEST, HIGHEST]}}"
    )


def _keywords(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(VARIANTS[name]).parameters
    return {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
