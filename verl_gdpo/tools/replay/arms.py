"""The arms of a replay: estimators with settings, from recipes/estimator or from a run.

In this module, `algorithm` is verl's block of that name as a plain dict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.advantage.variants import Bounds
from verl_gdpo.run.folder import load_config
from verl_gdpo.settings.algorithm import SETTING_KEYS, GdpoSettings, hint
from verl_gdpo.settings.of_run import composed, scorers_bounds, settings_of_run
from verl_gdpo.settings.reward_terms import line_of
from verl_gdpo.tools.recipes import FOLDER

ARMS: Mapping[str, Mapping[str, Any]] = {  # the `algorithm` block of recipes/estimator/NAME.yaml
    path.stem: OmegaConf.to_container(OmegaConf.load(path).algorithm)  # type: ignore[misc]
    for path in sorted((FOLDER / "estimator").glob("*.yaml"))
}
# an arm changes how rewards are normalised; these keys of `gdpo` keep their values from the run
KEPT_BY_ARMS_IN_GDPO = ("rewards", "eps")
# the keys that replay's grpo reads; its gdpo also reads everything in `algorithm.gdpo`
READ = ("adv_estimator", "norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights")
READ_BY_GRPO = (*(f"algorithm.{key}" for key in READ), "algorithm.gdpo.rewards")
READ_BY_GDPO = (*READ_BY_GRPO, *(f"algorithm.gdpo.{key}" for key in SETTING_KEYS))


@dataclass(frozen=True)
class Arm:
    """One way to compute advantages."""

    name: str
    algorithm: Mapping[str, Any]
    settings: GdpoSettings
    declared: Mapping[str, Bounds]  # bounds from scorers; bounds in `algorithm` replace them
    run: Any = None  # the whole configuration of the run, as a DictConfig
    sources: Iterable[str] | None = None  # of the run's rows

    @classmethod
    def of(
        cls,
        name: str,
        algorithm: Mapping[str, Any],
        declared: Mapping[str, Bounds],
        run: Any = None,
        sources: Iterable[str] | None = None,
    ) -> "Arm":
        """Return the arm; raise ValueError for settings that `GdpoSettings` refuses."""
        settings = GdpoSettings.from_algorithm(algorithm)
        settings = replace(settings, bounds={**declared, **settings.bounds})
        return cls(name, algorithm, settings, declared, run, sources)

    def as_arm(self, name: str) -> "Arm":
        """Return the arm `name` of the recipes, with rewards, weights, conditions and eps kept."""
        if name not in ARMS:
            raise ValueError(f"--arm {name}: unknown{hint(name, [*ARMS])}")
        block, arm = self.algorithm.get("gdpo") or {}, ARMS[name]
        kept = {key: value for key, value in self.algorithm.items() if key not in ("gdpo", READ[1])}
        kept_in_gdpo = {key: block[key] for key in KEPT_BY_ARMS_IN_GDPO if key in block}
        algorithm = {**kept, READ[1]: True, **arm, "gdpo": {**kept_in_gdpo, **arm.get("gdpo", {})}}
        return Arm.of(name, algorithm, self.declared, self.run, self.sources)

    def changed(self, name: str, overrides: Sequence[str]) -> "Arm":
        """Return the arm with overrides, which mean what they mean in the training command.

        Raises:
            ValueError: an override cannot be applied, the estimator does not read its key, or
                training would refuse the result.
        """
        config = OmegaConf.create({}) if self.run is None else self.run.copy()
        config.algorithm = dict(self.algorithm)
        keys = [override.partition("=")[0].strip("+~ ") for override in overrides]
        changed = composed(config, overrides)
        algorithm = dict(OmegaConf.to_container(changed.algorithm))
        is_grpo = algorithm.get("adv_estimator") == "grpo"
        for key, override in zip(keys, overrides, strict=True):
            read = READ_BY_GRPO if is_grpo else READ_BY_GDPO
            if not f"{key}.".startswith(tuple(f"{known}." for known in read)):
                who = "verl's grpo" if is_grpo else "gdpo"
                raise ValueError(f"{override}: {who} does not read it{hint(key, read)}")
        if OmegaConf.select(changed, "reward.reward_model") is not None:
            is_recorded = not any(f"{key}.".startswith("algorithm.gdpo.rewards.") for key in keys)
            settings_of_run(changed, self.sources, is_recorded=is_recorded)
        return Arm.of(name, algorithm, self.declared, self.run, self.sources)

    @property
    def estimator(self) -> str:
        return str(self.algorithm.get("adv_estimator", "gdpo"))

    @property
    def is_known(self) -> bool:
        return self.estimator in ("gdpo", "grpo")

    def __str__(self) -> str:
        """Return the settings that replay reads, in the syntax of overrides."""
        said = {f"algorithm.{key}": self.algorithm.get(key) for key in READ}
        block = self.algorithm.get("gdpo") or {}
        said |= {f"algorithm.gdpo.{key}": value for key, value in block.items()}
        return " ".join(line_of(key, value) for key, value in said.items() if value is not None)


def read_run(path: Path, sources: Iterable[str] | None = None) -> Arm:
    """Return a run's own settings, given the file with its configuration.

    Raises:
        ValueError: there is no `algorithm` block, or it cannot be resolved.
    """
    config = load_config(path)
    try:
        declared = scorers_bounds(config, sources)[0] if "reward" in config else {}
        algorithm: Any = OmegaConf.to_container(config.algorithm, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from None
    return Arm.of("run", algorithm, declared, config, sources)
