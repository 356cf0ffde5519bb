"""The tasks that verl-gdpo scores. To add a task, add a file with a `TASK` to this folder.

A scorer is a pure function of a response and a ground truth; see `Task.score` in `task.py`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from verl_gdpo.rewards.task import Task

# the usual reward of verl's own scorers, which score the rows of all other data sources
VERL_REWARD_NAMES = ("acc",)

# keywords that the reward manager passes, the last two where a task runs programs; users cannot
# set them
GIVEN_BY_MANAGER = ("response_tokens", "step", "service", "notes")


def _find_tasks() -> dict[str, Task]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.TASK.name: module.TASK for module in modules if hasattr(module, "TASK")}


# {name: task}
TASKS: Mapping[str, Task] = _find_tasks()

# the rewards that say whether an answer is right
MAIN_REWARDS = {*VERL_REWARD_NAMES, *(task.main_reward for task in TASKS.values())}


def _by_data_source(tasks: Iterable[Task]) -> dict[str, Task]:
    found: dict[str, Task] = {}
    for task in tasks:
        for source in task.data_sources:
            if source in found:
                raise ValueError(
                    f"data_source {source!r} belongs to the tasks {found[source].name!r} and "
                    f"{task.name!r} (verl_gdpo/rewards/); rename one"
                )
            found[source] = task
    return found


# {value of verl's column `data_source`: task}
TASK_OF: Mapping[str, Task] = _by_data_source(TASKS.values())


def belongs_elsewhere(name: str, data_source: str) -> bool:
    """Return whether rows of another task may have the reward `name`, which a row here lacks."""
    own = TASK_OF.get(data_source)
    others = {
        name
        for task in TASK_OF.values()
        if task is not own
        for name in (*task.reward_names, *task.verl_names)
    }
    return name in (others | {*VERL_REWARD_NAMES} if own else others - {*VERL_REWARD_NAMES})


def declared_bounds(
    sources: Iterable[str], options: Mapping[str, Any]
) -> dict[str, tuple[float, float] | None]:
    """Return {reward: (lowest, highest)}, also under verl's names for the rewards.

    It is None where the data sources disagree.

    Args:
        sources: data sources. Sources without a scorer of ours declare no bounds.
        options: options of the scorers, from `reward.reward_kwargs`.

    Raises:
        ValueError: a scorer does not accept an option.
    """
    result: dict[str, tuple[float, float] | None] = {}
    for source in {*sources} & TASK_OF.keys():
        bounds = declared_by(source, options)
        for verl_name, name in TASK_OF[source].verl_names.items():
            bounds |= {verl_name: bounds[name]} if name in bounds else {}
        for name, pair in bounds.items():
            result[name] = pair if result.get(name, pair) == pair else None
    return result


def declared_by(source: str, options: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return {reward: (lowest, highest)} of the rewards that our scorer returns for a data source.

    It is empty if the scorer does not take its options, which `check_options` refuses.
    """
    task, own = TASK_OF[source], options_for(source, options)
    try:
        inspect.signature(task.score).bind("", "", **own)
    except TypeError:
        return {}
    return dict(task.bounds(**own))


def check_options(options: Mapping[str, Any], sources: Iterable[str]) -> None:
    """Check `reward.reward_kwargs` of a run.

    Args:
        sources: the data sources of the run's rows.

    Raises:
        ValueError: none of our scorers for these sources takes an option.
    """
    taken = {source: options_of(TASK_OF[source]) for source in sources if source in TASK_OF}
    for name in options:
        if not any(name in names for names in taken.values()):
            takes = [f"rows of {source!r} take {names}" for source, names in taken.items()]
            raise ValueError(
                f"reward.reward_kwargs.{name}: no scorer of the training rows takes it "
                f"({'; '.join(takes) or 'verl scores them, without options'}). Remove it; on the "
                f"command line, ~reward.reward_kwargs.{name}"
            )


def options_for(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that only the scorers of other data sources take."""
    known = {name for task in TASK_OF.values() for name in options_of(task)}
    others = known - {*options_of(TASK_OF[source])}
    return {name: value for name, value in options.items() if name not in others}


def options_of(task: Task) -> list[str]:
    parameters = inspect.signature(task.score).parameters.values()
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return [name for name in named if name not in GIVEN_BY_MANAGER]


def check_ground_truths(rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Find a bad ground truth before training.

    Args:
        rows: rows with verl's columns `data_source` and `reward_model`. Rows of unknown sources are
            skipped.
        where: name of the rows in the message, such as "data.train_files".

    Raises:
        ValueError: a ground truth is bad; the message names the row and the reason.
    """
    for number, row in enumerate(rows):
        task = TASK_OF.get(row["data_source"])
        if task is None:
            continue
        ground_truth = (row["reward_model"] or {}).get("ground_truth")
        try:
            task.check_ground_truth(ground_truth)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}, row {number} (data_source {row['data_source']!r}): {error}"
            ) from error
