"""What the configuration says of `reward.reward_functions`: its keys, and the weights of rewards.

The functions themselves are in `reward_functions.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import REWARDS, line_of, plain

KEY = "reward.reward_functions"
# keys of an entry; all others are options
OURS = ("path", "name", "task", "weight", "sources", "rubric", "on_error", "limited", "required")
ON_ERROR = ("stop", "missing", "drop")
JOINT = "__"


def entries_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return {name: keys} of the list, which may be empty."""
    entries = plain(OmegaConf.select(config, KEY)) or {}
    return {name: entry or {} for name, entry in entries.items()}


def check_entry(where: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry that has not one of path and task, or is not `required`."""
    if ("path" in entry) == ("task" in entry):
        raise ValueError(
            f"{where}: got {sorted(entry)}; expected either path=FILE.py (or pkg://MODULE), with "
            "name=FUNCTION, or task=TASK, a task of `verl-gdpo data`"
        )
    if str(entry.get("required", True)).lower() != "true":
        raise ValueError(
            f"{where}.required={entry['required']}: a reward that fails is never 0 here, it ends "
            "the run. Leave the key out"
        )
    if (on_error := entry.get("on_error", "stop")) not in ON_ERROR:
        raise ValueError(f"{where}.on_error={on_error}: expected one of {', '.join(ON_ERROR)}")
    if (rubric := entry.get("rubric")) and "" not in weights_of_entry("", entry):
        raise ValueError(
            f"{where}.rubric={rubric}: got weight={entry['weight']}; expected a number or schedule "
            "for all criteria. Their own weights come with the row: rubric=KEY_OF_EXTRA_INFO"
        )
    if isinstance(entry.get("sources"), str):
        raise ValueError(f"{where}.sources={entry['sources']}: expected a list, such as [gsm8k]")


def weights_of_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return {reward: weight} of an entry, whose `weight` may be one, a schedule, or {key: one}."""
    weight = entry.get("weight", 1.0)
    is_schedule = isinstance(weight, Mapping) and all(isinstance(key, int) for key in weight)
    if not isinstance(weight, Mapping) or is_schedule:
        return {name: {"weight": weight} if is_schedule else weight}
    return {f"{name}{JOINT}{key}": value for key, value in weight.items()}


def refuse_without_v1(config: Any) -> None:
    """Raise ValueError for a function that only verl's V1 trainers can have."""
    for name, entry in entries_of(config).items():
        for key, value in entry.items():
            if (key, value) == ("on_error", "drop") or (key == "rubric" and value):
                raise ValueError(
                    f"{KEY}.{name}.{key}={value}: only the V1 trainers of verl.trainer.main_ppo "
                    "can have it (trainer.use_v1=True)"
                )


def limited_functions(config: Any) -> list[str]:
    """Return the names of the functions for which the limits of requests hold."""
    return [name for name, entry in entries_of(config).items() if entry.get("limited")]


def algorithm_of(config: Any) -> Any:
    """Return verl's block `algorithm`, with the weights of the list as `algorithm.gdpo.rewards`.

    Without any weight in the list, all numbers that are returned are rewards, as ever.

    Raises:
        ValueError: the weights stand in both places, and differ.
    """
    entries = entries_of(config)
    if not any("weight" in entry for entry in entries.values()):
        return config.algorithm
    pairs: Iterator[tuple[str, Any]] = (
        pair for name, entry in entries.items() for pair in weights_of_entry(name, entry).items()
    )
    weights = dict(pairs)
    written = plain(OmegaConf.select(config, REWARDS))
    if written and written != weights:
        raise ValueError(
            f"{REWARDS}={written}, and the weights in {KEY} are {weights}: both say what a reward "
            f"weighs. Leave out the weights in the list, or {line_of(REWARDS, weights)}"
        )
    algorithm = OmegaConf.create(OmegaConf.to_container(config.algorithm))
    OmegaConf.update(algorithm, "gdpo.rewards", weights, force_add=True)
    return algorithm
