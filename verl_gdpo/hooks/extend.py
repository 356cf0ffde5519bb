"""Calls functions of ours in the place of verl's: the only way in which this package changes verl.

The tables of what is changed are in `verl_gdpo/plugin.py`, `verl_gdpo/tools/run/plugin.py` and
`verl_gdpo/cpu/plugin.py`. What is put in the place of verl's function is a plain function, which
Ray can pickle even if a user's `__main__` holds it. It imports ours at its first call, and gives it
the call: see `call.py`.

Two tables may extend one function of verl. Ours of the first table of `TABLES` is called first,
whichever table was loaded first.

Methods of trainers and of their buffers are extended when one is made: in the class that has the
method, which may be a user's. Such a class may also make a trainer without gdpo, so that ours is
called for an instance to which `attach` has given a record, and once a call: a method of a user's
may call the one of verl that it overrides.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from verl_gdpo.hooks.call import Call, Parameters
from verl_gdpo.hooks.refusal import refuse, refuse_or_call, warn

Function = Callable[..., Any]

# The attribute of an instance that holds what we keep for it.
RECORD = "verl_gdpo_record"
# The tables, in the order in which their functions are called.
TABLES = ("core", "run", "cpu")


@dataclass(frozen=True)
class Extension:
    """One name of verl that we change; without a `replacement`, one that we only use.

    module: of verl.
    path: FUNCTION, CLASS or CLASS.METHOD in the module.
    replacement: our function, as MODULE:FUNCTION. It gets the call, which it hands on.
    needs: the parameters that verl's function must have: those that ours asks the call for.
    others: its other parameters without a default, in the versions that were tested.
    at_construction: whether it is extended when a trainer or its buffer is made, and for that
        instance alone; else as soon as verl has imported the module.
    only_for: what needs it, and what to do without it; gdpo itself does not need it then.
    table: one of `TABLES`.
    lost: what is lost if verl goes past ours, although it has the name; see `net.py`.
    ends_run: whether other numbers would then be trained, so that the first step ends the run.
    """

    module: str
    path: str
    replacement: str = ""
    needs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    at_construction: bool = False
    only_for: str = ""
    table: str = "core"
    lost: str = ""
    ends_run: bool = False

    @property
    def is_required(self) -> bool:
        """Whether gdpo is refused without it."""
        return not self.only_for

    @property
    def symbol(self) -> str:
        """The name as messages give it."""
        parameters = f"({','.join(self.needs)})" if self.needs else ""
        return f"{self.module}:{self.path}{parameters}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def is_missing(self) -> bool:
        """Return whether the installed verl lacks the name or one of the parameters."""
        try:
            return self.is_missing_in(importlib.import_module(self.module))
        except ImportError:
            return True

    def unknown_parameters(self) -> list[str]:
        """Return the parameters without a default that no tested verl has; [] without the name."""
        try:
            owner, name = _place(importlib.import_module(self.module), self.path)
            parameters = inspect.signature(getattr(owner, name)).parameters.values()
        except (ImportError, AttributeError, TypeError, ValueError):
            return []
        known = {"self", *self.needs, *self.others}
        unknown = []
        for parameter in parameters:
            is_required = parameter.default is inspect.Parameter.empty
            # *args and **kwargs have no default either, and take what is left.
            is_named = parameter.kind not in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            if is_required and is_named and parameter.name not in known:
                unknown.append(parameter.name)
        return unknown

    def is_missing_in(self, module: ModuleType) -> bool:
        """Return whether this module lacks the name or one of the parameters."""
        try:
            owner, name = _place(module, self.path)
            value = getattr(owner, name)
            if not self.needs:
                return False
            # A class has the parameters of its constructor, without `self`.
            parameters = inspect.signature(value).parameters
        except (AttributeError, TypeError, ValueError):
            return True
        return any(name not in parameters for name in self.needs)


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
    owner = module
    for each in owners:
        owner = getattr(owner, each)
    # Ray replaces a class that is decorated with @ray.remote, and keeps the one that it sends.
    metadata = getattr(owner, "__ray_metadata__", None)
    return getattr(metadata, "modified_class", owner), name


# --- putting ours in the place of verl's ----------------------------------------------------------

table: list[Extension] = []  # what `extend_when_imported` was called with
extended: set[str] = set()  # the classes of which this process has extended an instance


def extend_when_imported(extensions: Iterable[Extension], on_missing: Function = refuse) -> None:
    """Extend each module right after verl imports it.

    Args:
        on_missing: called with one line for each module that lacks names which gdpo needs.
    """
    # One hook a module: it runs once, with all rows of the module.
    of_module: dict[str, list[Extension]] = {}
    for extension in extensions:
        table.append(extension)
        of_module.setdefault(extension.module, []).append(extension)

    def extend(module: ModuleType) -> None:
        extend_module(module, of_module[module.__name__], on_missing)

    # A module that is loaded already is extended at once.
    for name in of_module:
        wrapt.register_post_import_hook(extend, name)


def extend_module(
    module: ModuleType, extensions: Iterable[Extension], on_missing: Function = refuse
) -> None:
    """Put our functions into a module and its classes; verl's stays where a name is missing."""
    missing = []
    for extension in extensions:
        if extension.is_missing_in(module):
            missing.append(extension)
        # Rows without a replacement are only looked for, and methods wait for their instance.
        elif extension.replacement and not extension.at_construction:
            owner, name = _place(module, extension.path)
            _replace(owner, name, extension)
    say_what_is_missing(missing, on_missing)


