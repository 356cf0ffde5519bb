"""Which estimator, under which settings: the arms of recipes/estimator, a run's own, and changes.

An `algorithm` here is verl's block of that name as a plain dict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.reward_terms import hint
from verl_gdpo.settings import KEYS, GdpoSettings, scorers_bounds
from verl_gdpo.variants import Bounds

NO_BOUNDS: Mapping[str, Bounds] = {}

# what recipes/estimator/NAME.yaml sets under `algorithm`
ARMS: Mapping[str, Mapping[str, Any]] = {
    "gdpo": {"adv_estimator": "gdpo"},
    "gdpo_token": {"adv_estimator": "gdpo", "gdpo": {"batch_norm": "token"}},
    "gdpo_no_batch_norm": {"adv_estimator": "gdpo", "gdpo": {"batch_norm": "none"}},
    "grpo": {"adv_estimator": "grpo"},
    "grpo_no_std": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    "grpo_batch_norm": {"adv_estimator": "gdpo", "gdpo": {"group_norm": "summed"}},
}
# what verl's grpo reads; gdpo reads `algorithm.gdpo` as a whole besides
READ_BY_BOTH = (
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "algorithm.gdpo.rewards",
)
# an arm says how to normalise; what the rewards are worth stays as in the run
KEPT_BY_ARMS = ("gdpo_reward_keys", "gdpo_reward_weights")
KEPT_BY_ARMS_IN_GDPO = ("rewards", "eps")


@dataclass(frozen=True)
class Arm:
    """One way to compute advantages."""

    name: str
    estimator: str
    settings: GdpoSettings
    algorithm: Mapping[str, Any]
    declared: Mapping[str, Bounds]  # bounds that scorers declare; those of `algorithm` win

    @classmethod
    def of(
        cls, name: str, algorithm: Mapping[str, Any], declared: Mapping[str, Bounds] = NO_BOUNDS
    ) -> "Arm":
        """Raises ValueError for settings that `GdpoSettings` refuses."""
        settings = GdpoSettings.from_algorithm(algorithm)
        settings = replace(settings, bounds={**declared, **settings.bounds})
        estimator = str(algorithm.get("adv_estimator", "gdpo"))
        return cls(name, estimator, settings, algorithm, declared)

    @property
    def is_known(self) -> bool:
        return self.estimator in ("gdpo", "grpo")

    def __str__(self) -> str:
        """The settings that matter, in the syntax of an override."""
        read = [key.split(".")[1] for key in READ_BY_BOTH]
        shown = {key: self.algorithm[key] for key in dict.fromkeys(read) if key in self.algorithm}
        return " ".join(f"{key}={value}" for key, value in shown.items() if value is not None)


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, Bounds]]:
    """The `algorithm` block of a configuration file, and the bounds that its scorers declare.

    Raises:
        ValueError: there is no such block, or it does not resolve.
    """
    try:
        config: Any = OmegaConf.load(path)
        block = OmegaConf.is_dict(config) and config.get("algorithm")
        if not OmegaConf.is_dict(block):
            raise ValueError(f"{path}: no `algorithm` block; expected a verl configuration")
        declared = scorers_bounds(config, None)[0] if "reward" in config else {}
        return dict(OmegaConf.to_container(block, resolve=True)), declared  # type: ignore[arg-type]
    except (OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def with_arm(algorithm: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arm `name` on the rewards, weights, conditions and eps of `algorithm`."""
    if name not in ARMS:
        raise ValueError(f"--arm {name}: unknown{hint(name, [*ARMS])}")
    block = algorithm.get("gdpo") or {}
    kept: dict[str, Any] = {key: algorithm[key] for key in KEPT_BY_ARMS if key in algorithm}
    kept["gdpo"] = {key: block[key] for key in KEPT_BY_ARMS_IN_GDPO if key in block}
    return _merged(kept, ARMS[name])


def with_overrides(algorithm: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`algorithm` after `key=value`, in the syntax and with the meaning of the training command.

    Raises:
        ValueError: the text cannot be parsed, or names what no advantage depends on.
    """
    config = OmegaConf.create({"algorithm": dict(algorithm)})
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            text, key = override.input_line, override.key_or_group
            if override.is_delete() or override.is_sweep_override():
                raise ValueError(f"{text}: expected one value; weight 0 leaves a reward out")
            _check_is_read(text or key, key)
            OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        changed = dict(OmegaConf.to_container(config, resolve=True)["algorithm"])  # type: ignore
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {error}") from None
    if changed.get("adv_estimator") == "grpo":
        for override in parsed:
            if not override.key_or_group.startswith(READ_BY_BOTH):
                raise ValueError(
                    f"{override.input_line}: verl's grpo does not read it; with "
                    "algorithm.adv_estimator=gdpo or --arm gdpo it has a meaning"
                )
    return changed


def _check_is_read(text: str, key: str) -> None:
    if not key.startswith(("algorithm.gdpo.", *READ_BY_BOTH)):
        known = [*READ_BY_BOTH, *(f"algorithm.gdpo.{name}" for name in KEYS)]
        raise ValueError(f"{text}: no advantage depends on it{hint(key, known)}")


def _merged(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.merge(*blocks)))  # type: ignore[arg-type]
