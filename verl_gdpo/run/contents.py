"""What a configuration says, in a form in which two of them can be compared: files by content."""

import hashlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

# the last word of keys that may name files, such as `data.train_files`
NAMES_FILES = ("path", "files")
NOT_READ = ("trainer.resume_from_path",)  # a checkpoint, of which nothing is compared
SMALL_BYTES = 1 << 20  # larger files of a model's folder are compared by their size


def without_environment(config: Any) -> dict[str, Any]:
    """Resolve a DictConfig, except for `${oc.env:...}`, whose value may be a secret.

    If another resolver cannot work with that, all interpolations stay as they are written.
    """

    def as_written(*arguments: Any) -> str:
        return f"${{oc.env:{','.join(map(str, arguments))}}}"

    OmegaConf.register_new_resolver("oc.env", as_written, replace=True)
    try:
        found: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        found = OmegaConf.to_container(config)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    return dict(found)


def flat(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} of a resolved configuration; without keys that are None or empty."""

    def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{path}{name}.")
            elif value is not None and value != []:
                yield f"{path}{name}", value

    return dict(walk(configuration, ""))


def file_contents(configuration: Mapping[str, Any]) -> dict[str, str]:
    """{key: SHA-256 of the content} of the keys that name files or models on this machine."""
    found, known = {}, dict[str, str | None]()
    for key, value in flat(configuration).items():
        if key.rpartition(".")[2].rpartition("_")[2] not in NAMES_FILES or key in NOT_READ:
            continue
        named = value if isinstance(value, list) else [value]
        for path in {*map(str, named)} - {*known}:
            known[path] = _content(Path(os.path.expanduser(path)))
        contents = [known[str(path)] for path in named]
        if None not in contents:
            found[key] = " ".join(map(str, contents))
    return found


@dataclass(frozen=True)
class Contents:
    """A resolved configuration, and the `file_contents` that it had when the run started."""

    configuration: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)

    def compared(self, known: Container[str] | None = None) -> dict[str, Any]:
        """{dotted key: value}, where the content of files stands for their names.

        Args:
            known: the keys whose files are meant; None for all.
        """
        files = {
            key: f"sha256 {value}"
            for key, value in self.files.items()
            if known is None or key in known
        }
        return {**flat(self.configuration), **files}


def differences(before: Contents, after: Contents) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (before, after)} where two differ, with None for a key without a value.

    Files are compared by content if it is known on both sides, and else by name.
    """
    known = before.files.keys() & after.files.keys()
    old, new = before.compared(known), after.compared(known)
    pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _content(path: Path) -> str | None:
    """The hash of a file or of a model's folder; None for anything else."""
    whole = hashlib.sha256()
    try:
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(SMALL_BYTES):
                    whole.update(block)
        elif (path / "config.json").is_file():
            for part in sorted(part for part in path.iterdir() if part.is_file()):
                size = part.stat().st_size
                whole.update(f"{part.name} {size}\n".encode())
                if size < SMALL_BYTES:
                    whole.update(part.read_bytes())
        else:
            return None
    except (OSError, ValueError):  # not readable, or no path at all
        return None
    return whole.hexdigest()
