"""Scores dumped rollouts again, with a function that the user names.

verl's own dump has one number for a rollout. Its prompt, response and ground truth are there too,
so the rewards behind that number can be had again.
"""

import asyncio
import importlib
import inspect
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_gdpo.algorithm.samples import is_number
from verl_gdpo.tasks import TASKS

HOW = "FILE.py:FUNCTION or MODULE:FUNCTION, called as verl does, or a task of `verl-gdpo data`"


@dataclass(frozen=True)
class Scorer:
    """A function that scores a row of a dump; `name` is what the user wrote."""

    name: str
    function: Callable[..., Any]
    is_task: bool = False  # a task's function takes other arguments than verl's
    data_source: str | None = None  # of rows that do not say theirs

    @classmethod
    def of(cls, name: str, data_source: str | None = None) -> "Scorer":
        """Return the scorer that `name` stands for; see `HOW`.

        Raises:
            ValueError: there is no such task, module or function.
        """
        if name in TASKS:
            task = TASKS[name]
            return cls(name, task.score, True, data_source or task.data_sources[0])
        where, colon, function = name.rpartition(":")
        if not colon:
            raise ValueError(f"--scorer {name}: expected {HOW} ({', '.join(TASKS)})")
        names = _names_in(where)
        scorer = names.get(function)
        if not callable(scorer):
            others = [key for key, value in names.items() if inspect.isfunction(value)]
            raise ValueError(f"--scorer {name}: no function {function!r}; {where} has {others}")
        return cls(name, scorer, data_source=data_source)

    def rewards(self, row: Mapping[str, Any], source: str | None) -> dict[str, Any]:
        """Return everything that the function returns for a row; a bare number is the reward `acc`.

        Args:
            source: the row's data source.

        Raises:
            ValueError: the function raised, or returned neither a number nor {name: reward}.
        """
        length = row.get("response_tokens")
        try:
            if self.is_task:
                result = self.function(
                    row["output"], row["gts"], response_tokens=length, step=row.get("step")
                )
            else:
                result = self.function(
                    data_source=source,
                    solution_str=row["output"],
                    ground_truth=row["gts"],
                    extra_info={} if length is None else {"response_tokens": length},
                )
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as error:
            raise ValueError(
                f"--scorer {self.name} raised {type(error).__name__}: {error}. A dump gives it the "
                f"response, the ground truth, data_source={source!r} (--data-source NAME), and in "
                f"extra_info response_tokens={length}; it cannot have more"
            ) from error
        if is_number(result):
            return {"acc": float(result)}
        if not isinstance(result, Mapping):
            raise ValueError(
                f"--scorer {self.name} returned {result!r:.200}; expected a number or rewards"
            )
        named = dict(result)
        only_score = not any(is_number(v) for k, v in named.items() if k != "score")
        return {"acc": named["score"], **named} if only_score and "score" in named else named


def _names_in(where: str) -> dict[str, Any]:
    """{name: value} of a file or a module."""
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ValueError(f"--scorer {where}: no such file; expected {HOW}")
    try:
        return runpy.run_path(where) if is_file else vars(importlib.import_module(where))
    except Exception as error:
        raise ValueError(
            f"--scorer {where}: cannot be imported: {type(error).__name__}: {error}; expected {HOW}"
        ) from error
