"""Alternatives to the weighted sum in step 2.

Pass one of them to `compute_gdpo_advantage` as `combine`, with its parameters filled in:
`combine=functools.partial(rvpo, k=1.0)`. Here the rewards of each sample are in conflict:

>>> from functools import partial
>>> from verl_gdpo.algorithm.equation import compute_gdpo_scalars
>>> rewards_BK = [[1, 0], [2, 5], [3, 1]]  # z is -1 0 1 and about -0.76 1.13 -0.38
>>> compute_gdpo_scalars(rewards_BK, ["p"] * 3, combine=partial(gd2po, tau=1.0)).S_B
tensor([-1.7558,  1.1339,  0.0000], dtype=torch.float64)

Each function here, and each function of your own, gets

    z_BK           step 1; exactly 0 where a reward is missing or constant in its group
    rewards_BK     raw values, 0 where missing
    group_index_B  number of the sample's group, from 0
    weights_K      the user's weights
    present_BK     False where a reward is missing, and on rows that are padding
    valid_B        False on padding

and returns S_B. What a function here does not use has a name with an underscore before it. The
index is int64, the masks are bool, everything else is float64. Missing and constant rewards count
with z = 0. A reward of weight 0 changes nothing.

Step 3 subtracts the batch mean of S. With `rvpo`, `gd2po` and asymmetric `dara`, S does not sum to
0 in each group, so step 3 moves groups without signal away from 0. Use batch_norm="none" to avoid
this.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from verl_gdpo.algorithm.zero import group_sum, with_slack

Bounds = tuple[float, float]
# It takes (z_BK, rewards_BK, group_index_B, weights_K, present_BK, valid_B) and returns S_B.
Combine = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
DaraMode = Literal["symmetric", "asymmetric"]


def rvpo(
    z_BK: Tensor,
    _rewards_BK: Tensor,
    _group_index_B: Tensor,
    weights_K: Tensor,
    *_masks: Tensor,
    k: float,
) -> Tensor:
    """S = -(1/k) ln( sum_j p_j exp(-k z_j) ), p_j = w_j / sum w: a soft minimum over the rewards.

    For k -> 0, S is the mean, so the result is GDPO up to one scale. For k -> inf, S is the
    minimum. Source: "RVPO", arXiv 2605.05750. All weights are 1 there.

    Raises:
        ValueError: k is 0 or negative, or a weight is negative.
    """
    _check_number("rvpo k", k, "above 0", low=math.ulp(0.0))
    _check_weights("rvpo", weights_K)
    used_K = weights_K > 0
    if not used_K.any():
        return torch.zeros_like(z_BK[:, 0])
    # U are the rewards that are used, so that no share is 0 and has a logarithm of -inf.
    z_BU = z_BK[:, used_K]
    share_U = weights_K[used_K] / weights_K.sum()
    low_B = z_BU.amin(dim=1)
    # The lowest z is taken out, so that no exponent is above 0 and nothing overflows.
    exponent_BU = -k * (z_BU - low_B[:, None])
    # For small k the mean of exp is nearly 1, and log(mean) would lose the digits that log1p of
    # the mean minus 1 keeps. For large k it may be nearly 0, where logsumexp keeps them.
    mean_minus_1_B = (share_U * torch.expm1(exponent_BU)).sum(dim=1)
    log_mean_B = torch.where(
        mean_minus_1_B > -0.5,
        torch.log1p(mean_minus_1_B),
        torch.logsumexp(exponent_BU + share_U.log(), dim=1),
    )
    return low_B - log_mean_B / k


def dara(
    z_BK: Tensor,
    _rewards_BK: Tensor,
    group_index_B: Tensor,
    weights_K: Tensor,
    *_masks: Tensor,
    mode: DaraMode = "symmetric",
    maximum: float = 5.0,
) -> Tensor:
    """Give more weight to rewards that vary in few groups: f_k = min(maximum, sqrt(max pi / pi_k)).

    pi_k is the share of groups in which reward k varies, and c_k = w_k z_k.
    "symmetric":  S = sum_k f_k c_k
    "asymmetric": S = sum_k c_k + (f_k - 1) max(c_k, 0), which raises only positive contributions.
    If all pi are equal, the result is GDPO. Source: "DARA", arXiv 2610.00574. All weights are 1
    there.

    Raises:
        ValueError: mode is unknown, or maximum is below 1.
    """
    if mode not in get_args(DaraMode):
        raise ValueError(f"dara mode: expected one of {list(get_args(DaraMode))}, got {mode!r}")
    _check_number("dara maximum", maximum, "at least 1", low=1.0)
    samples_that_differ_GK = group_sum((z_BK != 0).to(z_BK.dtype), group_index_B)
    # A reward of weight 0 must not set the largest share.
    varies_GK = (samples_that_differ_GK > 0) & (weights_K != 0)
    groups_K = varies_GK.sum(dim=0).to(z_BK.dtype)
    # The clamp avoids x / 0. A reward that varies nowhere has z = 0, so its factor does not matter.
    ratio_K = groups_K.max() / groups_K.clamp(min=1)
    factor_K = ratio_K.sqrt().clamp(max=maximum)
    contribution_BK = z_BK * weights_K
    if mode == "symmetric":
        return (factor_K * contribution_BK).sum(dim=1)
    raised_BK = (factor_K - 1) * contribution_BK.clamp(min=0)
    return (contribution_BK + raised_BK).sum(dim=1)


def sa_mrpo(
    z_BK: Tensor,
    rewards_BK: Tensor,
    _group_index_B: Tensor,
    weights_K: Tensor,
    present_BK: Tensor,
    _valid_B: Tensor,
    *,
    bounds_K: Sequence[Bounds | None],
    gamma: float = 0.5,
) -> Tensor:
    """Give less weight to rewards near their maximum: S = sum_k w_k (1 - s_k)^gamma z_k.

    s_k = (mean r_k - low_k) / (high_k - low_k), with the batch mean over the samples that have
    reward k. With gamma = 0, the result is GDPO. Source: "SA-MRPO", arXiv 2608.16072.

    Args:
        bounds_K: (low, high) of each raw reward. It may be None for a reward of weight 0.

    Raises:
        ValueError: gamma or a weight is below 0, a reward with a weight has no bounds, or a value
            is outside its bounds.
    """
    _check_number("sa_mrpo gamma", gamma, "at least 0")
    _check_weights("sa_mrpo", weights_K)
    if len(bounds_K) != len(weights_K):
        raise ValueError(f"sa_mrpo bounds_K: expected {len(weights_K)}, got {len(bounds_K)}")
    S_B = torch.zeros_like(z_BK[:, 0])
    for k, weight in enumerate(weights_K.tolist()):
        if weight == 0:
            # Such a reward needs no bounds.
            continue
        values = rewards_BK[present_BK[:, k], k]
        room = _room_below_the_maximum(values, bounds_K[k], f"sa_mrpo bounds_K[{k}]")
        S_B = S_B + weight * room**gamma * z_BK[:, k]
    return S_B


def _room_below_the_maximum(values: Tensor, bounds: Bounds | None, name: str) -> Tensor:
    """Return 1 - s of the values that a batch has of a reward, from 0 to 1; 0 if it has none.

    Raises:
        ValueError: there are no bounds, or a value is outside of them.
    """
    if bounds is None or not -math.inf < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"{name}: expected (low, high), got {bounds!r}")
    low, high, slack = with_slack(bounds)
    is_outside = (values < low - slack) | (values > high + slack)
    if is_outside.any():
        # The sum of the distances from both bounds is largest in size for the value furthest out.
        distance = ((values - low) + (values - high)).abs()
        worst = values[distance.argmax()].item()
        raise ValueError(f"{name}={bounds}: a reward is {worst}")
    if len(values) == 0:
        # Its z are all 0.
        return values.new_zeros(())
    # The slack lets the mean leave the bounds, and a root of a number below 0 is NaN.
    return ((high - values.mean()) / (high - low)).clamp(0, 1)


def gd2po(
    z_BK: Tensor,
    _rewards_BK: Tensor,
    _group_index_B: Tensor,
    weights_K: Tensor,
    *_masks: Tensor,
    tau: float,
) -> Tensor:
    """Return the weighted sum, set to 0 for samples on which the rewards disagree.

    With c_k = w_k z_k, a sample is in conflict if some c are positive and others negative. S is 0
    for a sample in conflict with |sum c| / sum |c| < tau. tau = 0 drops no sample, so the result is
    GDPO. tau = 1 drops every sample in conflict. Source: "GD2PO", arXiv 2606.16771. Its reweighting
    of prompts is not implemented.

    Raises:
        ValueError: tau is not in [0, 1].
    """
    _check_number("gd2po tau", tau, "at least 0 and at most 1", high=1.0)
    contribution_BK = z_BK * weights_K
    S_B = contribution_BK.sum(dim=1)
    size_B = contribution_BK.abs().sum(dim=1)
    # Without a conflict, |sum c| = sum |c|, so the sample is never dropped.
    dropped_B = S_B.abs() < tau * size_B
    return torch.where(dropped_B, 0.0, S_B)


def dvao(
    z_BK: Tensor,
    rewards_BK: Tensor,
    group_index_B: Tensor,
    weights_K: Tensor,
    present_BK: Tensor,
    _valid_B: Tensor,
) -> Tensor:
    """S = sum_k w_k (r_k - m_k) / sum_l w_l s_l, with the group's mean m and unbiased std s.

    The numerator is GRPO's, so two samples of a group that are equal in GRPO stay equal. S is 0 in
    a group in which no reward varies. With one reward, the result is GDPO with eps = 0. Source:
    "DVAO", arXiv 2605.25604.

    Raises:
        ValueError: a weight is negative, so the denominator could be 0.
    """
    _check_weights("dvao", weights_K)
    count_GK = group_sum(present_BK.to(z_BK.dtype), group_index_B)
    mean_GK = group_sum(rewards_BK * present_BK, group_index_B) / count_GK
    # z is 0 for a constant reward, where r - mean may be a rounding error.
    centred_BK = torch.where(z_BK != 0, rewards_BK - mean_GK[group_index_B], 0.0)
    square_GK = group_sum(centred_BK.square(), group_index_B)
    std_GK = (square_GK / (count_GK - 1).clamp(min=1)).sqrt()
    scale_B = (std_GK * weights_K).sum(dim=1)[group_index_B]
    numerator_B = (centred_BK * weights_K).sum(dim=1)
    return torch.where(scale_B > 0, numerator_B / scale_B, 0.0)


# A new variant is a function above and a line here.
VARIANTS: Mapping[str, Callable[..., Tensor]] = {
    "rvpo": rvpo,
    "dara": dara,
    "sa_mrpo": sa_mrpo,
    "gd2po": gd2po,
    "dvao": dvao,
}
# They need the whole batch, which dynamic sampling does not have when it judges a group.
BATCH_WIDE = ("dara", "sa_mrpo")


@dataclass(frozen=True)
class CombineSetting:
    """A variant and the parameters that the user sets; the others keep their defaults."""

    name: str
    parameters: Mapping[str, Any]

    @cached_property
    def keywords(self) -> list[str]:
        """What the variant takes."""
        parameters = inspect.signature(VARIANTS[self.name]).parameters.values()
        return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

    @property
    def needs_bounds(self) -> bool:
        return "bounds_K" in self.keywords

    def function(self, bounds_K: Sequence[Bounds | None]) -> Combine:
        """Return the `combine` for `compute_gdpo_advantage`, given the bounds of each reward."""
        if self.needs_bounds:
            return partial(VARIANTS[self.name], bounds_K=bounds_K, **self.parameters)
        return partial(VARIANTS[self.name], **self.parameters)

    def check(self, weights: Sequence[float]) -> None:
        """Raise ValueError if the variant refuses its parameters, or the lowest weights of a run.

        It is tried on one sample, all of whose rewards and z are 0.
        """
        K = len(weights)
        zero_BK = torch.zeros(1, K)
        group_index_B = torch.tensor([0])
        weights_K = torch.tensor(weights, dtype=torch.float64)
        present_BK = torch.ones(1, K, dtype=torch.bool)
        valid_B = torch.ones(1, dtype=torch.bool)
        try:
            combine = self.function([(0.0, 1.0)] * K)
            combine(zero_BK, zero_BK, group_index_B, weights_K, present_BK, valid_B)
        except (TypeError, ValueError) as error:
            taken = [key for key in self.keywords if key != "bounds_K"]
            raise ValueError(
                f"algorithm.gdpo.combine: {error}; {self.name} takes {taken}, as in "
                "{name: NAME, PARAMETER: VALUE}"
            ) from None


def checked_sum(S_B: Any, B: int) -> Tensor:
    """Return the result of a `combine` as float64, or raise ValueError if it cannot be used."""
    if not isinstance(S_B, Tensor):
        raise ValueError(f"combine: expected a tensor of shape ({B},), got {type(S_B).__name__}")
    if S_B.shape != (B,):
        raise ValueError(f"combine: expected a tensor of shape ({B},), got {tuple(S_B.shape)}")
    is_finite_B = torch.isfinite(S_B)
    if not is_finite_B.all():
        row = int((~is_finite_B).nonzero()[0])
        raise ValueError(f"combine: S is {S_B[row].item()} in row {row}; expected a finite number")
    return S_B.to(torch.float64)


def _check_number(
    name: str, value: float, expected: str, low: float = 0.0, high: float = math.inf
) -> None:
    """Raise ValueError if a parameter is no finite number from low to high.

    Args:
        expected: the words for these limits.
    """
    # A bool is an int in Python, and nobody means one as a parameter.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name}: expected a number {expected}, got {value!r}")


def _check_weights(name: str, weights_K: Tensor) -> None:
    """Raise ValueError for a weight below 0, with which a mean over the rewards has no meaning."""
    if (weights_K < 0).any():
        raise ValueError(f"{name}: expected weights of 0 or more, got {weights_K.tolist()}")
