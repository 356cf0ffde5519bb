"""The forms in which a caller may hand over rewards, and how they become one matrix.

A matrix, columns by name, or a dict for each sample as reward functions return it. In all of them,
None stands for a reward that does not apply. Shape suffixes: B samples, K rewards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_gdpo.algorithm.equation import as_tensor
from verl_gdpo.algorithm.matrix import rewards_among
from verl_gdpo.algorithm.rows import ABSENT
from verl_gdpo.algorithm.settings import hint
from verl_gdpo.algorithm.values import as_float, value_or_error
from verl_gdpo.algorithm.zero import is_the_sum

# A list holds numbers, None or tensors, nested as a matrix is.
Numbers = Tensor | npt.NDArray[Any] | Sequence[Any]
Rewards = Numbers | Mapping[str, Numbers] | Sequence[Mapping[str, Any]]
Weights = Numbers | Mapping[str, float]
Present = Numbers | Mapping[str, Numbers]

NUMERIC = "biuf"  # numpy's letters for the kinds of numbers that torch takes: bool to float


@dataclass(frozen=True)
class GivenRewards:
    """The rewards of a call as a matrix.

    values_BK: as they were given, 0 where a list had None; not yet checked for NaN.
    present_BK: False where a reward does not apply.
    weights: K numbers, (B, K) of them, or None.
    names: of the K rewards; None where the caller gave a matrix, which has none.
    """

    values_BK: Tensor
    present_BK: Tensor
    weights: Numbers | None
    names: Sequence[str] | None


def read_rewards(
    rewards: Rewards, weights: Weights | None, present: Present | None, B: int, device: torch.device
) -> GivenRewards:
    """Return the rewards of B samples in any of the forms as a matrix on this device.

    Raises:
        ValueError: a value is no number, a sample lacks a reward, a shape or a name is wrong, or a
            `score` is not the sum of the rewards.
    """
    samples = _dicts_of_samples(rewards)
    if samples is not None:
        columns: Mapping[str, Any] = _columns_of(samples)
    elif isinstance(rewards, Mapping):
        columns = rewards
    else:
        return _of_matrix(rewards, weights, present, device)
    names = _chosen(columns, weights)
    # From here on, the weights stand in the order of the names.
    is_chosen = isinstance(weights, Mapping)
    if isinstance(weights, Mapping):
        weights = [weights[name] for name in names]
    values: list[Tensor] = []
    there: list[Tensor] = []
    for name in names:
        value_B, there_B = _column(name, columns, B)
        values.append(value_B.to(device))
        there.append(there_B.to(device))
    # Columns of different number formats become the widest of them.
    dtype = values[0].dtype
    for value_B in values:
        dtype = torch.promote_types(dtype, value_B.dtype)
    values_BK = torch.stack([value_B.to(dtype) for value_B in values], dim=1)
    there_BK = torch.stack(there, dim=1) & _present(present, names, (B, len(names)), device)
    # Whoever names the rewards has said by it that `score` is none of them.
    if not is_chosen and "score" in columns:
        _check_score(columns["score"], values_BK, there_BK, names)
    return GivenRewards(values_BK, there_BK, weights, names)


def _of_matrix(
    rewards: Any, weights: Weights | None, present: Present | None, device: torch.device
) -> GivenRewards:
    """Return a matrix without names."""
    for argument, value in (("weights", weights), ("present", present)):
        if isinstance(value, Mapping):
            raise ValueError(
                f"{argument}: got names, {list(value)}, but the rewards are a matrix, which has "
                "none. Give the rewards by name too, as in {name: values}"
            )
    values_BK, there_BK = _numbers(rewards, "rewards_BK", lambda at: f"rewards_BK{list(at)}")
    if values_BK.ndim != 2 or 0 in values_BK.shape:
        raise ValueError(
            f"rewards_BK: expected shape (samples, rewards), got {tuple(values_BK.shape)}"
        )
    present_BK = _present(present, None, tuple(values_BK.shape), device)
    return GivenRewards(
        values_BK.to(device),
        there_BK.to(device) & present_BK,
        weights,  # type: ignore[arg-type]  # the loop above has refused a mapping
        names=None,
    )


def _dicts_of_samples(rewards: Any) -> Sequence[Any] | None:
    """Return the samples if the rewards are one dict each, or None for another form."""
    if isinstance(rewards, np.ndarray):
        # verl keeps dicts in an array of objects.
        if rewards.dtype != object or rewards.ndim != 1:
            return None
        rewards = list(rewards)
    if not isinstance(rewards, Sequence):
        return None
    if not any(isinstance(each, Mapping) for each in rewards):
        return None
    for row, each in enumerate(rewards):
        if not isinstance(each, Mapping):
            raise ValueError(
                f"rewards_BK: sample {row} is a {type(each).__name__}, and others are dicts. "
                "Return {name: value} for each sample, with None where a reward does not apply"
            )
    return rewards


def _columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {name: its value of each sample, ABSENT where a sample has none}."""
    # A dict keeps the order in which the names were first seen, which a set would not.
    names: dict[str, None] = {}
    for sample in samples:
        names.update(dict.fromkeys(sample))
    columns = {}
    for name in names:
        columns[name] = [sample.get(name, ABSENT) for sample in samples]
    return columns


def _chosen(columns: Mapping[str, Any], weights: Weights | None) -> list[str]:
    """Return the names of the rewards: those with a weight, or else all columns with numbers."""
    if isinstance(weights, Mapping):
        names = list(weights)
        for name in names:
            if name not in columns:
                raise ValueError(f"weights: there is no reward {name!r}{hint(name, list(columns))}")
    else:
        types = {}
        for name, values in columns.items():
            types[name] = _of_types(name, values)
        names = rewards_among(types)
    if not names:
        raise ValueError(
            f"rewards_BK: expected at least one reward, which is a column of numbers, got columns "
            f"of the names {list(columns)}. `score` is none: it is the sum of rewards"
        )
    return names


