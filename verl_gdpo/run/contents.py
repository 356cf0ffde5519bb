"""What a configuration says, in a form in which two of them can be compared: files by content."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

# the last word of keys that may name files, such as `data.train_files`
NAMES_FILES = ("path", "files")
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
    content, found = cache(_content), {}
    for key, value in flat(configuration).items():
        if key.rpartition(".")[2].rpartition("_")[2] not in NAMES_FILES:
            continue
        named = value if isinstance(value, list) else [value]
        contents = [content(str(path)) for path in named]
        if None not in contents:
            found[key] = " ".join(map(str, contents))
    return found


def by_content(configuration: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """{dotted key: value}, where the content of files stands for their names."""
    return {**flat(configuration), **{key: f"sha256 {value}" for key, value in files.items()}}


def _content(name: str) -> str | None:
    """The hash of a file or of a model's folder; None for anything else."""
    path, whole = Path(os.path.expanduser(name)), hashlib.sha256()
    try:
        if (path / "config.json").is_file():
            for part in sorted(filter(Path.is_file, path.iterdir())):
                size = part.stat().st_size
                whole.update(f"{part.name} {size}\n".encode())
                whole.update(part.read_bytes() if size < SMALL_BYTES else b"")
        else:
            with path.open("rb") as file:
                while block := file.read(SMALL_BYTES):
                    whole.update(block)
    except (OSError, ValueError):  # a folder, not readable, or no path at all
        return None
    return whole.hexdigest()
