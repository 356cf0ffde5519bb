"""Where the rows of a task come from, as its module `rows.py` says.

A task whose objects have a form of their own, or whose rows have another source than local files,
has a module with `SOURCES`: its `Task.rows`. Other tasks have files of objects
{"question": ..., "answer": ...}: the user's message, and the ground truth. Each task also takes
objects in verl's form, as in `schema.py`. A file is *.json, *.jsonl or *.parquet.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

from verl_gdpo.tasks import Task, TaskError
from verl_gdpo.tasks.preparation.schema import Row, require

# (object of a file, what takes a note about it) -> row; raises ValueError for a bad object
RowOf = Callable[[Any, Callable[[str], None]], Row]
Mend = Callable[[str], tuple[str, str]]  # ground truth -> the one to write, what was repaired
MakeRows = Callable[..., Iterable[Row]]  # make_rows(count, split="train" or "test", seed=...)
VERLS_KEY = "reward_model"  # An object with this key is in verl's form.
WEAK = "weak_sandbox"  # The option of scorers that run programs.
CALL_FORMAT = "call_format"  # The option of scorers that read calls of tools.


@dataclass(frozen=True)
class Sources:
    """Where the rows of one task come from, and the command line's options for that.

    task: whose rows they are.
    row_of: makes a row from an object in the form of the task's source. It raises LeftOut for an
        object that is of no use, and ValueError for a bad one: "field NAME: got ...; expected ...".
    of_verl: the same for an object in verl's form; by default, it is taken as it is.
    mend: makes a ground truth right, for all kinds of files; see `Mend`. It runs in several
        threads, and raises LeftOut for one that it cannot make right.
    make_rows: makes synthetic rows; none, there are none.
    made_rows: how many of them are the task's rows, where no source is named; 0, it has others.
    base_url: of upstream; none, there is nothing to download.
    files: {split: (path below `base_url`, git blob id)}.
    call_formats: {format of calls of tools that the rows can teach: what a run on them needs}. The
        rows teach the first one.
    in_call_format: `in_call_format(row, call_format)` returns the row that teaches another one.
    dropped: keys of `extra_info` that are left out.
    """

    task: Task
    row_of: RowOf
    of_verl: RowOf = lambda item, *_: item
    mend: Mend | None = None
    make_rows: MakeRows | None = None
    made_rows: int = 0
    base_url: str = ""
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    call_formats: Mapping[str, str] = field(default_factory=dict)
    in_call_format: Callable[[Row, str], Row] | None = None
    dropped: Sequence[str] = ()

    def row(self, item: Any, note: Callable[[str], None]) -> Row:
        """Make a row from an object of a file; the kind of file says nothing about its form.

        A source may be published as parquet and as JSON, and rows for verl may stand in both.
        """
        if isinstance(item, Mapping) and VERLS_KEY in item:
            return self.of_verl(item, note)
        return self.row_of(item, note)


def sources_of(task: Task) -> Sources:
    """Return the sources of a task's rows.

    Raises:
        TaskError: its module cannot be imported, or has none.
    """
    if not task.rows:
        return Sources(task, partial(row_of_question, task))
    try:
        return cast(Sources, importlib.import_module(task.rows).SOURCES)
    except Exception as error:
        raise TaskError(
            f"the rows of the task {task.name!r} of {task.origin}: {task.rows}.SOURCES cannot be "
            f"imported: {type(error).__name__}: {error}"
        ) from error


def row_of_question(task: Task, item: Any, *_: Any) -> Row:
    """Return the row of an object {"question": ..., "answer": ...}: message, ground truth."""
    fields = strings_of(item, ("question", "answer"))
    return make_row(task, fields["question"], fields["answer"], task.system_prompt)


def strings_of(item: Any, keys: Sequence[str]) -> dict[str, str]:
    """Return `item` after checking that it is an object with exactly these keys and str values.

    Raises:
        ValueError: the item is something else.
    """
    require(isinstance(item, dict), "", item, "an object")
    for key in keys:
        if key not in item:
            raise ValueError(f"field {key}: got nothing; expected a str")
        require(isinstance(item[key], str), key, item[key], "a str")
    for key in item:
        # An unknown key is an error, because it could be meant for the prompt ("history").
        if key not in keys:
            raise ValueError(f"field {key}: unknown; expected only {tuple(keys)}")
    return dict(item)


def make_row(
    task: Task, question: str, ground_truth: str, system: str | None = None, ability: str = ""
) -> Row:
    """Return a row without index and split; `system` is the system message, if any."""
    messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": question})
    return {
        "data_source": task.data_sources[0],
        "prompt": messages,
        "ability": ability or task.name,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {},
    }


def seeded(name: str, row_of: Callable[[Random, str], Row]) -> Callable[..., Iterator[Row]]:
    """Return `make_rows(count, *, split, seed)`, whose row i depends on i, split and seed alone.

    Args:
        row_of: makes a row of the split "train" or "test" out of random numbers.
    """

    def make_rows(count: int, *, split: str, seed: int) -> Iterator[Row]:
        for index in range(count):
            # A string seeds Random through SHA-512: the same in every process, unlike hash().
            rng = Random(f"verl-gdpo {name} {split} {seed} {index}")
            yield row_of(rng, split)

    return make_rows
