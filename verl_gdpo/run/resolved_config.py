"""Resolves a configuration so that two of them can be compared: flat, and with its files."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

# the last word of keys that may name files, such as `data.train_files`
NAMES_FILES = ("path", "files")
FileStates = Mapping[str, list[list[int]]]  # {key: [bytes, and seconds since 1970] of each file}


def without_environment(config: Any) -> dict[str, Any]:
    """Resolve a DictConfig, except for `${oc.env:...}`, whose value may be a secret.

    If another resolver cannot work with that, all interpolations stay as they are written.
    """

    def as_written(*arguments: Any) -> str:
        return f"${{oc.env:{','.join(map(str, arguments))}}}"

    OmegaConf.register_new_resolver("oc.env", as_written, replace=True)
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        resolved = OmegaConf.to_container(config)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    return dict(resolved)


def flat(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} of a resolved configuration; without keys that are None or empty."""

    def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{path}{name}.")
            elif value is not None and value != []:
                yield f"{path}{name}", value

    return dict(walk(configuration, ""))


def file_states(configuration: Mapping[str, Any]) -> FileStates:
    """Size and time of what the keys name that name files or models on this machine."""
    states = {}
    for key, value in flat(configuration).items():
        if key.rpartition(".")[2].rpartition("_")[2] in NAMES_FILES:
            named = value if isinstance(value, list) else [value]
            of_key = [_state(Path(str(name)).expanduser()) for name in named]
            if all(of_key):
                states[key] = of_key
    return states


def _state(path: Path) -> list[int]:
    """[bytes, seconds] of a file, [bytes] of a model's folder; nothing for anything else."""
    try:
        if (path / "config.json").is_file():
            return [sum(part.stat().st_size for part in path.iterdir() if part.is_file())]
        with path.open("rb"):  # it can be read
            return [path.stat().st_size, int(path.stat().st_mtime)]
    except (OSError, ValueError):  # a folder, not readable, or no path at all
        return []


def with_files(configuration: Mapping[str, Any], files: FileStates) -> dict[str, Any]:
    """{dotted key: value}, where size and time of files stand for their names."""

    def text(size: int, *seconds: int) -> str:
        times = [str(datetime.fromtimestamp(second)) for second in seconds]
        return " of ".join([f"{size} bytes", *times])

    states = {key: ", ".join(text(*state) for state in of_key) for key, of_key in files.items()}
    return {**flat(configuration), **states}
