"""The arms of a replay: estimators with settings, and the advantages that they give to one step.

In this module, `algorithm` is verl's block of that name as a plain dict. Shape suffix: B rows of
the step's dump, with padding.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.advantage.equation import VERL_EPS
from verl_gdpo.advantage.variants import Bounds
from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.rows import RewardRows
from verl_gdpo.batch.within_groups import Bools, Floats, Ints
from verl_gdpo.run.dump_reader import reward_rows
from verl_gdpo.run.folder import load_config
from verl_gdpo.settings.algorithm import SETTING_KEYS, GdpoSettings, scorers_bounds
from verl_gdpo.settings.reward_terms import hint
from verl_gdpo.tools import RECIPES

ARMS: Mapping[str, Mapping[str, Any]] = {  # the `algorithm` block of recipes/estimator/NAME.yaml
    path.stem: OmegaConf.to_container(OmegaConf.load(path).algorithm)  # type: ignore[misc]
    for path in sorted((RECIPES / "estimator").glob("*.yaml"))
}
# an arm changes how rewards are normalised; these keys keep their values from the run
KEPT_BY_ARMS = ("gdpo_reward_keys", "gdpo_reward_weights")
KEPT_BY_ARMS_IN_GDPO = ("rewards", "eps")
# the keys that replay's grpo reads; its gdpo also reads everything in `algorithm.gdpo`
READ = ("adv_estimator", "norm_adv_by_std_in_grpo", *KEPT_BY_ARMS)
READ_BY_GRPO = (*(f"algorithm.{key}" for key in READ), "algorithm.gdpo.rewards")
READ_BY_GDPO = (*READ_BY_GRPO, *(f"algorithm.gdpo.{key}" for key in SETTING_KEYS))


@dataclass(frozen=True)
class Arm:
    """One way to compute advantages."""

    name: str
    algorithm: Mapping[str, Any]
    settings: GdpoSettings
    declared: Mapping[str, Bounds]  # bounds from scorers; bounds in `algorithm` replace them

    @classmethod
    def of(cls, name: str, algorithm: Mapping[str, Any], declared: Mapping[str, Bounds]) -> "Arm":
        """Return the arm; raise ValueError for settings that `GdpoSettings` refuses."""
        settings = GdpoSettings.from_algorithm(algorithm)
        settings = replace(settings, bounds={**declared, **settings.bounds})
        return cls(name, algorithm, settings, declared)

    @property
    def estimator(self) -> str:
        return str(self.algorithm.get("adv_estimator", "gdpo"))

    @property
    def is_known(self) -> bool:
        return self.estimator in ("gdpo", "grpo")

    def __str__(self) -> str:
        """Return the settings that replay reads, in the syntax of overrides."""
        shown = {key: self.algorithm.get(key) for key in (*READ, "gdpo")}
        return " ".join(f"{key}={v}" for key, v in shown.items() if v is not None and v != {})


def read_run(
    path: Path, sources: Iterable[str] | None = None
) -> tuple[dict[str, Any], dict[str, Bounds]]:
    """Return the `algorithm` block of a configuration file, and the bounds from its scorers.

    Raises:
        ValueError: there is no such block, or it cannot be resolved.
    """
    config = load_config(path)
    block = config.algorithm
    try:
        declared = scorers_bounds(config, sources)[0] if "reward" in config else {}
        return dict(OmegaConf.to_container(block, resolve=True)), declared  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from None


def with_arm(algorithm: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the block of the arm `name`, with rewards, weights, conditions and eps kept."""
    if name not in ARMS:
        raise ValueError(f"--arm {name}: unknown{hint(name, [*ARMS])}")
    block, arm = algorithm.get("gdpo") or {}, ARMS[name]
    kept = {key: algorithm[key] for key in KEPT_BY_ARMS if key in algorithm}
    kept_in_gdpo = {key: block[key] for key in KEPT_BY_ARMS_IN_GDPO if key in block}
    return {**kept, **arm, "gdpo": {**kept_in_gdpo, **arm.get("gdpo", {})}}


def names_no_reward(algorithm: Mapping[str, Any]) -> bool:
    """Whether every reward that the scorer returns is used."""
    named = (algorithm.get("gdpo") or {}).get("rewards")
    return named is None and algorithm.get("gdpo_reward_keys") is None


def is_of_one_reward(key: str) -> bool:
    """Whether an override such as `algorithm.gdpo.rewards.format=0.2` has this key."""
    return key.startswith("algorithm.gdpo.rewards.")


def with_overrides(
    algorithm: Mapping[str, Any],
    overrides: Sequence[str],
    returned: Callable[[], Iterable[str]] = tuple,
) -> dict[str, Any]:
    """Return `algorithm` with `key=value` overrides applied as in the training command.

    There is one difference: an override of one reward, where none is named, changes this one among
    all that the run trained on. In a training command it would name the only one.

    Args:
        returned: gives the names of the rewards that the run trained on.

    Raises:
        ValueError: an override cannot be parsed, or the estimator does not read its key.
    """
    config = OmegaConf.create({"algorithm": dict(algorithm)})
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if names_no_reward(algorithm) and any(is_of_one_reward(o.key_or_group) for o in parsed):
            every = dict.fromkeys(returned(), 1.0)
            OmegaConf.update(config, "algorithm.gdpo.rewards", every, force_add=True)
        for override in parsed:
            if override.is_delete() or override.is_sweep_override():
                raise ValueError(
                    f"{override.input_line}: expected one value; weight 0 leaves a reward out"
                )
            key, value = override.key_or_group, override.value()
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        changed = dict(OmegaConf.to_container(config, resolve=True)["algorithm"])  # type: ignore
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {error}") from None
    is_grpo = changed.get("adv_estimator") == "grpo"
    for override in parsed:
        key, read = override.key_or_group, READ_BY_GRPO if is_grpo else READ_BY_GDPO
        if not f"{key}.".startswith(tuple(f"{known}." for known in read)):
            who = "verl's grpo" if is_grpo else "gdpo"
            raise ValueError(f"{override.input_line}: {who} does not read it{hint(key, read)}")
    return changed