def extend_instance(instance: Any, kind: str, record: Any) -> None:
    """Give a record to an instance, and extend the methods of the class `kind` that it has."""
    attach(instance, record)
    extended.add(kind)
    for extension in rows_of_kind(kind):
        owner = owner_of_method(type(instance), extension.name)
        if owner is not None:
            _replace(owner, extension.name, extension)


def rows_of_kind(kind: str) -> list[Extension]:
    """Return the rows for the methods of a class that are extended when an instance is made."""
    rows = []
    for extension in table:
        owner = extension.path.partition(".")[0]
        if extension.at_construction and owner == kind:
            rows.append(extension)
    return rows


def owner_of_method(cls: type, name: str) -> type | None:
    """Return the class that has a method, which may be verl's or a user's; None if none has."""
    for each in cls.__mro__:
        if name in vars(each):
            return each
    return None


def place_of(extension: Extension) -> tuple[Any, str] | None:
    """Return (owner, name) in verl's module; None if it is not loaded, or lacks the name."""
    module = sys.modules.get(extension.module)
    if module is None:
        return None
    try:
        owner, name = _place(module, extension.path)
        getattr(owner, name)
    except AttributeError:
        return None
    return owner, name


def has_ours(function: Any, extension: Extension) -> bool:
    """Return whether ours stands for a function, below whatever stands around it."""
    while function is not None:
        if getattr(function, "verl_gdpo_extension", None) == extension:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def attach(instance: Any, record: Any) -> None:
    """Keep a record for this instance, as long as it lives."""
    vars(instance)[RECORD] = record


def record_of(instance: Any) -> Any:
    """Return the record of this instance; None without gdpo."""
    return getattr(instance, RECORD, None)


def _replace(owner: Any, name: str, extension: Extension) -> None:
    """Put ours in the place of a function of a module or a class, once for each table."""
    current = getattr(owner, name)
    if extension.table in _tables_of(current):
        return
    # What of ours is called after this one: it stays below.
    above = []
    original = current
    while _is_stand_in(original) and _comes_before(original.verl_gdpo_extension, extension):
        above.append(original.verl_gdpo_extension)
        original = original.__wrapped__
    # Those above are made anew around it, in the order in which they stood.
    stand_in = _standing_for(original, extension)
    for each in reversed(above):
        stand_in = _standing_for(stand_in, each)
    setattr(owner, name, stand_in)
    if not _is_shared(owner, current):
        return
    # The module in which it is defined, where the one of the table only hands it on, and all that
    # have taken it by now. Modules of `VERL_USE_EXTERNAL_MODULES` are loaded before us.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is current:
            setattr(module, name, stand_in)


