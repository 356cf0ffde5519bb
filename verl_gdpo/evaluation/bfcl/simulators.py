"""Makes the calls of a multi-turn question in a process of their own, within limits.

A request holds all calls of a dialogue so far, and is made on fresh simulators. So no dialogue
leaves anything behind for another one, and a process that was ended is simply started again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_gdpo.evaluation.bfcl import simulators_inside
from verl_gdpo.sandbox.limited_process import LimitedPool

LIMIT_CPU_S = 5.0  # for a dialogue; most take milliseconds
LIMIT_BYTES = 1 << 29
MAX_REQUEST_CHARS = 1 << 24  # of all calls; their dialogue is longer than any policy can read

# an entry of the package's files: its "id", "initial_config" and "involved_classes" count here
Entry = Mapping[str, Any]

_pool = LimitedPool(simulators_inside.__file__, LIMIT_CPU_S, LIMIT_BYTES)


class LimitError(Exception):
    """The calls of a dialogue need too much time or memory, or their results are too long."""


def results(entry: Entry, steps: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the result of each call of each step, as the package words it for its models.

    Args:
        entry: of the package.
        steps: calls as Python text: "ls(a=True)". Any text is allowed; none is evaluated.

    Raises:
        LimitError: they need too much.
        OSError: no process can be started, or two in a row die of something else.
    """
    said: list[list[str]] = _ask("results", entry, steps)
    return said


def is_right(
    entry: Entry, turns: Sequence[Sequence[Sequence[str]]], gold: Sequence[Sequence[str]]
) -> bool:
    """Return what the package's checker says of a dialogue.

    Args:
        entry: of the package.
        turns: the calls of each step of each turn; the last step may have none.
        gold: the calls of each turn.

    Raises:
        as `results`.
    """
    return bool(_ask("is_right", entry, turns, gold))


def _ask(task: str, entry: Entry, *given: Any) -> Any:
    needed = {key: entry[key] for key in ("id", "initial_config", "involved_classes")}
    request = json.dumps([task, needed, *given])
    if len(request) < MAX_REQUEST_CHARS:
        replies, is_whole = _pool.ask(request, f"the simulators of bfcl-eval, {entry['id']}")
        if is_whole:
            return replies[-1]
    raise LimitError(
        f"{entry['id']}: the calls need more than {LIMIT_CPU_S:g} s, {LIMIT_BYTES >> 20} MiB or "
        f"{simulators_inside.ROOM_CHARS} characters of results"
    )