@dataclass(frozen=True)
class Step:
    """The data of one step that every arm needs."""

    number: int
    rewards: RewardRows
    group_ids: npt.NDArray[Any]
    tokens_B: Ints | None  # number of trained tokens; None in a dump of verl itself
    logged_B: Floats | None  # None in a dump of verl itself
    score_B: Floats  # the sum that verl trained on; only read without `logged_B`

    @classmethod
    def of(cls, number: int, rows: Sequence[Mapping[str, Any]]) -> "Step":
        """Return the step.

        Raises:
            ValueError: an advantage, or the score of a dump without them, is no finite number.
        """
        has_advantages = any(row["advantage"] is not None for row in rows)
        has_tokens = all(row["trained_tokens"] is not None for row in rows)
        return cls(
            number=number,
            rewards=reward_rows(rows, number),
            group_ids=np.array([row["group"] for row in rows]),
            tokens_B=np.array([row["trained_tokens"] for row in rows], dtype=np.int64)
            if has_tokens
            else None,
            logged_B=_finite(rows, "advantage") if has_advantages else None,
            score_B=np.zeros(len(rows)) if has_advantages else _finite(rows, "score"),
        )

    @property
    def trained_B(self) -> Bools:
        """The rows that have an advantage; of a dump of verl itself, all that are not padding."""
        has_tokens_B = True if self.tokens_B is None else self.tokens_B > 0
        result: Bools = has_tokens_B & ~self.rewards.is_padding_B
        return result

    def of_score(self, normalize_by_std: bool) -> Floats:
        """Return the advantages of verl's grpo on the score of the dump."""
        return self._of_sessions(self._grpo(self.score_B, normalize_by_std))

    def advantages(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return each row's advantage as a dump holds it: 0 for padding and without trained tokens.

        Raises:
            ValueError: the arm's estimator is neither gdpo nor grpo.
        """
        counted_B = self.rewards.counted_B
        if arm.estimator == "gdpo":
            if self.tokens_B is None and arm.settings.batch_norm == "token":
                raise ValueError(
                    f"{arm.name} normalises over tokens (batch_norm=token), and verl's own dump "
                    "does not say how many a rollout has; train with verl-gdpo to have them"
                )
            tokens_B = None if self.tokens_B is None else torch.from_numpy(self.tokens_B)
            scalars = scalars_of(rewards, counted_B, self.group_ids, arm.settings, tokens_B)
            A_B = scalars.A_B.numpy()
        elif arm.estimator == "grpo":
            scores_B = rewards.values_BK @ np.array(list(rewards.weights.values()))
            A_B = self._grpo(scores_B, arm.settings.normalize_by_std)
        else:
            raise ValueError(f"adv_estimator={arm.estimator}: replay only computes gdpo and grpo")
        return self._of_sessions(A_B)

    def _grpo(self, scores_B: Floats, normalize_by_std: bool) -> Floats:
        counted_B = self.rewards.counted_B
        A_B = np.zeros(len(scores_B))
        group_B = group_numbers(self.group_ids[counted_B])
        A_B[counted_B] = verl_grpo(scores_B[counted_B], group_B, normalize_by_std)
        return A_B

    def _of_sessions(self, A_B: Floats) -> Floats:
        """The advantage of a session in each of its rows."""
        result: Floats = np.where(self.trained_B, A_B[self.rewards.session_B], 0.0)
        return result


def _finite(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """A column of a dump."""
    values_B = np.array([row[key] for row in rows], dtype=np.float64)
    for row in np.flatnonzero(~np.isfinite(values_B)).tolist():
        what = "logged advantage" if key == "advantage" else key
        raise ValueError(
            f"{rows[row]['uid']}: the {what} is {rows[row][key]}; expected a finite number"
        )
    return values_B


def verl_grpo(scores_B: Floats, group_B: Ints, normalize_by_std: bool) -> Floats:
    """Return A_B of verl's own `grpo`, with the same float32 operations.

    So we get the numbers that verl trains with. A constant score that float32 cannot hold can leave
    a residue of about 0.1, and the sample of a group of one keeps its score. One difference
    remains: a dump does not keep the order of a group's rows, which can change the last bit of its
    mean.

    Args:
        group_B: the group of each row, numbered 0, 1, ...

    Source: `compute_grpo_outcome_advantage` of verl 0.9.
    """
    order = np.argsort(group_B, kind="stable")
    size_G = torch.from_numpy(np.bincount(group_B))
    scores = torch.from_numpy(scores_B[order].astype(np.float32))
    groups = torch.split(scores, size_G.tolist())
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    mean_G = torch.stack([torch.mean(group) if len(group) > 1 else zero for group in groups])
    std_G = torch.stack([torch.std(group) if len(group) > 1 else one for group in groups])
    result = scores - mean_G.repeat_interleave(size_G)
    if normalize_by_std:
        result = result / (std_G + VERL_EPS).repeat_interleave(size_G)
    A_B = np.empty(len(scores_B))
    A_B[order] = result.numpy()
    return A_B


def group_numbers(group_ids: npt.NDArray[Any]) -> Ints:
    """Return the group number of each row, (B,) int64."""
    index: Ints = np.unique(group_ids, return_inverse=True)[1].astype(np.int64)
    return index
