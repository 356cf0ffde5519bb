"""The arms of a replay: estimators with settings, from recipes/estimator or from a run.

In this module, `algorithm` is verl's block of that name as a plain dict.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.advantage.variants import Bounds
from verl_gdpo.run.folder import load_config
from verl_gdpo.settings.algorithm import SETTING_KEYS, GdpoSettings, hint
from verl_gdpo.settings.of_run import scorers_bounds
from verl_gdpo.tools.recipes import FOLDER

ARMS: Mapping[str, Mapping[str, Any]] = {  # the `algorithm` block of recipes/estimator/NAME.yaml
    path.stem: OmegaConf.to_container(OmegaConf.load(path).algorithm)  # type: ignore[misc]
    for path in sorted((FOLDER / "estimator").glob("*.yaml"))
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