def _of_types(name: str, values: Any) -> Sequence[Any]:
    """Return values of a column which have all its types: one of an array of numbers, else all."""
    if not hasattr(values, "__len__"):
        raise ValueError(
            f"rewards_BK: {name!r} is a {type(values).__name__}; expected a value for each sample"
        )
    is_array = isinstance(values, np.ndarray) and values.dtype.kind != "O"
    if is_array or isinstance(values, Tensor):
        # To look at each number of a tensor on a GPU would take a transfer each.
        return list(values.reshape(-1)[:1])
    return list(values)


def _column(name: str, columns: Mapping[str, Any], B: int) -> tuple[Tensor, Tensor]:
    """Return the values of one reward, and where it applies, both (B,)."""
    values = columns[name]
    # Only a list can lack one: an array or a tensor has a number in each place.
    of_samples = []
    if isinstance(values, list):
        of_samples = values
    for row, value in enumerate(of_samples):
        if value is not ABSENT:
            continue
        others = []
        for other, column in columns.items():
            if column[row] is not ABSENT:
                others.append(other)
        raise ValueError(
            f"rewards_BK: sample {row} has no reward {name!r}, but {others}. Give the same names "
            "for each sample, None where a reward does not apply"
        )
    what = f"rewards_BK: reward {name!r}"
    value_B, there_B = _numbers(values, what, lambda at: f"{what} of sample {at[0]}")
    if value_B.shape != (B,):
        raise ValueError(
            f"{what}: expected {B} values, one for each sample, got shape {tuple(value_B.shape)}"
        )
    return value_B, there_B


def _numbers(
    values: Any, what: str, place: Callable[[tuple[int, ...]], str]
) -> tuple[Tensor, Tensor]:
    """Return numbers, in the format in which they come, and False where there was None.

    Args:
        what: the name of the values, for a message.
        place: returns the name of one of them, given its index.
    """
    if isinstance(values, np.ma.MaskedArray):
        # What is masked is no value, whatever number lies under the mask.
        is_masked = np.ma.getmaskarray(values)
        values = values.data.astype(object)
        values[is_masked] = None
    values = _without_tensors(values)
    if isinstance(values, Tensor):
        return values, torch.ones_like(values, dtype=torch.bool)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{what}: expected lists of the same length, one for each sample: {error}"
        ) from None
    if array.dtype.kind in NUMERIC:
        number_tensor = as_tensor(array)
        return number_tensor, torch.ones_like(number_tensor, dtype=torch.bool)
    # numpy may have made text of numbers that stand beside text, so this begins anew.
    objects = np.asarray(values, dtype=object)
    numbers = np.zeros(objects.shape)
    there = np.zeros(objects.shape, dtype=np.bool_)
    for index, value in np.ndenumerate(objects):
        number = value_or_error(value, f"{place(index)} ")
        if number is not None:
            numbers[index] = number
            there[index] = True
    return torch.from_numpy(numbers), torch.from_numpy(there)


def _without_tensors(values: Any) -> Any:
    """Return a list of tensors as one tensor, and other values unchanged.

    numpy takes neither tensors of a GPU nor those with a gradient.
    """
    if not isinstance(values, list | tuple):
        return values
    tensor_count = sum(isinstance(each, Tensor) for each in values)
    if tensor_count == 0:
        return values
    if tensor_count == len(values):
        return torch.stack(list(values))
    # None stands beside tensors where a reward does not apply.
    plain = []
    for each in values:
        if isinstance(each, Tensor):
            each = each.tolist()
        plain.append(each)
    return plain


def _present(
    present: Present | None,
    names: Sequence[str] | None,
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return `present` as (B, K) bools; a reward that a dict does not name applies everywhere."""
    # What nobody speaks of applies.
    there_BK = torch.ones(shape, dtype=torch.bool, device=device)
    if present is None:
        return there_BK
    if names is None or not isinstance(present, Mapping):
        given_BK = as_tensor(present)
        if given_BK.shape != shape:
            raise ValueError(f"present: expected shape {shape}, got {tuple(given_BK.shape)}")
        return given_BK.to(device, torch.bool)
    for name, values in present.items():
        if name not in names:
            raise ValueError(f"present: there is no reward {name!r}{hint(name, names)}")
        given_B = as_tensor(values)
        if given_B.shape != shape[:1]:
            raise ValueError(
                f"present: expected {shape[0]} values for {name!r}, one for each sample, got shape "
                f"{tuple(given_B.shape)}"
            )
        there_BK[:, names.index(name)] = given_B.to(device, torch.bool)
    return there_BK


def _check_score(scores: Any, values_BK: Tensor, there_BK: Tensor, names: Sequence[str]) -> None:
    """Raise ValueError if a `score` is not the sum of all rewards of its sample, as in training."""
    if isinstance(scores, Tensor | np.ndarray):
        scores = scores.tolist()
    sums = torch.where(there_BK, values_BK, 0).sum(dim=1).tolist()
    for row, (given, total) in enumerate(zip(scores, sums, strict=True)):
        score = as_float(given)
        # A sample without a `score` says nothing, and a sum of float32 is not exact.
        if score is None or is_the_sum(score, total):
            continue
        values = dict(zip(names, values_BK[row].tolist(), strict=True))
        raise ValueError(
            f"rewards_BK: sample {row} has score={score:g}, which is not the sum of {values}. "
            f"Say which of them are rewards, as in weights={dict.fromkeys(names, 1.0)}"
        )
