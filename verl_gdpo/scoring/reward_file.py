"""Loads the file of a reward function as a module that Python can import by its name.

verl runs such a file without a place in `sys.modules` (`verl.utils.import_utils.load_module`). So
nothing of the file can be pickled by its name, which ends a process pool; a dataclass under
`from __future__ import annotations` cannot be defined; and an `import` of a file beside it fails.

Here, the file's folder joins the end of `sys.path`, and the file is imported by its stem, as
`import my_rewards` would. A child of a pool that is forked has the module already. One that is
spawned gets `sys.path`, and imports the module by the same name.

Where `import my_rewards` gives something else, the module has a private name below this module,
with the file's path in it: `verl_gdpo.scoring.reward_file.%2Fhome%2Fme%2Fmy_rewards%2Epy`. A
spawned child imports this module before, which puts `PrivateNames` into its `sys.meta_path`. From
the name alone, this finds the file.
"""

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from urllib.parse import quote, unquote_to_bytes

from verl_gdpo.terminal import line_of_code

logger = logging.getLogger(__name__)

# verl's prefixes of a module and of a file.
PACKAGE_PREFIX = "pkg://"
FILE_PREFIX = "file://"

# Python imports a name below this module only if this module looks like a package.
__path__: list[str] = []


class PrivateNames(MetaPathFinder):
    """Finds the files of private names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, quoted = fullname.rpartition(".")
        if parent != __name__:
            return None
        file = os.fsdecode(unquote_to_bytes(quoted))
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(PrivateNames())


def load(path: str) -> ModuleType:
    """Return the module of a reward function; the same one for the same file.

    Nothing that `sys.modules` has is replaced.

    Args:
        path: a file, which may begin with file://, or pkg://MODULE, as in verl's configuration.

    Raises:
        ValueError: there is no such file or module, or its code fails. The message has the path
            and, of a failure, the file and line.
    """
    if path.startswith(PACKAGE_PREFIX):
        name = path.removeprefix(PACKAGE_PREFIX).replace("/", ".")
        return _imported(name, path)
    file = os.path.abspath(path.removeprefix(FILE_PREFIX))
    stem = inspect.getmodulename(file)
    if not os.path.isfile(file):
        raise ValueError(f"{path}: no such file (looked for {file}). Write its whole path")
    if stem is None:
        raise ValueError(f"{path}: got no Python file; expected a name that ends in .py")
    folder = os.path.dirname(file)
    # At the end, no file of the user's can hide a module of Python or of a package.
    if folder not in sys.path:
        sys.path.append(folder)
    name = stem
    if not _is_file_of(stem, file):
        name = _private_name(file)
    is_new = name not in sys.modules
    module = _imported(name, path)
    # Several functions may stand in one file, and one warning is enough.
    if is_new:
        _let_ray_send_code_of(module)
        if name != stem:
            logger.warning(
                "verl-gdpo: %s is the module %s, because `import %s` gives another module or none. "
                "Rename the file if other code shall import it",
                file,
                name,
                stem,
            )
    return module


def _is_file_of(name: str, file: str) -> bool:
    """Return whether `import name` gives this file."""
    if name in sys.modules:
        found = getattr(sys.modules[name], "__file__", None)
    elif "." in name:
        # Python would look for a package.
        return False
    else:
        # The file may be younger than what Python keeps of folders.
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.has_location:
            return False
        found = spec.origin
    return found is not None and os.path.exists(found) and os.path.samefile(found, file)


def _private_name(file: str) -> str:
    # A dot would begin a module below it.
    quoted = quote(os.fsencode(file), safe="").replace(".", "%2E")
    return f"{__name__}.{quoted}"


def _imported(name: str, path: str) -> ModuleType:
    """Import a module; a failure says where it is."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        # A script may end with sys.exit(), and one that waits for keys with KeyboardInterrupt.
        raise ValueError(f"{path}: cannot be imported: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return what failed, and the file and line."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"SyntaxError: {error.msg} [{error.filename}:{error.lineno}]"
    # The first frame is that of `_imported`.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    place = line_of_code(frames)
    if place.startswith("<frozen"):
        # Nothing of the module has run, so no line of it is to blame.
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error} [{place}]"


def _let_ray_send_code_of(module: ModuleType) -> None:
    """Let Ray send functions and classes of the module with their code, as where verl loads it.

    A reward file may start an actor of Ray. Its process has another `sys.path`, and could not
    import the module by name.
    """
    cloudpickle = sys.modules.get("ray.cloudpickle")
    if cloudpickle is not None:
        cloudpickle.register_pickle_by_value(module)
