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
from types import ModuleType
from typing import Any

from verl_gdpo.algorithm.rubrics import criteria_of
from verl_gdpo.algorithm.samples import (
    DROPPED,
    FAILED,
    NOTES_KEY,
    RUBRIC_KEY,
    check_name,
    is_number,
)
from verl_gdpo.algorithm.settings import hint
from verl_gdpo.algorithm.zero import is_the_sum
from verl_gdpo.hooks.function_list import (
    JOINT,
    KEY,
    OF_GROUP,
    PLURAL,
    RESERVED,
    check_entry,
    entries_of,
    weights_of_entry,
)
from verl_gdpo.hooks.judge import Judge
from verl_gdpo.hooks.own_copy import own_copy
from verl_gdpo.reward_file import load
from verl_gdpo.tasks import TASKS

logger = logging.getLogger(__name__)

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # verl's
OURS = ("prompt", "within_limits")  # messages, and what awaits a request within the limits
ROUTER = ("reward_router_address", "reward_model_tokenizer")  # with a reward model, verl's too
TASK_ARGUMENTS = {"response": "solution_str", "ground_truth": "ground_truth"}

Result = Any  # of a function: a number, None, or {name: value}
Run = Callable[["ListedFunction", functools.partial[Result]], Awaitable[Result]]


