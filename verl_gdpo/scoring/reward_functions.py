"""Several reward functions of one run: `reward.reward_functions.NAME.{path,name,weight,...}`.

The form is that of verl-omni's `MultiVisualRewardManager`, with two differences. There a function
that fails scores 0 unless it is `required`; here it ends the run. There a dict must have a `score`;
here every number of a dict is a reward, `NAME__KEY`. A `/` in the place of `__` could not be
written in an override of Hydra's, and verl's validation would read it as a data source.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_gdpo.algorithm.rubrics import criteria_of
from verl_gdpo.algorithm.settings import SettingsError, hint
from verl_gdpo.algorithm.values import DROPPED, FAILED, NOTES_KEY, RUBRIC_KEY, is_number, plain_name
from verl_gdpo.algorithm.zero import is_the_sum
from verl_gdpo.scoring.function_list import (
    JOINT,
    KEY,
    NUMBER,
    OF_GROUP,
    OF_RESPONSE,
    OF_STEP,
    PLURAL,
    RESERVED,
    check_entries,
    entries_of,
    has_weights,
    names_of_entry,
    options_of_entry,
    rewards_of_run,
    scores_source,
    task_of_entry,
)
from verl_gdpo.scoring.judge import Judge
from verl_gdpo.scoring.limits import AllStuckError
from verl_gdpo.scoring.own_copy import own_copy
from verl_gdpo.scoring.response import PARTS
from verl_gdpo.scoring.reward_file import load
from verl_gdpo.scoring.scorer_calls import FunctionFailed, call_of_task
from verl_gdpo.scoring.signatures import keywords_of, taken_arguments

logger = logging.getLogger(__name__)

# verl calls every reward function with these arguments.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
# With a reward model, verl gives these too.
ROUTER = ("reward_router_address", "reward_model_tokenizer")
# We add thought and answer, the messages, and what awaits a request within the limits.
OURS = (*PARTS, "prompt", "within_limits")
# A function with `**kwargs` may hand them on, so it gets none of ours, alone or of a group.
NOT_OF_VERL = {*OURS, OF_GROUP, OF_RESPONSE, OF_STEP}
NOT_OF_VERL.update(PLURAL[name] for name in PARTS)
RESERVED_TEXT = ", ".join(RESERVED)


class WrongNames(ValueError):
    """A function returns other rewards than its entry says."""


# A function returns a number, None, or {name: value}.
Result = Any
# Calls a function in its thread or task, within the limits, and awaits its result.
Run = Callable[["ListedFunction", functools.partial[Result]], Awaitable[Result]]


@dataclass(frozen=True)
class ListedFunction:
    """One entry of the list, with what it calls.

    options: for the function, from the configuration.
    names: its rewards, which are None for a row on which it fails or that it does not score.
    expected: where the entry says so, all rewards that the function has to return.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    entry: Mapping[str, Any]
    names: Sequence[str] = ()
    expected: Sequence[str] | None = None

    @property
    def takes_limits(self) -> bool:
        """Whether it keeps the limits itself, for each request of its own."""
        return "within_limits" in inspect.signature(self.function).parameters

    def scores(self, data_source: str) -> bool:
        return scores_source(self.entry, data_source)

    async def rewards(self, run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name: value} for a row, of which `row` has all that a function may take."""
        # A function of a group is called once for all rows, and each row takes its own result.
        if self.entry["group"]:
            result = await row[OF_GROUP](self, run)
        elif "task" in self.entry:
            return await self._rewards_of_task(run, row)
        else:
            result = await run(self, self.call(row))
        if self.entry["rubric"]:
            return self._criteria(result, row["extra_info"])
        return self.named(result)

    async def _rewards_of_task(self, run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rewards of a task, and under `NOTES_KEY` what its scorer notes."""
        task = task_of_entry(f"{KEY}.{self.name}", self.entry)
        score = call_of_task(task, row, own_copy(dict(self.options)))
        if task.notes is None:
            return self.named(await run(self, score))
        notes = task.notes()
        result = await run(self, functools.partial(score, notes=notes))
        # Two entries may have one task, and the name comes last, as in `failed_NAME`.
        noted = {f"{note}_{self.name}": number for note, number in notes.numbers().items()}
        return {**self.named(result), NOTES_KEY: noted}

    def _criteria(self, result: Result, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the criteria of a rubric, of which the manager makes the reward."""
        key_of_weights = self.entry["rubric"]
        weights = None
        if key_of_weights is not True:
            weights = extra_info.get(key_of_weights, {})
        return {self.name: None, f"{RUBRIC_KEY}{self.name}": criteria_of(result, weights)}

    async def rewards_or_none(
        self, run: Run, row: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Return the rewards of a row, and whether the function failed."""
        try:
            return await self.rewards(run, row), False
        except (WrongNames, AllStuckError):
            # These are no failures of one sample, so `on_error` does not hold.
            raise
        except Exception as error:
            if self.entry["on_error"] == "stop":
                raise FunctionFailed(self.name, _file_of(self.function)) from error
            logger.warning("verl-gdpo: %s.%s failed", KEY, self.name, exc_info=True)
            # Rewards that a sample does not have are None, which is not the same as 0.
            return dict.fromkeys(self.names), True

    def call(self, row: Mapping[str, Any]) -> functools.partial[Result]:
        """Return the call with what it takes of a row, or of a group.

        A function may change what it gets. So each call has its own copy of the row and of the
        entry's options.
        """
        taken = taken_arguments(self.function, row, if_named=NOT_OF_VERL)
        # An option stands in the place of an argument with its name.
        arguments = own_copy({**taken, **self.options})
        return functools.partial(self.function, **arguments)

    def named(self, result: Result) -> dict[str, Any]:
        """Return what the function returned, under the names that it has in the run.

        >>> ListedFunction("judge", max, {}, {}).named({"clear": 1.0, "why": "short"})
        {'judge__clear': 1.0, 'judge__why': 'short'}

        Raises:
            ValueError: it is neither a number nor None nor a dict, or a `score` is not the sum of
                the numbers beside it.
        """
        if isinstance(result, Mapping):
            named = self._named_keys(result)
        elif result is None or is_number(result):
            named = {self.name: result}
        else:
            raise ValueError(
                f"it returned {result!r:.99}; expected a number, None or {{name: reward}}"
            )
        self._check_names(named)
        return named

    def _named_keys(self, result: Mapping[Any, Any]) -> dict[str, Any]:
        """Name each value of a dict `NAME__KEY`. A lone `score` has the name of the function."""
        values = {plain_name(key): value for key, value in result.items()}
        rewards = {}
        for key, value in values.items():
            # None is a reward that does not apply to the sample.
            if value is None or is_number(value):
                rewards[key] = value
        # A `score` that is text is only logged, as any other text.
        has_score = "score" in rewards
        score = rewards.pop("score", None)
        if score is not None and rewards:
            self._check_is_sum(score, rewards)
        named = {f"{self.name}{JOINT}{key}": value for key, value in values.items()}
        if has_score:
            # It is the sum of the rewards beside it, or the only reward.
            del named[f"{self.name}{JOINT}score"]
            if not rewards:
                named[self.name] = score
        return named

    def _check_is_sum(self, score: Any, rewards: Mapping[str, Any]) -> None:
        """Raise ValueError for a `score` that is not the sum of the rewards beside it."""
        total = sum(value for value in rewards.values() if value is not None)
        if not is_the_sum(score, total):
            raise ValueError(
                f"it returned score={score}, which is not the sum of {rewards}. "
                "Each number is a reward: leave `score` out, or return it under another name"
            )

    def _check_names(self, named: Mapping[str, Any]) -> None:
        """Raise WrongNames if these are not the rewards that the entry says."""
        if self.expected is None:
            return
        numbers = [name for name, value in named.items() if is_number(value)]
        # A reward that does not apply to the sample is there, as None.
        has_all = all(name in numbers or named.get(name, "") is None for name in self.expected)
        if has_all and set(numbers) <= set(self.expected):
            return
        if numbers == [self.name]:
            keys = NUMBER
        elif self.name in numbers:
            # The function returns a number for some samples and a dict for others, and no value
            # of the key says so.
            keys = "..."
        else:
            joined = ",".join(name.removeprefix(self.name + JOINT) for name in numbers)
            keys = f"[{joined}]"
        raise WrongNames(
            f"{KEY}.{self.name}: it returned the rewards {numbers}, and its entry says "
            f"{list(self.expected)}. Return each of them for every sample, None where one does not "
            f"apply, or write +{KEY}.{self.name}.rewards={keys}"
        )


def reward_functions(config: Any) -> list[ListedFunction]:
    """Load the functions of the list.

    Raises:
        SettingsError: an entry cannot be used; a message for each names it, and what to write.
    """
    # All mistakes of the list are told at once, before code of any file runs.
    check_entries(config)
    rewards = rewards_of_run(config)
    is_weighed = has_weights(config)
    functions = []
    mistakes = []
    for name, entry in entries_of(config).items():
        try:
            function, options = _function(f"{KEY}.{name}", entry)
        except ValueError as error:
            mistakes.append(str(error))
            continue
        expected = _expected_rewards(name, entry, is_weighed)
        functions.append(ListedFunction(name, function, options, entry, rewards[name], expected))
    if mistakes:
        raise SettingsError(mistakes)
    return functions


def check_judges(config: Any) -> None:
    """Make the judges of the list, as far as another machine than that of the run can.

    None is connected: its package and key may be there.

    Raises:
        SettingsError: a judge cannot be used on any machine; a message for each.
    """
    mistakes = []
    for name, entry in entries_of(config).items():
        if "judge" not in entry:
            continue
        try:
            _function(f"{KEY}.{name}", {**entry, "sources": []})
        except ValueError as error:
            missing = error.__cause__
            if isinstance(missing, FileNotFoundError):
                folder = Path(missing.filename).parent
                # A template whose folder is not here either may be there too.
                if not folder.is_dir():
                    continue
            mistakes.append(str(error))
    if mistakes:
        raise SettingsError(mistakes)


def _expected_rewards(name: str, entry: Mapping[str, Any], is_weighed: bool) -> list[str] | None:
    """Return all rewards that a function has to return; None where nothing says so.

    is_weighed: whether the list says what its rewards weigh.
    """
    # Tasks and judges return what they declare, and a rubric's criteria may differ by row.
    if "path" not in entry or entry["rubric"]:
        return None
    names = names_of_entry(name, entry)
    if entry["rewards"] is not None:
        return names
    if is_weighed and names is None:
        # The list weighs one number, which has the function's name.
        return [name]
    # Beside a `weight` for each key, the function may return more, which is only logged.
    return None


def _function(where: str, entry: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what an entry calls, and the options for it."""
    options = options_of_entry(entry)
    if "task" in entry:
        return task_of_entry(where, entry).score, options
    if "judge" in entry:
        options |= {"judge": entry["judge"], "rewards": entry["rewards"]}
        return _judge(where, options, entry), {}
    module = module_with(where, str(entry["path"]), entry["name"])
    function = getattr(module, entry["name"])
    arguments = list(ARGUMENTS + OURS)
    # What differs between the samples of a group comes as a list, under a plural.
    if entry["group"]:
        arguments = [PLURAL.get(name, name) for name in arguments]
    _check_signature(where, function, options, arguments)
    return function, options


def _judge(where: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> Judge:
    """Return the judge of an entry, with its client unless it is silenced."""
    _check_signature(where, Judge, options, ARGUMENTS + OURS)
    try:
        judge = Judge(**options)
        if entry["sources"] != []:
            # Nobody asks a judge without sources, so it needs neither its package nor its key.
            judge.connect()
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return judge


def module_with(where: str, path: str, name: str) -> ModuleType:
    """Load the file or module of a function.

    Args:
        where: the key of the configuration, for messages.

    Raises:
        ValueError: it cannot be loaded, or has no function of this name.
    """
    # Hydra reads `name=nan` as a number.
    if not isinstance(name, str):
        raise ValueError(f"{where}.name={name!r}: expected the name of a function, in quotes")
    try:
        module = load(path)
    except ValueError as error:
        raise ValueError(f"{where}.path={error}") from error
    if not callable(getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{where}.name={name}: {path} has no such function{hint(name, names)}")
    return module


def _check_signature(
    where: str, function: Callable[..., Any], options: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Raise ValueError for a function that cannot be called with keywords from a row and options.

    Args:
        arguments: the names of what a row gives.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        # Some functions that are written in C tell nothing of their arguments.
        raise ValueError(f"{where}: {error}. Call it in a function of your own") from error
    names, takes_all = keywords_of(function)
    given = set(arguments) | set(ROUTER) | options.keys()
    may_take = f"It may take {', '.join(arguments)}, and what the entry has beside {RESERVED_TEXT}"
    by_position = []
    for each in parameters.values():
        # One with a default may keep it, unless the row or the entry has a value for it.
        needs_value = each.default is each.empty or each.name in given
        if each.kind is each.POSITIONAL_ONLY and needs_value:
            by_position.append(each.name)
    if by_position:
        raise ValueError(
            f"{where}: its function takes {by_position} by position alone, and it is called with "
            "keywords. Leave out the `/` behind them"
        )
    takes_positions = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    if takes_positions and not names and not takes_all:
        raise ValueError(
            f"{where}: its function takes *args alone, and it is called with keywords, so it would "
            f"get nothing. {may_take}"
        )
    # An option that is misspelt would leave the function with its default.
    foreign = sorted(options.keys() - names)
    if foreign and not takes_all:
        raise ValueError(
            f"{where}: its function takes no {foreign}; it takes {list(parameters)}. Of the keys "
            f"of an entry, {RESERVED_TEXT} are verl-gdpo's"
        )
    lacking = []
    for name, parameter in parameters.items():
        if name in names and parameter.default is parameter.empty and name not in given:
            lacking.append(name)
    if lacking:
        raise ValueError(
            f"{where}: its function asks for {lacking}, which nothing gives. {may_take}"
        )


def _file_of(function: Callable[..., Any]) -> str | None:
    """Return the file in which a function is written; None for one that is written in C."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    file: str = code.co_filename
    return file


async def score_with(
    listed: Sequence[ListedFunction], run: Run, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rewards of a row by all functions of its data source, which run side by side.

    A reward that another source alone has is None. Of functions that may fail, it also has notes
    which of them did, and whether the sample is dropped; of tasks, what their scorers note.

    Raises:
        ValueError: two functions return one name, or none scores the source.
    """
    source = row["data_source"]
    own = [each for each in listed if each.scores(source)]
    if not own:
        raise ValueError(f"{KEY}: no function scores rows of data_source {source!r}")
    scoring = [each.rewards_or_none(run, row) for each in own]
    results = await asyncio.gather(*scoring)

    # All rows need the same names, so a reward of another source is None here.
    rewards: dict[str, Any] = {}
    for each in listed:
        if not each.scores(source):
            rewards.update(dict.fromkeys(each.names))
    notes = _notes_without_failure(listed)
    for each, (named, has_failed) in zip(own, results, strict=True):
        if has_failed:
            notes[f"{FAILED}{each.name}"] = 1.0
            if each.entry["on_error"] == "drop":
                notes[DROPPED] = 1.0
        notes.update(named.pop(NOTES_KEY, {}))
        # The later one would silently stand in the place of the other.
        twice = sorted(named.keys() & rewards.keys())
        if twice:
            raise ValueError(f"{KEY}.{each.name}: another function returns {twice} too; rename it")
        rewards.update(named)
    if notes:
        rewards[NOTES_KEY] = notes
    return rewards


def _notes_without_failure(listed: Sequence[ListedFunction]) -> dict[str, float]:
    """Return the notes of failures of a row without any; empty if each failure ends the run.

    All rows have the same of them, because the metrics are their means.
    """
    notes = {}
    for each in listed:
        if each.entry["on_error"] != "stop":
            notes[f"{FAILED}{each.name}"] = 0.0
    if any(each.entry["on_error"] == "drop" for each in listed):
        notes[DROPPED] = 0.0
    return notes