def _is_shared(owner: Any, function: Any) -> bool:
    """Return whether ours stands for a function wherever it is, and not in this place alone.

    A class stays elsewhere what it is, because others ask what is an instance of it. So does what a
    module has of another package.
    """
    if not isinstance(owner, ModuleType) or not inspect.isfunction(function):
        return False
    package = function.__module__.partition(".")[0]
    return package == owner.__name__.partition(".")[0]


def _tables_of(function: Any) -> set[str]:
    """Return the tables of which a function has ours already, below whatever stands around it."""
    tables = set()
    # A wrapper of a user's that was made with `functools.wraps` is passed through as well.
    while hasattr(function, "verl_gdpo_extension"):
        tables.add(function.verl_gdpo_extension.table)
        function = function.__wrapped__
    return tables


def _is_stand_in(function: Any) -> bool:
    """Return whether it is of `_standing_for`, and not a wrapper of a user's that looks like it.

    `functools.wraps` copies our attribute onto such a wrapper.
    """
    code = getattr(function, "__code__", None)
    has_extension = hasattr(function, "verl_gdpo_extension")
    return has_extension and getattr(code, "co_filename", None) == __file__


def _comes_before(one: Extension, other: Extension) -> bool:
    return TABLES.index(one.table) < TABLES.index(other.table)


def _standing_for(original: Function, extension: Extension) -> Function:
    """Return a function that gives the call to ours; a coroutine function for one of verl."""
    # They are read here, once: `inspect` takes longer than many of the calls.
    parameters = Parameters.of(original).beside(_parameters_of_verls(extension))
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def wait_instead(*args: Any, **kwargs: Any) -> Any:
            with _turn(extension, args) as function:
                return await function(Call(original, args, kwargs, parameters))

        stand_in: Any = wait_instead
    else:

        @functools.wraps(original)
        def call_instead(*args: Any, **kwargs: Any) -> Any:
            with _turn(extension, args) as function:
                return function(Call(original, args, kwargs, parameters))

        stand_in = call_instead
    # By this attribute, `has_ours` and `net.py` know that ours is in place.
    stand_in.verl_gdpo_extension = extension
    return stand_in  # type: ignore[no-any-return]


def _parameters_of_verls(extension: Extension) -> Parameters:
    """Return the parameters of verl's own function, which one of the user's may override."""
    try:
        owner, name = _place(sys.modules[extension.module], extension.path)
        return Parameters.of(getattr(owner, name))
    except (KeyError, AttributeError):
        return Parameters()


# --- calling ours ---------------------------------------------------------------------------------


@contextmanager
def _turn(extension: Extension, args: tuple[Any, ...]) -> Iterator[Function]:
    """Yield our function, or one that calls verl's: without a record, and within the same call."""
    # A function of a module belongs to no run, so ours looks at the configuration itself.
    if not extension.at_construction:
        yield load(extension.replacement, extension.is_required)
        return
    record = record_of(args[0])
    call = (extension.table, extension.name)
    if record is None or call in record.busy:
        yield call_original
        return
    # Until this call ends, the same name of this instance is verl's: `super()` reaches it so.
    record.busy.add(call)
    try:
        yield load(extension.replacement, extension.is_required)
    finally:
        record.busy.discard(call)


def call_original(call: Call) -> Any:
    return call.hand_on()


@functools.cache
def load(replacement: str, is_required: bool = True) -> Function:
    """Import a function of ours; if that fails, say why once, and refuse gdpo if it is required.

    Args:
        replacement: MODULE:FUNCTION.
    """
    module, _, name = replacement.partition(":")
    try:
        function: Function = getattr(importlib.import_module(module), name)
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