@dataclass(frozen=True)
class ListedFunction:
    """One entry of the list, with what it calls.

    options: for the function, from the configuration.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    entry: Mapping[str, Any]

    @property
    def takes_limits(self) -> bool:
        """Whether it keeps the limits itself, for each request of its own."""
        return "within_limits" in inspect.signature(self.function).parameters

    def scores(self, data_source: str) -> bool:
        return self.entry["sources"] is None or data_source in self.entry["sources"]

    @property
    def names(self) -> list[str]:
        """Its rewards, as far as the configuration tells."""
        return [*weights_of_entry(self.name, self.entry)]

    async def rewards(self, run: Run, row: Mapping[str, Any], is_shared: bool) -> dict[str, Any]:
        """Return {name: value} for a row, of which `row` has all that a function may take.

        is_shared: whether other functions score the row too.
        """
        is_group, rubric = self.entry["group"], self.entry["rubric"]
        if is_group:
            result = await row[OF_GROUP](self, run, is_shared)
        else:
            result = await run(self, self.call(row, is_shared))
        if not rubric:
            return self.named(result)
        weights = None if rubric is True else row["extra_info"].get(rubric, {})
        # the manager adds them up
        return {self.name: None, f"{RUBRIC_KEY}{self.name}": criteria_of(result, weights)}

    async def rewards_or_none(
        self, run: Run, row: Mapping[str, Any], is_shared: bool
    ) -> tuple[dict[str, Any], bool]:
        """Return the rewards of a row, and whether the function failed."""
        try:
            return await self.rewards(run, row, is_shared), False
        except Exception:
            if self.entry["on_error"] == "stop":
                raise
            logger.warning("verl-gdpo: %s.%s failed", KEY, self.name, exc_info=True)
            return dict.fromkeys(self.names), True

    def call(self, row: Mapping[str, Any], is_shared: bool) -> functools.partial[Result]:
        """Return the call with what it takes of a row, or of a group.

        A function may change what it gets. So each call has its own copy of the entry's options
        and, if other functions score the row too, of the row.
        """
        if "task" in self.entry:
            taken = {name: row[other] for name, other in TASK_ARGUMENTS.items()}
            taken["response_tokens"] = row["extra_info"]["response_tokens"]
        else:
            parameters = inspect.signature(self.function).parameters.values()
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
            names = {each.name for each in parameters}
            names |= row.keys() - {*OURS, OF_GROUP} if takes_all else set()
            taken = {name: row[name] for name in names if name in row}
        if is_shared:
            taken = own_copy(taken)
        return functools.partial(self.function, **{**taken, **own_copy(dict(self.options))})

    def named(self, result: Result) -> dict[str, Any]:
        """Return what the function returned, under the names that it has in the run.

        >>> ListedFunction("judge", max, {}, {}).named({"clear": 1.0, "why": "short"})
        {'judge__clear': 1.0, 'judge__why': 'short'}

        Raises:
            ValueError: a `score` is not the sum of the numbers beside it.
        """
        if not isinstance(result, Mapping):
            return {self.name: result}
        numbers = {key: value for key, value in result.items() if is_number(value)}
        score = numbers.pop("score", None)
        if score is not None and numbers and not is_the_sum(score, sum(numbers.values())):
            raise ValueError(
                f"{KEY}.{self.name}: it returned score={score}, which is not the sum of {numbers}. "
                "Each number is a reward: leave `score` out, or return it under another name"
            )
        named = {f"{self.name}{JOINT}{key}": value for key, value in result.items()}
        if score is not None:
            value = named.pop(f"{self.name}{JOINT}score")
            named |= {} if numbers else {self.name: value}
        return named


def reward_functions(config: Any) -> list[ListedFunction]:
    """Load the functions of the list.

    Raises:
        ValueError: an entry cannot be used; the message names it, and what to write.
    """
    return [_function(name, entry) for name, entry in entries_of(config).items()]


def _function(name: str, entry: Mapping[str, Any]) -> ListedFunction:
    where = f"{KEY}.{name}"
    check_name(name)
    check_entry(where, entry)
    options = {key: value for key, value in entry.items() if key not in RESERVED}
    if task := entry.get("task"):
        if task not in TASKS:
            raise ValueError(f"{where}.task={task}: unknown{hint(task, [*TASKS])}")
        function: Callable[..., Any] = TASKS[task].score
    elif "judge" in entry:
        function, options = _judge(where, {**options, "judge": entry["judge"]}, entry), {}
    else:
        function = getattr(module_with(where, str(entry["path"]), entry["name"]), entry["name"])
        plural = PLURAL if entry["group"] else {}
        arguments = [plural.get(each, each) for each in (*ARGUMENTS, *OURS)]
        _check_signature(where, function, options, arguments)
    return ListedFunction(name, function, options, entry)


def _judge(where: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> Judge:
    _check_signature(where, Judge, options, (*ARGUMENTS, *OURS))
    try:
        judge = Judge(**options)
        if entry["sources"] != []:  # else nothing asks it
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
    """Raise ValueError for an option that the function does not take, or a lack of one."""
    parameters = inspect.signature(function).parameters
    kinds = {each.kind for each in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds and (foreign := options.keys() - parameters):
        raise ValueError(
            f"{where}: its function takes no {sorted(foreign)}; it takes {[*parameters]}. Of the "
            f"keys of an entry, {', '.join(RESERVED)} are verl-gdpo's"
        )
    lacking = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.name not in (*arguments, *ROUTER, *options)
    ]
    if lacking:
        raise ValueError(
            f"{where}: its function asks for {lacking}, which nothing gives. It may take "
            f"{', '.join(arguments)}, and what the entry has beside {', '.join(RESERVED)}"
        )


async def score_with(
    listed: Sequence[ListedFunction], run: Run, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rewards of a row by all functions of its data source, which run side by side.

    A reward that another source alone has is None. Of functions that may fail, it also has notes
    which of them did, and whether the sample is dropped.

    Raises:
        ValueError: two functions return one name, or none scores the source.
    """
    source = row["data_source"]
    own = [each for each in listed if each.scores(source)]
    if not own:
        raise ValueError(f"{KEY}: no function scores rows of data_source {source!r}")
    rewards: dict[str, Any] = {
        name: None for each in listed if not each.scores(source) for name in each.names
    }
    is_shared = len(own) > 1
    results = await asyncio.gather(*(each.rewards_or_none(run, row, is_shared) for each in own))
    notes = {f"{FAILED}{each.name}": 0.0 for each in listed if each.entry["on_error"] != "stop"}
    if "drop" in [each.entry["on_error"] for each in listed]:
        notes[DROPPED] = 0.0
    for each, (named, has_failed) in zip(own, results, strict=True):
        if has_failed:
            notes[f"{FAILED}{each.name}"] = 1.0
            notes |= {DROPPED: 1.0} if each.entry["on_error"] == "drop" else {}
        if twice := sorted(named.keys() & rewards.keys()):
            raise ValueError(f"{KEY}.{each.name}: another function returns {twice} too; rename it")
        rewards |= named
    return {**rewards, NOTES_KEY: notes} if notes else rewards
