"""What the configuration says of `reward.reward_functions`: its keys, and the weights of rewards.

The functions themselves are in `reward_functions.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import REWARDS, line_of, plain, read_settings
from verl_gdpo.algorithm.settings import GdpoSettings, SettingsError, hint
from verl_gdpo.algorithm.values import check_name
from verl_gdpo.tasks import TASKS, Task, TaskError, options_of

KEY = "reward.reward_functions"
# An entry has one of these keys, which says what scores.
KINDS = ("path", "task", "judge")
DEFAULTS = {
    "name": "compute_score",
    "rewards": None,
    "sources": None,
    "on_error": "stop",
    "required": True,
    "rubric": False,
    "group": False,
    "limited": False,
    "validation": None,
}
# All other keys of an entry are options of its function.
RESERVED = KINDS + tuple(DEFAULTS) + ("weight",)
ON_ERROR = ("stop", "missing", "drop")
# A function scores the rows of a validation only, or never. With None it scores all rows.
ONLY = "only"
NEVER = "never"
# It stands between the name of a function and a key of the dict that the function returns.
JOINT = "__"
# The value of the key `rewards` for a function that returns one number.
NUMBER = "number"
# A function of a group takes lists, one value a sample, under these names.
PLURAL = {
    "solution_str": "solution_strs",
    "answer_str": "answer_strs",
    "reasoning_str": "reasoning_strs",
    "extra_info": "extra_infos",
}
# A batch with this column holds the samples of one group and nothing else.
OF_GROUP = "verl_gdpo_group"
# What functions may take of a row has the `Response` under this name, for the tasks of the list.
OF_RESPONSE = "verl_gdpo_response"
# And the training step, None where nobody has said it.
OF_STEP = "verl_gdpo_step"


def entries_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return {name: keys, with their defaults} of the list, which may be empty.

    Raises:
        SettingsError: the list or one of its entries has no names or keys at all.
    """
    written = plain(OmegaConf.select(config, KEY)) or {}
    if not isinstance(written, Mapping):
        raise SettingsError(
            [
                f"{KEY}={written}: expected {{NAME: {{path: FILE.py, name: FUNCTION}}}}. An "
                f"entry has the NAME of its reward: +{KEY}.NAME.path=FILE.py"
            ]
        )
    entries = {}
    for name, entry in written.items():
        if not isinstance(entry, Mapping | None):
            raise SettingsError(
                [f"{KEY}.{name}={entry}: expected keys, such as +{KEY}.{name}.path=FILE.py"]
            )
        # An entry without any key is null in YAML; `check_entry` then says what it needs.
        entries[name] = {**DEFAULTS, **(entry or {})}
    return entries


def check_entries(config: Any) -> None:
    """Raise SettingsError for entries that cannot be used, as far as the configuration tells."""
    mistakes = []
    for name, entry in entries_of(config).items():
        try:
            check_name(name)
            # The names of the rewards in a dict begin like this.
            check_name(f"{name}{JOINT}")
        except ValueError as error:
            mistakes.append(f"{KEY}: {error}")
            continue
        try:
            check_entry(name, entry)
        except TaskError:
            # It is none of the configuration: a package of somebody is broken.
            raise
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise SettingsError(mistakes)


