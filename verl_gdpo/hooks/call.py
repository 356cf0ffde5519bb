"""A call of a function of verl, as one of ours gets it that stands in the place of verl's.

Ours asks for the arguments that it needs by their names, and hands on the call whole. The names are
looked up in the signature of verl's function. So another verl may add a parameter before, between
or behind those that we know, and its function gets it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Only these kinds have a place in a call; a parameter behind `*` has a name alone.
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    places: {name: its number among positional arguments}.
    defaults: {name: its default}.
    """

    places: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Parameters":
        """Read them; there are none where Python knows no signature."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            # Functions that are written in C may have none. The call is then handed on unread.
            return cls()
        places = {}
        defaults = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            if parameter.kind in _POSITIONAL:
                places[name] = number
            if parameter.default is not inspect.Parameter.empty:
                defaults[name] = parameter.default
        return cls(places, defaults)

    def beside(self, others: "Parameters") -> "Parameters":
        """Return these, and those of `others` that have another name.

        A method of the user's may name its parameters in its own way, or take *args. Whoever calls
        it then goes by those of the method of verl that it overrides.
        """
        return Parameters({**others.places, **self.places}, {**others.defaults, **self.defaults})

    def __contains__(self, name: str) -> bool:
        return name in self.places or name in self.defaults


@dataclass(frozen=True)
class Call:
    """The arguments of a call, by the names that verl's function has for them.

    original: verl's function, or one of ours of another table around it.
    """

    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: Parameters

    @property
    def instance(self) -> Any:
        """The object whose method is called."""
        return self.args[0]

    def __contains__(self, name: str) -> bool:
        """Return whether the caller has passed the argument."""
        if name in self.kwargs:
            return True
        place = self.parameters.places.get(name)
        return place is not None and place < len(self.args)

    def __getitem__(self, name: str) -> Any:
        """Return an argument; where the caller has left it out, the default of verl's function.

        Raises:
            TypeError: the caller has left it out, and verl's function has no default.
        """
        # Verl's own callers use both forms, so the keyword is looked for first, then the place.
        if name in self.kwargs:
            return self.kwargs[name]
        if name in self:
            return self.args[self.parameters.places[name]]
        if name in self.parameters.defaults:
            return self.parameters.defaults[name]
        # A partial function has neither a module nor a qualified name.
        module = getattr(self.original, "__module__", "")
        called = getattr(self.original, "__qualname__", repr(self.original))
        raise TypeError(f"verl-gdpo: {module}.{called} was called without {name!r}")

    def get(self, name: str) -> Any:
        """Return an argument as `[]` does; None where there is neither a value nor a default."""
        if name in self or name in self.parameters.defaults:
            return self[name]
        return None

    def takes(self, name: str) -> bool:
        """Return whether verl's function has a parameter of this name."""
        return name in self.parameters

    def changed(self, /, **values: Any) -> "Call":
        """Return the call with other values of some arguments, each in the place where it stood."""
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name, value in values.items():
            # A value that the caller has left out, or passed by its name, is passed by its name. In
            # a place of its own, it would move those behind it.
            place = self.parameters.places.get(name, len(args))
            if name in kwargs or place >= len(args):
                kwargs[name] = value
            else:
                args[place] = value
        return replace(self, args=tuple(args), kwargs=kwargs)

    def hand_on(self) -> Any:
        """Call verl's function with all arguments, and return what it returns."""
        return self.original(*self.args, **self.kwargs)
