"""What a run's rollouts would have been trained on with other weights, or with one reward alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.batch.rows import RewardError
from verl_gdpo.run.dump_reader import LAST_DUMPS, read_dump, reward_rows
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools.report.runs import Run, RunsOfArm
from verl_gdpo.tools.report.sections import Section, Table, decimal, listed, of_each_arm

Floats = npt.NDArray[np.float64]

FACTORS = (0.5, 1.0, 2.0)  # of the weight of one reward


@dataclass(frozen=True)
class WhatIf:
    """One reward of a run: means over its last dumps; NaN where a step does not define them."""

    weight: float
    share: Sequence[float]  # of the advantage, for each of `FACTORS`
    same: Sequence[float]  # correlation with the advantages under the run's weights, for each
    length: float  # correlation with the length, of the advantages that it would give alone


Found = Mapping[str, Mapping[str, WhatIf] | str]  # by arm; a text says why there is nothing


def what_if_of_arms(arms: Sequence[RunsOfArm]) -> Found:
    """Of each arm's first run."""
    found: dict[str, Mapping[str, WhatIf] | str] = {}
    for arm in arms:
        try:
            found[arm.name] = what_if(arm.runs[0])
        except (ValueError, RewardError) as error:
            found[arm.name] = str(error)
    return found


def what_if(run: Run) -> dict[str, WhatIf]:
    """{reward: what its weight does}, of the rewards with a weight.

    Raises:
        ValueError: no dump, or an estimator that cannot be recomputed.
    """
    settings = _settings(run)
    steps = [
        _of_step(rows, int(file.stem), settings)
        for file in run.dumps()[-LAST_DUMPS:]
        for rows in [read_dump(file, run.scorer, with_texts=False)]
    ]
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _mean([step[name] for step in steps if name in step]) for name in names}


def _settings(run: Run) -> GdpoSettings:
    if run.config is None:
        return GdpoSettings()
    algorithm = run.config.algorithm
    settings = GdpoSettings.from_algorithm(algorithm)
    settings = replace(settings, bounds={**run.bounds, **settings.bounds})
    found = settings_of_advantage(str(algorithm.adv_estimator), settings)
    if found is None:
        raise ValueError(
            f"{run.folder}: advantages of algorithm.adv_estimator={algorithm.adv_estimator} "
            "cannot be recomputed; expected gdpo or grpo"
        )
    return found


def _of_step(
    dump: Sequence[Mapping[str, Any]], number: int, settings: GdpoSettings
) -> dict[str, WhatIf]:
    rows = reward_rows(dump, number)
    rewards = RewardMatrix.of(rows, settings)
    ids = [row["group"] for row in dump]
    length = "trained_tokens" if settings.batch_norm == "token" else "response_tokens"
    # verl's own dumps have no lengths; nothing correlates with equal ones
    length_B = np.array([row[length] or 0 for row in dump], dtype=np.int64)

    def metric(weights: Mapping[str, float], key: str) -> float:
        changed = replace(rewards, weights=weights)
        metrics = batch_metrics(changed, rows.counted_B, ids, length_B, settings, {})
        return metrics.get(f"gdpo/{key}", math.nan)

    def advantages(weights: Mapping[str, float]) -> Floats:
        changed, tokens_B = replace(rewards, weights=weights), torch.from_numpy(length_B)
        A_B = scalars_of(changed, rows.counted_B, ids, settings, tokens_B).A_B.numpy()
        result: Floats = A_B[rows.counted_B]
        return result

    own_B, found = advantages(rewards.weights), {}
    for name, weight in rewards.weights.items():
        if weight:
            changed = [{**rewards.weights, name: factor * weight} for factor in FACTORS]
            alone = {other: math.copysign(other == name, weight) for other in rewards.weights}
            found[name] = WhatIf(
                weight,
                [metric(weights, f"{name}/share") for weights in changed],
                [_correlation(advantages(weights), own_B) for weights in changed],
                metric(alone, "length_correlation"),
            )
    return found


