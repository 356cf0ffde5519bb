"""The options with which a run called a scorer, as its configuration has them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_gdpo.tasks import Task, options_for

OF_TASKS = "reward.reward_kwargs"
OF_FUNCTION = "reward.custom_reward_function"
OF_LIST = "reward.reward_functions"
# `of_config(key, default)` returns a value of a run's configuration; see `value_of`.
OfConfig = Callable[[str, Any], Any]


class Listed(NamedTuple):
    """An entry of a run's list of reward functions."""

    place: str  # its key in the configuration
    keys: Mapping[str, Any]  # all that it says, with defaults
    options: dict[str, Any]  # what the function is called with


def value_of(config: Any, key: str, default: Any) -> Any:
    """Return a value of a configuration, as plain dicts and lists.

    Args:
        config: a DictConfig, or None for a run without one.
        default: the value of what the configuration lacks.
    """
    if config is None:
        return default
    value = OmegaConf.select(config, key)
    if value is None:
        return default
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def options_of_task(task: Task, of_config: OfConfig, *, is_validation: bool) -> dict[str, Any]:
    """Return the options that a run gave to the scorer of a task.

    Args:
        is_validation: whether those for the rows of a validation are asked for, or of a training.

    Raises:
        ValueError: the run scored by the task several times, with different options.
    """
    found = {}
    for entry in _listed(of_config, is_validation=is_validation):
        if entry.keys.get("task") == task.name:
            found[entry.place] = entry.options
    if found:
        return _only_options(task.name, found)
    return options_for(task.data_sources[0], of_config(OF_TASKS, {}))


def options_of_function(name: str, of_config: OfConfig, *, is_validation: bool) -> dict[str, Any]:
    """Return the options that a run gave to a function, if it was trained with this function.

    Args:
        name: FILE.py:FUNCTION or MODULE:FUNCTION.
        is_validation: whether those for the rows of a validation are asked for, or of a training.

    Raises:
        ValueError: the run called the function several times, with different options.
    """
    found = {}
    single = of_config(OF_FUNCTION, {})
    if _is_of(single, name):
        found[OF_FUNCTION] = dict(single.get("reward_kwargs") or {})
    for entry in _listed(of_config, is_validation=is_validation):
        if _is_of(entry.keys, name):
            found[entry.place] = entry.options
    if found:
        return _only_options(name, found)
    return {}


def _listed(of_config: OfConfig, *, is_validation: bool) -> list[Listed]:
    """Return the entries of the run's list that score its validation, or its training."""
    written = of_config(OF_LIST, {})
    if not written:
        return []
    # This loads torch, which takes seconds, and few runs have a list.
    from verl_gdpo.scoring.function_list import DEFAULTS, is_asked, options_of_entry

    called = []
    for name, entry in written.items():
        keys = {**DEFAULTS, **(entry or {})}
        if is_asked(keys, is_validation=is_validation):
            called.append(Listed(f"{OF_LIST}.{name}", keys, options_of_entry(keys)))
    return called


def _is_of(block: Mapping[str, Any], name: str) -> bool:
    """Return whether a block of the configuration has the function `name`."""
    path, _, function = name.rpartition(":")
    if not block.get("path") or block.get("name", "compute_score") != function:
        return False
    # The run may have been trained elsewhere, so that only the names of the files agree.
    return Path(str(block["path"])).name == Path(path).name


def _only_options(name: str, found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the options that all places in the configuration agree on.

    Args:
        found: {key of the configuration: options}.
    """
    first, *others = found.values()
    if any(options != first for options in others):
        raise ValueError(
            f"{name}: the run called it with different options, {dict(found)}. Write a function "
            "that calls it with those that you mean, and name that function"
        )
    return first