def check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry with a key that cannot be, or without one of `KINDS`."""
    where = f"{KEY}.{name}"
    kinds = sorted(entry.keys() & KINDS)
    if len(kinds) != 1:
        raise ValueError(
            f"{where}: got {kinds or 'none'} of path, task and judge; "
            "expected path=FILE.py (or pkg://MODULE), with name=FUNCTION, or task=TASK, a task of "
            "`verl-gdpo data`, or judge=ADDRESS, of a model"
        )
    if "path" not in entry and entry["name"] != DEFAULTS["name"]:
        # It may be meant as the one reward of a task that shall count.
        raise ValueError(
            f"{where}.name={entry['name']}: it names the function in the file of `path`, and a "
            f"{kinds[0]} has none. Leave it out; +{where}.weight={{KEY: 1.0}} says which rewards "
            "count"
        )
    for key in ("group", "rubric"):
        if entry[key] and "path" not in entry:
            raise ValueError(f"{where}.{key}={entry[key]}: only a function of `path` can have it")
    # Lists of verl-omni have this key. There False means that a failure scores 0.
    if str(entry["required"]).lower() != "true":
        raise ValueError(
            f"{where}.required={entry['required']}: a reward that fails is never 0 here, it ends "
            "the run. Leave the key out"
        )
    if entry["on_error"] not in ON_ERROR:
        expected = f"expected one of {', '.join(ON_ERROR)}"
        raise ValueError(f"{where}.on_error={entry['on_error']}: {expected}")
    if entry["validation"] not in (None, ONLY, NEVER):
        raise ValueError(
            f"{where}.validation={entry['validation']}: expected {ONLY} or {NEVER}. Without the "
            "key, the function scores the rows of training and validation"
        )
    # One weight for the whole rubric has the name of the entry, which is "" here.
    if entry["rubric"] and "" not in weights_of_entry("", entry):
        raise ValueError(
            f"{where}.rubric={entry['rubric']}: got weight={entry['weight']}; expected a number or "
            "schedule for all criteria. Their own weights come with the row: "
            "rubric=KEY_OF_EXTRA_INFO"
        )
    if isinstance(entry["sources"], str):
        # `in` would look for a source within the text, and find parts of names.
        raise ValueError(f"{where}.sources={entry['sources']}: expected a list, such as [gsm8k]")
    if entry["rewards"] is not None:
        _check_rewards(f"{where}.rewards", entry)
    _check_weights(name, entry)


def _check_rewards(where: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for a key `rewards` that its kind of function cannot have."""
    rewards = entry["rewards"]
    if "path" in entry and rewards != NUMBER and not _is_list_of_keys(rewards):
        raise ValueError(
            f"{where}={rewards}: expected the keys of the numbers that its function returns, such "
            f"as [format, right], or {NUMBER} for a function that returns one"
        )
    if "task" in entry:
        raise ValueError(f"{where}={rewards}: a task declares its rewards; leave the key out")
    if entry["rubric"]:
        # Its criteria come with each row, and are no names of the run.
        raise ValueError(f"{where}={rewards}: a rubric is one reward; leave the key out")
    if "judge" in entry and not isinstance(rewards, Mapping):
        raise ValueError(f"{where}={rewards}: expected {{NAME: [lowest, highest]}}")


def _is_list_of_keys(rewards: Any) -> bool:
    """Return whether these can be the keys of all rewards of a function."""
    if not isinstance(rewards, list) or not rewards:
        return False
    if not all(isinstance(key, str) for key in rewards):
        return False
    has_repeated = len(set(rewards)) < len(rewards)
    # A function's `score` is the sum of the others, and no reward beside them.
    return not has_repeated and "score" not in rewards


