"""Calls a scorer so that whatever it raises becomes an error of its sample, and nothing else."""

import asyncio
import builtins
import concurrent.futures
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import verl_gdpo
from verl_gdpo.batch.values import as_text

T = TypeVar("T")

GROUP = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11


class ScorerEscape(RuntimeError):
    """Carries an exception that must not leave a scorer's thread or task in its own type."""


def call(function: Callable[..., T], *args: Any) -> T:
    """Call `function` so that every exception reaches the coroutine that waits for it.

    On Python 3.11, a StopIteration would not reach it, a SystemExit would end the process, and a
    CancelledError would cancel the session.
    """
    try:
        return function(*args)
    except (StopIteration, concurrent.futures.CancelledError) as error:
        raise ScorerEscape from error
    except Exception:
        raise
    except BaseException as error:
        raise ScorerEscape from error


async def in_own_task(scoring: Coroutine[Any, Any, Any]) -> Any:
    """Await a scorer in a task of its own: who waits is cancelled by verl, and not by the scorer.

    In the same task, a CancelledError of the scorer would look like one of verl, and a SystemExit
    or KeyboardInterrupt would end the event loop.
    """

    async def escaping() -> Any:
        try:
            return await scoring
        except Exception:
            raise
        except BaseException as error:
            raise ScorerEscape from error

    task = asyncio.ensure_future(escaping())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return task.result()


def describe(error: BaseException, fields: Mapping[str, Any]) -> str:
    """Return one line with the sample, the error and, unless it is ours, the line of code."""
    if isinstance(error, ScorerEscape) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, GROUP):
        error = error.exceptions[0]
        frames = traceback.extract_tb(error.__traceback__) or frames
    package = Path(verl_gdpo.__file__).parent
    is_ours = not frames or Path(frames[-1].filename).is_relative_to(package)
    place = "" if is_ours else f" [{frames[-1].filename}:{frames[-1].lineno}]"
    try:
        reason = as_text(str(error))
    except BaseException:  # its __str__ is the scorer's too
        reason = "its text cannot be read"
    if not isinstance(error, ValueError) or not reason:
        reason = ": ".join(filter(None, [type(error).__name__, reason]))
    return f"reward manager gdpo, {label_of(fields)}: {reason}{place}"


def label_of(fields: Mapping[str, Any]) -> str:
    """Return the name of a sample for messages."""
    info = fields.get("extra_info")
    return (
        f"prompt uid {fields.get('uid', '?')}, data_source {fields.get('data_source', '?')!r}, "
        f"extra_info.index {info.get('index', '?') if isinstance(info, Mapping) else '?'}"
    )
