"""What the configuration says of `reward.reward_functions`: its keys, and the weights of rewards.

The functions themselves are in `reward_functions.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import REWARDS, line_of, plain

KEY = "reward.reward_functions"
KINDS = ("path", "task", "judge")  # an entry has one of them
DEFAULTS = {"name": "compute_score", "sources": None, "on_error": "stop", "required": True}
DEFAULTS |= dict.fromkeys(("rubric", "group", "limited"), False)
RESERVED = (*KINDS, *DEFAULTS, "weight")  # all others are options
ON_ERROR = ("stop", "missing", "drop")
JOINT = "__"
PLURAL = {"solution_str": "solution_strs", "extra_info": "extra_infos"}  # of a group
OF_GROUP = "verl_gdpo_group"  # a column: all rows of the batch are samples of one group


def entries_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return {name: keys, with their defaults} of the list, which may be empty."""
    entries = plain(OmegaConf.select(config, KEY)) or {}
    return {name: {**DEFAULTS, **(entry or {})} for name, entry in entries.items()}


def check_entry(where: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry that has not one of `KINDS`, or is not `required`."""
    if len(entry.keys() & KINDS) != 1:
        raise ValueError(
            f"{where}: got {sorted(entry.keys() & KINDS) or 'none'} of path, task and judge; "
            "expected path=FILE.py (or pkg://MODULE), with name=FUNCTION, or task=TASK, a task of "
            "`verl-gdpo data`, or judge=ADDRESS, of a model"
        )
    for key in ("group", "rubric"):
        if entry[key] and "path" not in entry:
            raise ValueError(f"{where}.{key}={entry[key]}: only a function of `path` can have it")
    if str(entry["required"]).lower() != "true":
        raise ValueError(
            f"{where}.required={entry['required']}: a reward that fails is never 0 here, it ends "
            "the run. Leave the key out"
        )
    if entry["on_error"] not in ON_ERROR:
        expected = f"expected one of {', '.join(ON_ERROR)}"
        raise ValueError(f"{where}.on_error={entry['on_error']}: {expected}")
    if entry["rubric"] and "" not in weights_of_entry("", entry):
        raise ValueError(
            f"{where}.rubric={entry['rubric']}: got weight={entry['weight']}; expected a number or "
            "schedule for all criteria. Their own weights come with the row: "
            "rubric=KEY_OF_EXTRA_INFO"
        )
    if isinstance(entry["sources"], str):
        raise ValueError(f"{where}.sources={entry['sources']}: expected a list, such as [gsm8k]")


def weights_of_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return {reward: weight} of an entry, whose `weight` may be one, a schedule, or {key: one}."""
    weight = entry.get("weight", 1.0)
    is_schedule = isinstance(weight, Mapping) and all(isinstance(key, int) for key in weight)
    if not isinstance(weight, Mapping) or is_schedule:
        keys = entry.get("rewards") or () if "judge" in entry else ()
        names = [f"{name}{JOINT}{key}" for key in keys] or [name]
        return dict.fromkeys(names, {"weight": weight} if is_schedule else weight)
    return {f"{name}{JOINT}{key}": value for key, value in weight.items()}


def refuse_without_v1(config: Any) -> None:
    """Raise ValueError for a function that only verl's V1 trainers can have."""
    for name, entry in entries_of(config).items():
        for key, value in entry.items():
            if (key, value) == ("on_error", "drop") or (key in ("group", "rubric") and value):
                raise ValueError(
                    f"{KEY}.{name}.{key}={value}: only the V1 trainers of verl.trainer.main_ppo "
                    "can have it (trainer.use_v1=True)"
                )


def is_limited(entry: Mapping[str, Any]) -> bool:
    """Return whether the limits of requests hold for a function."""
    return bool(entry["limited"]) or "judge" in entry


def limited_functions(config: Any) -> list[str]:
    """Return the names of the functions for which the limits of requests hold."""
    return [name for name, entry in entries_of(config).items() if is_limited(entry)]


def silence(config: Any, names: Iterable[str]) -> None:
    """Let these functions score no row, so that their rewards do not apply."""
    for name in names:
        OmegaConf.update(config, f"{KEY}.{name}.sources", [], force_add=True)


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
