"""Calls functions of ours in the place of verl's: the only way in which this package changes verl.

`verl_gdpo/plugin.py` has the table of what is changed. What is put in the place of verl's function
is a plain function, which Ray can pickle even if a user's `__main__` holds it. It imports ours at
its first call, and passes verl's own as the first argument.

Methods of trainers and of their buffers are extended when one is made: in the class that has the
method, which may be a user's. Such a class may also make a trainer without gdpo, so that ours is
called for an instance to which `attach` has given a record, and once a call: a method of a user's
may call the one of verl that it overrides.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from verl_gdpo.hooks.gates import refuse, refuse_or_call, warn

Function = Callable[..., Any]

RECORD = "verl_gdpo_record"  # the attribute of an instance that holds what we keep for it


@dataclass(frozen=True)
class Extension:
    """One name of verl that we change; without a `replacement`, one that we only use."""

    module: str  # of verl
    name: str  # NAME or CLASS.NAME, with the (PARAMETERS) that ours needs
    replacement: str = ""  # MODULE:FUNCTION of this package
    at_construction: bool = False  # of a trainer; else as soon as the module is imported
    only_for: str = ""  # what needs it, and what to do without it; gdpo itself does not need it

    @property
    def path(self) -> str:
        """NAME or CLASS.NAME."""
        return self.name.partition("(")[0]

    @property
    def is_required(self) -> bool:
        """Whether gdpo is refused without it."""
        return not self.only_for

    @property
    def symbol(self) -> str:
        """The name as messages give it."""
        return f"{self.module}:{self.name}"

    def is_missing(self) -> bool:
        """Return whether the installed verl lacks the name or one of the parameters."""
        try:
            return self.is_missing_in(importlib.import_module(self.module))
        except ImportError:
            return True

    def is_missing_in(self, module: ModuleType) -> bool:
        """Return whether this module lacks the name or one of the parameters."""
        parameters = self.name.removesuffix(")").partition("(")[2]
        try:
            value = getattr(*_place(module, self.path))
            known = {*inspect.signature(value).parameters} if parameters else set()
        except (AttributeError, TypeError, ValueError):
            return True
        return bool(parameters) and not {*parameters.split(",")} <= known


def extensions(
    table: Mapping[str, Mapping[str, str]],
    room: str = "hooks",
    *,
    at_construction: bool = False,
    only_for: str = "",
) -> tuple[Extension, ...]:
    """Return the rows of a table {module: {name: replacement, a MODULE:FUNCTION of the room}}."""
    return tuple(
        Extension(module, name, ours and f"{room}.{ours}", at_construction, only_for)
        for module, rows in table.items()
        for name, ours in rows.items()
    )


def say_what_is_missing(missing: Iterable[Extension], on_missing: Function = refuse) -> None:
    """Call `on_missing` with one line for the rows that gdpo needs, and warn of the others."""
    required = []
    for extension in missing:
        if extension.is_required:
            required.append(extension.symbol)
        else:
            warn(f"verl has no {extension.symbol}, which is for {extension.only_for}")
    if required:
        on_missing(f"verl has no {', '.join(required)}")


def _place(module: Any, path: str) -> tuple[Any, str]:
    """Return (owner, name); of an actor class of Ray, the owner is the class that Ray sends."""
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    return getattr(getattr(owner, "__ray_metadata__", None), "modified_class", owner), name


table: list[Extension] = []  # what `extend_when_imported` was called with


def extend_when_imported(extensions: Iterable[Extension], on_missing: Function = refuse) -> None:
    """Extend each module right after verl imports it.

    Args:
        on_missing: called with one line for each module that lacks names which gdpo needs.
    """
    added = [*extensions]
    table.extend(added)

    def extend(module: ModuleType) -> None:
        extensions = [each for each in added if each.module == module.__name__]
        extend_module(module, extensions, on_missing)

    for name in dict.fromkeys(each.module for each in added):
        wrapt.register_post_import_hook(extend, name)


def extend_module(
    module: ModuleType, extensions: Iterable[Extension], on_missing: Function = refuse
) -> None:
    """Put our functions into a module and its classes; verl's stays where a name is missing."""
    extensions = list(extensions)
    missing = [each for each in extensions if each.is_missing_in(module)]
    say_what_is_missing(missing, on_missing)
    for extension in extensions:
        is_due = extension.replacement and not extension.at_construction
        if is_due and extension not in missing:
            _replace(*_place(module, extension.path), extension)