def _check_weights(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for a weight of a reward that the function does not return."""
    weight = entry.get("weight", 1.0)
    names = names_of_entry(name, entry)
    if not _is_by_key(weight) or names is None:
        return
    # A reward with the name of the entry itself has no key: its function returns one number.
    keys = [each.removeprefix(f"{name}{JOINT}") for each in names if each != name]
    for key in weight:
        if key in keys:
            continue
        problem = "it has one"
        if keys:
            problem = f"{key!r} is none of its rewards{hint(key, keys)}"
        raise ValueError(f"{KEY}.{name}.weight={weight}: {problem}")


def _is_by_key(weight: Any) -> bool:
    """Return whether a `weight` is {key: weight}. A schedule is {step: number}."""
    return isinstance(weight, Mapping) and not all(isinstance(key, int) for key in weight)


def options_of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the function of an entry: all keys but ours."""
    return {key: value for key, value in entry.items() if key not in RESERVED}


def task_of_entry(where: str, entry: Mapping[str, Any]) -> Task:
    """Return the task of an entry.

    Raises:
        ValueError: there is no such task, or it does not take the entry's options.
    """
    name = entry["task"]
    if name not in TASKS:
        raise ValueError(f"{where}.task={name}: unknown{hint(name, list(TASKS))}")
    task = TASKS[name]
    taken = options_of(task)
    # Its scorer would raise a TypeError on the first sample, after the model is loaded.
    for option in options_of_entry(entry):
        if option not in taken:
            raise ValueError(f"{where}.{option}: task {name} does not take it{hint(option, taken)}")
    return task


class ListedTask(NamedTuple):
    """A task of the list, with the options of its entry."""

    name: str
    task: Task
    options: Mapping[str, Any]


def tasks_that_score(config: Any, sources: Iterable[str]) -> list[ListedTask]:
    """Return the tasks of the list that score rows of some of these data sources.

    Raises:
        ValueError: see `task_of_entry`.
    """
    sources = list(sources)
    scoring = []
    for name, entry in entries_of(config).items():
        if "task" in entry and any(scores_source(entry, source) for source in sources):
            task = task_of_entry(f"{KEY}.{name}", entry)
            scoring.append(ListedTask(name, task, options_of_entry(entry)))
    return scoring


def names_of_entry(name: str, entry: Mapping[str, Any]) -> list[str] | None:
    """Return all rewards of a function, as far as its entry tells; None if it does not.

    A task and a judge declare theirs. A function of `path` returns a number, which has the name of
    the entry, or a dict, and only `rewards` or a `weight` for each key says so.

    Raises:
        ValueError: see `task_of_entry`, or the task refuses the value of an option.
    """
    rewards = entry["rewards"]
    weight = entry.get("weight")
    # The criteria of a rubric are added up to one number.
    if entry["rubric"] or rewards == NUMBER:
        return [name]
    if "task" in entry:
        keys = _rewards_of_task(f"{KEY}.{name}", entry)
    elif rewards is not None:
        keys = list(rewards)
    elif isinstance(weight, Mapping) and _is_by_key(weight):
        keys = list(weight)
    else:
        # Only a call of the function tells.
        return None
    return [f"{name}{JOINT}{key}" for key in keys]


def _rewards_of_task(where: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the rewards that a task declares, which may depend on its options."""
    task = task_of_entry(where, entry)
    try:
        return list(task.bounds(**options_of_entry(entry)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def weights_of_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return {reward: weight} of an entry, whose `weight` may be one, a schedule, or {key: one}.

    One weight is that of each reward. A function of which nothing tells what it returns is taken to
    return a number.
    """
    weight = entry.get("weight", 1.0)
    if _is_by_key(weight):
        return {f"{name}{JOINT}{key}": _as_setting(value) for key, value in weight.items()}
    names = names_of_entry(name, entry) or [name]
    return dict.fromkeys(names, _as_setting(weight))


def _as_setting(weight: Any) -> Any:
    """Return a weight as `algorithm.gdpo.rewards` has it: a schedule is the key `weight` there."""
    if isinstance(weight, Mapping) and not _is_by_key(weight):
        return {"weight": weight}
    return weight


def is_asked(entry: Mapping[str, Any], *, is_validation: bool) -> bool:
    """Return whether a function scores rows of a validation, or of the training."""
    if is_validation:
        return bool(entry["validation"] != NEVER)
    return bool(entry["validation"] != ONLY)


def tells_validation_apart(config: Any) -> bool:
    """Return whether a validation has other functions than the training."""
    return any(entry["validation"] is not None for entry in entries_of(config).values())


def validates(config: Any) -> bool:
    """Return whether the run has a validation."""
    is_first = OmegaConf.select(config, "trainer.val_before_train", default=True)
    frequency = OmegaConf.select(config, "trainer.test_freq", default=-1)
    return bool(is_first or frequency > 0)


def has_weights(config: Any) -> bool:
    """Return whether the list says what its rewards weigh; then no other number is a reward.

    The weight of a function that scores a validation only says nothing of the training.
    """
    for entry in entries_of(config).values():
        if "weight" in entry and is_asked(entry, is_validation=False):
            return True
    return False


def owner_of(reward: str, names: Iterable[str]) -> str | None:
    """Return which of these functions returns a reward; None if none of them does.

    >>> owner_of("judge__style__tone", ["judge", "judge__style", "other"])
    'judge__style'
    """
    owners = []
    for name in names:
        if reward == name or reward.startswith(name + JOINT):
            owners.append(name)
    # The name of a function may itself be another's, with a key. The longest is its own.
    return max(owners, key=len, default=None)


def rewards_of_run(config: Any) -> dict[str, list[str]]:
    """Return {function: its rewards} of the list.

    They are known before the first row is scored, so they are the same in all reward workers. A row
    on which a function fails, or which has another source, has None under each of these names.
    """
    entries = entries_of(config)
    settings = read_settings(algorithm_of(config))
    rewards = {}
    for name, entry in entries.items():
        names = names_of_entry(name, entry)
        if names is None and settings.rewards is None:
            names = [name]
        elif names is None:
            # `algorithm.gdpo.rewards` has all rewards that need a value in each row.
            names = []
        configured = [each for each in settings.names if owner_of(each, entries) == name]
        # A dict keeps the order and has each name once.
        rewards[name] = list(dict.fromkeys(names + configured))
    return rewards


def ask_for_names(name: str) -> str:
    """Return the message that asks what a function returns, of which nothing tells."""
    key = f"+{KEY}.{name}.rewards"
    return (
        f"{KEY}.{name}.on_error=missing: a sample on which the function fails has to have the same "
        "rewards as all others, and nothing tells which. If it returns a number, write "
        f"{key}={NUMBER}; if it returns a dict, its keys: {key}=[KEY,KEY]"
    )


def check_configured(config: Any, configured: Iterable[str]) -> None:
    """Raise SettingsError if `algorithm.gdpo.rewards` names what no function of the list returns.

    Args:
        configured: the names there, and those that conditions read.
    """
    entries = entries_of(config)
    mistakes = []
    for reward in configured:
        owner = owner_of(reward, entries)
        if owner is None:
            continue
        names = names_of_entry(owner, entries[owner])
        if _is_by_key(entries[owner].get("weight")):
            # Beside these rewards, the function may return more, which are only logged.
            continue
        if names is not None and reward not in names:
            mistakes.append(
                f"{REWARDS} names {reward!r}, which {KEY}.{owner} does not return"
                f"{hint(reward, names)}"
            )
    if mistakes:
        raise SettingsError(mistakes)


def check_sources(config: Any, trained: Iterable[str], validated: Iterable[str]) -> list[str]:
    """Return a warning for each entry of `sources` that no row has.

    Args:
        trained: the data sources of all training rows.
        validated: those of all validation rows.

    Raises:
        SettingsError: no row has any of the sources of a function, so it would never be called, or
            the key `validation` leaves rows of a source without a function.
    """
    trained = set(trained)
    validated = set(validated)
    mistakes = list(_sources_without_function(config, trained, is_validation=False))
    if validates(config):
        mistakes += _sources_without_function(config, validated, is_validation=True)
    warnings = []
    for name, entry in entries_of(config).items():
        listed = entry["sources"]
        if not listed:
            # The function scores the rows of all sources or, where it is silenced, of none.
            continue
        rows = "training or validation row"
        known = sorted(trained | validated)
        if entry["validation"] == ONLY:
            rows = "validation row"
            known = sorted(validated)
        elif entry["validation"] == NEVER:
            rows = "training row"
            known = sorted(trained)
        unknown = [source for source in listed if source not in known]
        if not unknown:
            continue
        where = f"{KEY}.{name}.sources={listed}"
        closest = hint(unknown[0], known)
        # One list may serve several data sets, so a single source that no row has is allowed.
        if len(unknown) == len(listed):
            mistakes.append(
                f"{where}: no {rows} has such a data_source{closest}. The "
                "function would never be called; correct the list, or leave the function out"
            )
            continue
        for source in unknown:
            warnings.append(f"{where}: no row has data_source {source!r}{hint(source, known)}")
    if mistakes:
        raise SettingsError(mistakes)
    return warnings


def _sources_without_function(
    config: Any, sources: Iterable[str], *, is_validation: bool
) -> Iterator[str]:
    """Yield each data source whose rows the key `validation` leaves without a function."""
    # An agent loop of the user's may score its rows itself.
    if OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path"):
        return
    entries = entries_of(config)
    for source in sorted(sources):
        scoring = []
        is_scored = False
        for name, entry in entries.items():
            if scores_source(entry, source):
                scoring.append(name)
                is_scored = is_scored or is_asked(entry, is_validation=is_validation)
        # A source that no function names at all is another mistake, with a message of its own.
        if scoring and not is_scored:
            rows = "validation" if is_validation else "training"
            value = NEVER if is_validation else ONLY
            yield (
                f"{KEY}: no function scores the {rows} rows of data_source {source!r}, because "
                f"{scoring} have validation={value}. Add a function for them"
            )


def scores_source(entry: Mapping[str, Any], data_source: str) -> bool:
    """Return whether a function scores rows of a data source."""
    return entry["sources"] is None or data_source in entry["sources"]


def refuse_without_v1(config: Any) -> None:
    """Raise ValueError for a function that only verl's V1 trainers can have."""
    for name, entry in entries_of(config).items():
        for key, value in entry.items():
            drops = key == "on_error" and value == "drop"
            needs_batch = key in ("group", "rubric") and value
            if drops or needs_batch:
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
    entries = OmegaConf.select(config, KEY)
    for name in names:
        # A name may have a dot, so it cannot be a part of the path that OmegaConf takes.
        OmegaConf.update(entries[name], "sources", [], force_add=True)


def algorithm_of(config: Any) -> Any:
    """Return verl's block `algorithm`, with the weights of the list as `algorithm.gdpo.rewards`.

    Those of functions that score a validation only are left out. Without any weight in the list,
    all numbers that are returned are rewards, as ever.

    Raises:
        ValueError: the weights stand in both places, and differ.
    """
    if not has_weights(config):
        return config.algorithm
    weights: dict[str, Any] = {}
    for name, entry in entries_of(config).items():
        if is_asked(entry, is_validation=False):
            weights.update(weights_of_entry(name, entry))
    written = plain(OmegaConf.select(config, REWARDS))
    # Equal weights in both places contradict nothing.
    if written and written != weights:
        raise ValueError(
            f"{REWARDS}={written}, and the weights in {KEY} are {weights}: both say what a reward "
            f"weighs. Leave out the weights in the list, or {line_of(REWARDS, weights)}"
        )
    block = plain(config.algorithm.get("gdpo")) or {}
    if not isinstance(block, Mapping):
        # `read_settings` refuses it, and says what it has to be.
        return config.algorithm
    # The copy keeps its parent, from which the other interpolations of the block read.
    algorithm = deepcopy(config.algorithm)
    with_weights = {**block, "rewards": weights}
    OmegaConf.update(algorithm, "gdpo", with_weights, merge=False, force_add=True)
    return algorithm


def validation_settings(config: Any, settings: GdpoSettings) -> GdpoSettings:
    """Return the settings whose weighted sum is the score of a row of a validation.

    They have the rewards of the training, without those of functions that never score a validation,
    and those of functions that score nothing else.

    Args:
        settings: of the training.

    Raises:
        SettingsError: a weight cannot be.
    """
    # Without names, each number that is returned counts, and the functions there return their own.
    if settings.rewards is None:
        return settings
    entries = entries_of(config)
    rewards: dict[str, Any] = dict(settings.rewards)
    for name, entry in entries.items():
        if entry["validation"] == ONLY:
            rewards.update(weights_of_entry(name, entry))
    # The block is read as that of the training, with the same messages.
    terms = read_settings({"gdpo": {"rewards": rewards}}).terms
    kept = {}
    for name, term in terms.items():
        owner = owner_of(name, entries)
        if owner is None or is_asked(entries[owner], is_validation=True):
            kept[name] = term
    return replace(settings, rewards=kept)