def _correlation(A_B: Floats, own_B: Floats) -> float:
    return float(np.corrcoef(A_B, own_B)[0, 1]) if A_B.std() and own_B.std() else math.nan


def _mean(steps: Sequence[WhatIf]) -> WhatIf:
    """Over the steps that define a number; the weight is that of the last step."""

    def mean(values: Sequence[float]) -> float:
        there = [value for value in values if math.isfinite(value)]
        return sum(there) / len(there) if there else math.nan

    return WhatIf(
        steps[-1].weight,
        [mean(of_factor) for of_factor in zip(*(step.share for step in steps), strict=True)],
        [mean(of_factor) for of_factor in zip(*(step.same for step in steps), strict=True)],
        mean([step.length for step in steps]),
    )


def weights(arms: Sequence[RunsOfArm], found: Found) -> Section:
    """What half and double the weight of each reward would do to its influence."""
    half, _, double = range(len(FACTORS))
    rows = [
        (
            arm.name,
            name,
            f"{one.weight:g}",
            *map(_number, one.share),
            *map(_number, (one.same[half], one.same[double])),
        )
        for arm in arms
        for name, one in _of(found, arm).items()
    ]
    of_share = ("share at half", "now", "at double")
    header = ("arm", "reward", "weight", *of_share, "advantages at half", "at double")
    caption = (
        "The share of the advantage that each reward has at half, once and twice its weight; and "
        "the correlation of the advantages then with those of the run"
    )
    return Section(
        "weights",
        "Would other weights help?",
        f"The rollouts of the last {LAST_DUMPS} dumped steps, of the first run of an arm, with one "
        "weight changed. A weight moves the update where rewards disagree, and can do "
        "nothing for a reward that differs in no group. Whether the policy then gets better, only "
        "a run can tell; `verl-gdpo replay RUN algorithm.gdpo.rewards.NAME=WEIGHT` shows the "
        "groups that change.",
        [],
        [f"{name}: {text}" for name, text in found.items() if isinstance(text, str)],
        tables=[Table(caption, header, rows, labels=2)] if rows else [],
        answer=of_each_arm(
            arms, lambda arm: _weights_in_words(_of(found, arm)), "not known without rollout dumps"
        ),
    )


def lengths(arms: Sequence[RunsOfArm], found: Found) -> Table | None:
    """The reward that the length comes from; None without dumps."""
    rewards = dict.fromkeys(name for arm in arms for name in _of(found, arm))
    rows = []
    for name in rewards:
        of_arms = (_of(found, arm).get(name) for arm in arms)
        rows.append((name, *("-" if one is None else _number(one.length) for one in of_arms)))
    caption = (
        "Correlation, within groups, of the length with the advantages that a reward would give "
        f"alone, over the last {LAST_DUMPS} dumped steps"
    )
    return Table(caption, ("reward", *(arm.name for arm in arms)), rows, 1) if rows else None


def most_of_length(arm: RunsOfArm, found: Found) -> list[str]:
    """The reward alone whose advantages have the largest correlation with the length."""
    of_rewards = {n: one.length for n, one in _of(found, arm).items() if math.isfinite(one.length)}
    name = max(of_rewards, key=lambda name: abs(of_rewards[name]), default=None)
    return [] if name is None else [f"of {name} alone {decimal(of_rewards[name])}"]


def _of(found: Found, arm: RunsOfArm) -> Mapping[str, WhatIf]:
    of_arm = found[arm.name]
    return {} if isinstance(of_arm, str) else of_arm


def _weights_in_words(found: Mapping[str, WhatIf]) -> str:
    """`twice the weight moves the share of format from 0.33 to 0.50`, the smallest first."""
    moved = {name: one.share for name, one in found.items() if math.isfinite(sum(one.share))}
    said = [
        f"{name} from {_number(moved[name][1])} to {_number(moved[name][2])}"
        for name in sorted(moved, key=lambda name: moved[name][1])
    ]
    return f"twice its weight moves the share of {listed(said)}" if said else ""


def _number(value: float) -> str:
    return decimal(value) if math.isfinite(value) else "-"