def extend_instance(instance: Any, kind: str, record: Any) -> None:
    """Give a record to an instance, and extend the methods of the class `kind` that it has."""
    attach(instance, record)
    for extension in table:
        owner, _, name = extension.path.partition(".")
        if extension.at_construction and owner == kind:
            has_it = (each for each in type(instance).__mro__ if name in vars(each))
            if (definer := next(has_it, None)) is not None:
                _replace(definer, name, extension)


def attach(instance: Any, record: Any) -> None:
    """Keep a record for this instance, as long as it lives."""
    vars(instance)[RECORD] = record


def record_of(instance: Any) -> Any:
    """Return the record of this instance; None without gdpo."""
    return getattr(instance, RECORD, None)


def _replace(owner: Any, name: str, extension: Extension) -> None:
    original = layer = getattr(owner, name)
    room = extension.replacement.partition(".")[0]
    while hasattr(layer, "verl_gdpo_extension"):  # one of each room, as of hooks and of cpu
        if layer.verl_gdpo_extension.replacement.partition(".")[0] == room:
            return
        layer = layer.__wrapped__
    stand_in = _standing_for(original, extension)
    setattr(owner, name, stand_in)
    # modules of `VERL_USE_EXTERNAL_MODULES` are loaded before us, and may have imported verl's
    is_defined_there = original.__module__ == getattr(owner, "__name__", "")
    for module in [*sys.modules.values()] if is_defined_there else ():
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, stand_in)


def _standing_for(original: Function, extension: Extension) -> Function:
    """Return a function that calls ours with verl's; a coroutine function for one of verl."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def wait_instead(*args: Any, **kwargs: Any) -> Any:
            with _turn(extension, args) as function:
                return await function(original, *args, **kwargs)

        stand_in: Any = wait_instead
    else:

        @functools.wraps(original)
        def call_instead(*args: Any, **kwargs: Any) -> Any:
            with _turn(extension, args) as function:
                return function(original, *args, **kwargs)

        stand_in = call_instead
    stand_in.verl_gdpo_extension = extension
    return stand_in  # type: ignore[no-any-return]


@contextmanager
def _turn(extension: Extension, args: tuple[Any, ...]) -> Iterator[Function]:
    """Yield our function, or one that calls verl's: without a record, and within the same call."""
    if not extension.at_construction:
        yield load(extension.replacement, extension.is_required)
        return
    record, name = record_of(args[0]), extension.path.rpartition(".")[2]
    if record is None or name in record.busy:
        yield call_original
        return
    record.busy.add(name)
    try:
        yield load(extension.replacement, extension.is_required)
    finally:
        record.busy.discard(name)


def call_original(original: Function, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


@functools.cache
def load(replacement: str, is_required: bool = True) -> Function:
    """Import a function of ours; if that fails, say why once, and refuse gdpo if it is required."""
    module, _, name = replacement.partition(":")
    try:
        function: Function = getattr(importlib.import_module(f"verl_gdpo.{module}"), name)
    except Exception as error:  # verl must keep working for users who do not use gdpo
        reason = f"{module}: {type(error).__name__}: {error}"
        if is_required:
            refuse(reason)
            return refuse_or_call
        warn(f"{reason}. verl's own function is called in the place of {name}")
        return call_original
    return function


def load_all() -> None:
    """Import all functions of ours, so that gdpo is refused before a model is loaded."""
    for extension in table:
        if extension.replacement:
            load(extension.replacement, extension.is_required)
