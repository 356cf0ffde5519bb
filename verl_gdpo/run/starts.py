"""Writes and reads the manifest of each start of a run; none is ever overwritten.

RUN/starts/2/start.yaml     what the second start began with; see `StartManifest`
RUN/starts/2/composed.yaml  its configuration as Hydra composed it, with which a run can go on
RUN/starts/2/end.yaml       when and why it ended; not there if nothing could write it

RUN is `run_dir` of our recipes, and else `trainer.default_local_dir`, the folder of checkpoints.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from verl_gdpo.atomic import replace_together
from verl_gdpo.run import checkpoints
from verl_gdpo.run.checkpoints import START, STARTS, manifests_in, manifests_of, unreadable
from verl_gdpo.run.resolved_config import FileStates

COMPOSED, END = "composed.yaml", "end.yaml"
FIRST, LAST = "---\n", "...\n"  # around a file of YAML, so that a cut one is seen
SIGNALS, TIME_LIMIT_EXIT = 128, 124  # exit codes of a shell, and of timeout(1)
# packages whose versions can change a result
PACKAGES = ("verl-gdpo", "verl", "torch", "ray", "vllm", "transformers")


@dataclass(frozen=True)
class StartManifest:
    """What one start of a run began with.

    checkpoint: the folder `global_step_N` that it went on from; "" for none.
    changes: {key: [before, after, verdict]} of the settings that differ from those of the start
        that trained up to the checkpoint.
    warnings: what a user was told of the resume.
    recipes: the chosen recipes, such as {"estimator": "grpo"}.
    code: "commit", and "changed", a hash of what was changed since, or False; of the checkout that
        holds this package. Or nothing.
    files: size and time of the files that the configuration names.
    metrics: the file in which verl's file logger writes; each launcher gives another one.
    """

    time: str
    files: FileStates = field(default_factory=dict)
    checkpoint: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folder: str = ""
    wandb_run_id: str = ""
    metrics: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)  # the longest part comes last

    @property
    def step(self) -> int:
        """The step that it went on from."""
        return checkpoints.step_of(self.checkpoint)


@dataclass(frozen=True)
class RecordedStart:
    """A manifest that was read, with its folder, and the end of this start if it is known."""

    folder: Path
    start: StartManifest
    end: Mapping[str, Any]

    @property
    def number(self) -> int:
        return int(self.folder.name)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def here(configuration: Mapping[str, Any], **more: Any) -> StartManifest:
    """The manifest of a start at this time, in this process, on this machine."""
    return StartManifest(
        now(),
        configuration=configuration,
        versions=versions(),
        code=_code(),
        machine={"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
        command=tuple(sys.argv),
        folder=str(Path.cwd()),
        metrics=os.environ.get("VERL_FILE_LOGGER_PATH", ""),
        **more,
    )


def write(run: Path, start: StartManifest, composed: str) -> Path:
    """Write a new start, whole or not at all; return its folder.

    Args:
        composed: the configuration as Hydra composed it, as YAML.

    Raises:
        OSError: the run's folder cannot be written.
    """
    last = max((int(manifest.parent.name) for manifest in manifests_in(run / STARTS)), default=0)
    for number in count(last + 1):
        folder = run / STARTS / str(number)
        with contextlib.suppress(FileExistsError):  # another start took this number
            folder.mkdir(parents=True)
            break
    # the manifest comes last: without it, the start is none
    with replace_together(folder / COMPOSED, folder / START) as [configuration, manifest]:
        configuration.write_text(composed)
        manifest.write_text(_yaml(asdict(start)))
    return folder


def link(run: Path, folder: Path) -> None:
    """Let the starts be found from the folder of checkpoints, where it is not in that of the run.

    Raises:
        OSError: the folder of checkpoints cannot be written.
    """
    if run in (folder, folder.parent) or (folder / STARTS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTS).symlink_to(run / STARTS)


def ended(run: Path, why: str, exit_code: int | None = None, metrics: str | None = None) -> None:
    """Write why the last start of a run ended.

    Args:
        run: folder of the run.
        why: a few words; "" keeps what the training itself wrote, or says what the exit code says.
        exit_code: of the training, as a shell has it.
        metrics: the file that the launcher has given. If the last start has another, nothing is
            written.
    """
    starts = starts_of(run)
    if not starts or (metrics is not None and starts[-1].start.metrics != metrics):
        return
    end: dict[str, Any] = {"time": now(), "why": why}
    if exit_code is not None:
        by_signal = exit_code > SIGNALS or exit_code == TIME_LIMIT_EXIT
        known = "" if by_signal else starts[-1].end.get("why")
        end |= {"why": why or known or _of_code(exit_code), "exit_code": exit_code}
    with replace_together(starts[-1].folder / END) as [temporary]:
        temporary.write_text(_yaml(end))


def _of_code(exit_code: int) -> str:
    if exit_code == TIME_LIMIT_EXIT:
        return "time limit"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(exit_code - SIGNALS).name}"
    return "finished" if exit_code == 0 else f"exit code {exit_code}"


def starts_of(run: Path) -> list[RecordedStart]:
    """The starts of a run, in their order; given its folder, or that of its checkpoints."""
    return [read_start(manifest) for manifest in manifests_of(run)]


def maker_of(checkpoint: Path) -> RecordedStart | None:
    """The start whose configuration a run goes on with: see `checkpoints.maker_of`."""
    manifest = checkpoints.maker_of(checkpoint)
    return None if manifest is None else read_start(manifest)


def read_start(manifest: Path) -> RecordedStart:
    """The start of a manifest."""
    end = manifest.with_name(END)
    return RecordedStart(
        manifest.parent, _read(manifest, _manifest), _read(end) if end.exists() else {}
    )


def _manifest(values: Mapping[str, Any]) -> StartManifest:
    kept = {**values}
    kept.pop("mark", None)  # manifests of before have it, and hashes of files
    files = {key: state for key, state in kept["files"].items() if isinstance(state, list)}
    texts = {key: tuple(kept[key]) for key in ("warnings", "command")}
    return StartManifest(**{**kept, **texts, "files": files})


def _read(path: Path, made_of: Callable[[Mapping[str, Any]], Any] = dict) -> Any:
    try:
        text = path.read_text()
        if text.startswith(FIRST) and not text.endswith(LAST):
            raise ValueError("it is cut")
        return made_of(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ValueError(unreadable(path, error)) from error


def _yaml(values: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    return f"{FIRST}{text}{LAST}"


def code_change(earlier: RecordedStart, now: StartManifest) -> tuple[str, ...]:
    """A warning if code or versions are not those of an earlier start."""
    old, new = ({**start.versions, **start.code} for start in (earlier.start, now))
    changes = [
        f"{key} {old.get(key)!s:.12} -> {new.get(key)!s:.12}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]
    warning = f"the code is not that of start {earlier.number}: {', '.join(changes)}"
    return (warning,) if changes else ()


def versions() -> dict[str, str]:
    """{package: version} of what can change a result, here."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _code() -> dict[str, Any]:
    """The commit of the checkout that holds this package, and a hash of what was changed since."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout

    try:
        commit, changed = git("rev-parse", "HEAD").decode().strip(), bool(git("status", "-s"))
        edits = hashlib.sha256(git("diff", "HEAD"))
        for name in git("ls-files", "-zo", "--exclude-standard", "verl_gdpo").split(b"\0")[:-1]:
            edits.update(name + (root / os.fsdecode(name)).read_bytes())
    except (OSError, subprocess.CalledProcessError):  # no git here, or another user's checkout
        return {}
    return {"commit": commit, "changed": changed and edits.hexdigest()}
