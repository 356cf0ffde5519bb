"""The arms of a replay: estimators with settings, and the advantages that they give to one step.

In this module, `algorithm` is verl's block of that name as a plain dict. Shape suffix: B rows of
the step's dump, with padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.read_settings import line_of, read_settings
from verl_gdpo.algorithm.rows import BatchRows, columns_of
from verl_gdpo.algorithm.settings import SETTING_KEYS, VERL_EPS, GdpoSettings, hint
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import EPS32, REPRODUCED, Bools, Floats, Ints
from verl_gdpo.hooks.configuration import row_names, scorers_bounds, settings_of_run, sums_first
from verl_gdpo.scoring.function_list import algorithm_of
from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.compose import composed
from verl_gdpo.tools.run_folder.dump_reader import reward_rows
from verl_gdpo.tools.run_folder.folder import load_config


def _arms_of_recipes() -> dict[str, dict[str, Any]]:
    """Return {NAME: the `algorithm` block of recipes/estimator/NAME.yaml}."""
    arms = {}
    for path in sorted((RECIPES / "estimator").glob("*.yaml")):
        block: Any = OmegaConf.to_container(OmegaConf.load(path).algorithm)
        arms[path.stem] = block
    return arms


ARMS: Mapping[str, Mapping[str, Any]] = _arms_of_recipes()
# these take the two steps of GDPO apart, which few people ask for
NOT_SHOWN = ("gdpo_no_batch_norm", "grpo_batch_norm")
COMPUTED = ("gdpo", "grpo")  # estimators
# an arm changes how rewards are normalised; these keys of `gdpo` keep their values from the run
KEPT_BY_ARMS_IN_GDPO = ("rewards", "rubric_weights", "eps")
# the keys that replay's grpo reads; its gdpo also reads everything in `algorithm.gdpo`
BY_STD = "norm_adv_by_std_in_grpo"
READ = ("adv_estimator", BY_STD, "gdpo_reward_keys", "gdpo_reward_weights")
OF_SUM = ("rewards", "rubric_weights")
OF_A_REWARD = "algorithm.gdpo.rewards."
READ_BY_GRPO = [f"algorithm.{key}" for key in READ] + [f"algorithm.gdpo.{key}" for key in OF_SUM]
READ_BY_GDPO = READ_BY_GRPO + [f"algorithm.gdpo.{key}" for key in SETTING_KEYS]


@dataclass(frozen=True)
class Arm:
    """One way to compute advantages; raises ValueError for settings that `GdpoSettings` refuses."""

    name: str
    algorithm: Mapping[str, Any]
    declared: Mapping[str, Bounds | None]  # by scorers; bounds in `algorithm` replace them
    run: Any = None  # the whole configuration of the run, as a DictConfig
    sources: Iterable[str] | None = None  # of the run's rows
    is_recorded: bool = True  # whether the run has trained with these rewards
    dumped: Sequence[str] = ()  # the rewards of the dump, where somebody asked for them
    settings: GdpoSettings = field(init=False)

    def __post_init__(self) -> None:
        settings = read_settings(self.algorithm, self.declared)
        object.__setattr__(self, "settings", settings)

    def as_arm(self, name: str) -> "Arm":
        """Return the arm `name` of the recipes, with rewards, weights, conditions and eps kept."""
        if name not in ARMS:
            raise ValueError(f"--arm {name}: unknown{hint(name, list(ARMS))}")
        arm = ARMS[name]
        block = self.algorithm.get("gdpo") or {}
        in_gdpo = {key: block[key] for key in KEPT_BY_ARMS_IN_GDPO if key in block}
        if block.get("dialect"):
            # The dialect itself is not kept, but the eps that it stands for is.
            in_gdpo["eps"] = self.settings.eps
        in_gdpo.update(arm.get("gdpo", {}))
        algorithm = dict(self.algorithm)
        algorithm[BY_STD] = True
        algorithm.update(arm)
        algorithm["gdpo"] = in_gdpo
        return replace(self, name=name, algorithm=algorithm)

    def changed(self, name: str, overrides: Sequence[str]) -> "Arm":
        """Return the arm with overrides, which mean what they mean in the training command.

        Raises:
            ValueError: an override cannot be applied, the estimator does not read its key, or
                training would refuse the result.
        """
        config = OmegaConf.create({})
        if self.run is not None:
            config = self.run.copy()
        config.algorithm = dict(self.algorithm)
        keys = [key_of(override) for override in overrides]
        if self.settings.rewards is None:
            self._name_rewards(config, keys)
        changed = composed(config, overrides)
        algorithm: Any = OmegaConf.to_container(changed.algorithm)
        if algorithm.get("adv_estimator") == "grpo":
            who = "verl's grpo"
            read = READ_BY_GRPO
        else:
            who = "gdpo"
            read = READ_BY_GDPO
        for key, override in zip(keys, overrides, strict=True):
            # A key may stand below one that is read, such as one reward below `rewards`.
            if not any(f"{key}.".startswith(f"{known}.") for known in read):
                raise ValueError(f"{override}: {who} does not read it{hint(key, read)}")
        is_recorded = not any(f"{key}.".startswith(OF_A_REWARD) for key in keys)
        if OmegaConf.select(changed, "reward.reward_model") is not None:
            settings_of_run(changed, self.sources, is_recorded=is_recorded)
        return replace(self, name=name, algorithm=algorithm, is_recorded=is_recorded)

    def _name_rewards(self, config: Any, keys: Sequence[str]) -> None:
        """Name the rewards of a run that names none, where an override is about one of them.

        In training, to name a reward leaves out those that are not named. Here it would compare
        two changes at once.

        Args:
            keys: of the overrides.
        """
        of_rewards = [key.removeprefix(OF_A_REWARD) for key in keys if key.startswith(OF_A_REWARD)]
        if not of_rewards or not self.dumped:
            return
        rewards: dict[str, Any] = dict.fromkeys(self.dumped, 1.0)
        for key in of_rewards:
            name, dot, _ = key.partition(".")
            # One key of a reward, such as its `when`, needs the form that has keys.
            if dot and name in rewards:
                rewards[name] = {"weight": 1.0}
        OmegaConf.update(config, "algorithm.gdpo.rewards", rewards, force_add=True)

    @property
    def estimator(self) -> str:
        return str(self.algorithm.get("adv_estimator", "gdpo"))

    def __str__(self) -> str:
        """Return the settings that replay reads, in the syntax of overrides."""
        values = {f"algorithm.{key}": self.algorithm.get(key) for key in READ}
        block = self.algorithm.get("gdpo") or {}
        for key, value in block.items():
            values[f"algorithm.gdpo.{key}"] = value
        return " ".join(line_of(key, value) for key, value in values.items() if value is not None)


def shown_arms() -> list[str]:
    """Return the names of the arms that a help text lists; `as_arm` takes the others too."""
    return [name for name in ARMS if name not in NOT_SHOWN]


def key_of(override: str) -> str:
    """Return the key that an override is about.

    >>> key_of("++algorithm.gdpo.eps=0.1")
    'algorithm.gdpo.eps'
    """
    return override.partition("=")[0].strip("+~ ")


def read_run(path: Path, sources: Iterable[str] | None = None) -> Arm:
    """Return a run's own settings, given the file with its configuration.

    Raises:
        ValueError: there is no `algorithm` block, or it cannot be resolved.
    """
    config = load_config(path)
    declared: Mapping[str, Bounds | None] = {}
    try:
        if "reward" in config:
            declared = scorers_bounds(config, sources)
        algorithm: Any = OmegaConf.to_container(algorithm_of(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from None
    return Arm("run", algorithm, declared, config, sources)


@dataclass(frozen=True)
class ReplayedStep:
    """The data of one step that every arm needs."""

    number: int
    rewards: BatchRows
    group_ids: npt.NDArray[Any]
    batch_B: Ints  # the batch of each row: each has a batch norm of its own
    tokens_B: Ints | None  # number of trained tokens; None in a dump of verl itself
    logged_B: Floats | None  # None in a dump of verl itself
    score_B: Floats  # the sum that verl trained on; only read without `logged_B`

    @classmethod
    def of(cls, number: int, rows: Sequence[Mapping[str, Any]]) -> "ReplayedStep":
        """Return the step.

        Raises:
            ValueError: an advantage, or the score of a dump without them, is no finite number.
        """
        tokens_B = None
        tokens = [row["trained_tokens"] for row in rows]
        if None not in tokens:
            tokens_B = np.array(tokens, dtype=np.int64)
        logged_B = None
        score_B = np.zeros(len(rows))
        if any(row["advantage"] is not None for row in rows):
            logged_B = _finite(rows, "advantage")
        else:
            score_B = _finite(rows, "score")
        return cls(
            number=number,
            rewards=reward_rows(rows, number),
            group_ids=np.array([row["group"] for row in rows]),
            batch_B=np.array([row["batch"] for row in rows], dtype=np.int64),
            tokens_B=tokens_B,
            logged_B=logged_B,
            score_B=score_B,
        )

    @property
    def trained_B(self) -> Bools:
        """The rows that have an advantage; of a dump of verl itself, all that are not padding."""
        trained_B: Bools = ~self.rewards.is_padding_B
        if self.tokens_B is not None:
            trained_B &= self.tokens_B > 0
        return trained_B

    def matrix(self, arm: Arm, has_our_scorers: bool) -> RewardMatrix:
        """Return the rewards of an arm, named as the reward manager names them in training.

        Raises:
            ValueError: training would refuse the values of the step; see `conditions.py`.
        """
        rows = self.rewards
        if has_our_scorers and arm.settings.rewards is not None:
            infos = []
            for row, source in enumerate(self.rewards.sources):
                names = row_names(arm.settings, source)
                infos.append(names.named(self.rewards.extra_info(row)))
            rows = replace(self.rewards, columns=columns_of(infos))
        rewards = RewardMatrix.of(rows, arm.settings)
        if not arm.is_recorded and rewards.raw is not None:
            is_summed = sums_first(arm.estimator, arm.settings)
            for paid in paid_in_batch(rewards.raw, rows, arm.settings, is_summed=is_summed):
                if paid.is_default:
                    raise ValueError(f"{arm.name}: {paid.message}")
        return rewards

    def of_score(self, normalize_by_std: bool) -> Floats:
        """Return the advantages of verl's grpo on the score of the dump."""
        return self._of_sessions(self._grpo(self.score_B, normalize_by_std))

    def advantages(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return each row's advantage as a dump holds it: 0 for padding and without trained tokens.

        Raises:
            ValueError: the arm's estimator is neither gdpo nor grpo.
        """
        if arm.estimator == "gdpo":
            A_B = self._gdpo(arm, rewards)
        elif arm.estimator == "grpo":
            scores_B = rewards.values_BK @ np.array(list(rewards.weights.values()))
            A_B = self._grpo(scores_B, arm.settings.normalize_by_std)
        else:
            raise ValueError(f"adv_estimator={arm.estimator}: replay only computes gdpo and grpo")
        return self._of_sessions(A_B)

    def allowed(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return how far each row's advantage may be from the logged one, by rounding alone."""
        allowed_B = np.full(len(self.rewards), REPRODUCED)
        counted_B = self.rewards.counted_B
        if arm.estimator == "grpo":
            scores_B = rewards.values_BK[counted_B] @ np.array(list(rewards.weights.values()))
            group_B = group_numbers(self.group_ids[counted_B])
            rounding_B = rounding_of_grpo(scores_B, group_B, arm.settings.normalize_by_std)
            allowed_B[counted_B] = rounding_B.clip(min=REPRODUCED)
        return self._of_sessions(allowed_B).clip(min=REPRODUCED)

    def _gdpo(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return the advantage of each session at its last row, and 0 in the other rows."""
        if self.tokens_B is None and arm.settings.batch_norm == "token":
            raise ValueError(f"{arm.name} normalises over tokens, which verl's own dump lacks")
        tokens_B = None
        if self.tokens_B is not None:
            tokens_B = torch.from_numpy(self.rewards.over_sessions(self.tokens_B))
        counted_B = self.rewards.counted_B
        A_B = np.zeros(len(counted_B))
        for batch in np.unique(self.batch_B).tolist():
            here_B = counted_B & (self.batch_B == batch)
            scalars = scalars_of(rewards, here_B, self.group_ids, arm.settings, tokens_B)
            A_B += scalars.A_B.numpy()
        return A_B

    def _grpo(self, scores_B: Floats, normalize_by_std: bool) -> Floats:
        """Return the advantage of each session at its last row, and 0 in the other rows."""
        counted_B = self.rewards.counted_B
        A_B = np.zeros(len(scores_B))
        group_B = group_numbers(self.group_ids[counted_B])
        A_B[counted_B] = verl_grpo(scores_B[counted_B], group_B, normalize_by_std)
        return A_B

    def _of_sessions(self, A_B: Floats) -> Floats:
        """Return the advantage of a session in each of its rows; 0 where nothing is trained."""
        result: Floats = np.where(self.trained_B, A_B[self.rewards.session_B], 0.0)
        return result


def _finite(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """Return a column of a dump; raise ValueError where it holds no finite number."""
    values_B = np.array([row[key] for row in rows], dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values_B)).tolist()
    if bad:
        row = rows[bad[0]]
        raise ValueError(f"{row['uid']}: the {key} is {row[key]}, no finite number")
    return values_B


def verl_grpo(scores_B: Floats, group_B: Ints, normalize_by_std: bool) -> Floats:
    """Return A_B of verl's own `grpo`, with the same float32 operations.

    So we get the numbers that verl trains with. A constant score that float32 cannot hold can leave
    a residue of about 0.1, and the sample of a group of one keeps its score. One difference
    remains: a dump does not keep the order in which verl added the rows of a group up, which
    `rounding_of_grpo` bounds.

    Args:
        group_B: the group of each row, numbered 0, 1, ...

    Source: `compute_grpo_outcome_advantage` of verl 0.9.
    """
    order = np.argsort(group_B, kind="stable")
    size_G = torch.from_numpy(np.bincount(group_B))
    scores = torch.from_numpy(scores_B[order].astype(np.float32))
    means = []
    stds = []
    for group in torch.split(scores, size_G.tolist()):
        if len(group) > 1:
            means.append(torch.mean(group))
            stds.append(torch.std(group))
        else:
            means.append(torch.zeros(()))
            stds.append(torch.ones(()))
    A = scores - torch.stack(means).repeat_interleave(size_G)
    if normalize_by_std:
        A = A / (torch.stack(stds) + VERL_EPS).repeat_interleave(size_G)
    A_B = np.empty(len(scores_B))
    A_B[order] = A.numpy()
    return A_B


def rounding_of_grpo(scores_B: Floats, group_B: Ints, normalize_by_std: bool) -> Floats:
    """Return how far two `verl_grpo` of the same scores, added up in other orders, can be apart.

    A mean of n numbers in float32 errs by up to n u max|x|, where u is half of float32's eps, and
    so does the standard deviation. This holds for each of the two:

        |error of A| <= n u max|x| (1 + |A|) / (std - n u max|x| + eps) + 4 u |A|

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    unit = EPS32 / 2
    size_G = np.bincount(group_B)
    high_G = np.zeros(len(size_G))
    np.maximum.at(high_G, group_B, np.abs(scores_B))
    mean_G = np.bincount(group_B, scores_B) / size_G
    centred_B = scores_B - mean_G[group_B]
    squares_G = np.zeros(len(size_G))
    np.add.at(squares_G, group_B, centred_B**2)
    std_G = np.sqrt(squares_G / (size_G - 1).clip(min=1))
    # A sample alone in its group keeps its score, without an error.
    error_G = np.where(size_G > 1, size_G * unit * high_G, 0.0)
    scale_G = np.ones_like(std_G)
    if normalize_by_std:
        scale_G = (std_G - error_G).clip(min=0) + VERL_EPS
    A_B = np.abs(centred_B) / scale_G[group_B]
    error_B = (error_G / scale_G)[group_B] * (1 + A_B) + 4 * unit * A_B
    bound_B: Floats = 2 * error_B
    return bound_B


def group_numbers(group_ids: npt.NDArray[Any]) -> Ints:
    """Return the group number of each row, (B,) int64."""
    _, group_B = np.unique(group_ids, return_inverse=True)
    numbers_B: Ints = group_B.astype(np.int64)
    return numbers_B
