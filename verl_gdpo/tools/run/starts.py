"""Writes and reads the manifest of each start of a run; none is ever overwritten.

RUN/starts/2/start.yaml     what the second start began with; see `StartManifest`
RUN/starts/2/composed.yaml  its configuration as Hydra composed it, with which a run can go on
RUN/starts/2/end.yaml       when and why it ended; not there if nothing could write it

RUN is `run_dir` of our recipes, and else `trainer.default_local_dir`, the folder of checkpoints.
"""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from verl_gdpo.atomic import replace_together
from verl_gdpo.tools.run import checkpoints
from verl_gdpo.tools.run.checkpoints import START, STARTS, manifests_of, unreadable
from verl_gdpo.tools.run_folder.yaml_files import read_mapping

COMPOSED = "composed.yaml"
END = "end.yaml"
TIME_LIMIT_EXIT = 124  # as of timeout(1)
# Packages whose versions can change a result.
PACKAGES = ("verl-gdpo", "verl", "torch", "ray", "vllm", "transformers")
# No value is broken into lines, so that `checkpoints.py`, which has no YAML, finds it in one.
WIDTH = 1 << 20
FileStates = Mapping[str, list[list[int]]]  # {key: [bytes, and seconds since 1970] of each file}


@dataclass(frozen=True)
class StartManifest:
    """What one start of a run began with.

    files: size and time of the files that the configuration names.
    checkpoint: the folder `global_step_N` that it went on from; "" for none.
    changes: {key: [before, after, verdict]} of the settings that differ from those of the start
        that trained up to the checkpoint.
    warnings: what a user was told of the resume.
    recipes: the chosen recipes, such as {"estimator": "grpo"}.
    commit: of the checkout that holds this package; or "".
    metrics: the file in which verl's file logger writes; each training of a launcher has another.
    configuration: as it is written, with its interpolations.
    """

    time: str
    files: FileStates = field(default_factory=dict)
    checkpoint: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = field(default_factory=list)
    recipes: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    command: Sequence[str] = field(default_factory=list)
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
        versions=_versions(),
        commit=_commit(),
        command=list(sys.argv),
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
    numbers = [int(path.name) for path in (run / STARTS).glob("*") if path.name.isdecimal()]
    folder = run / STARTS / str(max(numbers, default=0) + 1)
    folder.mkdir(parents=True)
    # The manifest comes last: without it, the start is none.
    with replace_together(folder / COMPOSED, folder / START) as [configuration, manifest]:
        configuration.write_text(composed, encoding="utf-8")
        manifest.write_text(_yaml(asdict(start)), encoding="utf-8")
    return folder


def link(run: Path, folder: Path) -> None:
    """Let the starts be found from the folder of checkpoints, where it is not in that of the run.

    Raises:
        OSError: the folder of checkpoints cannot be written.
    """
    if run not in (folder, folder.parent) and not (folder / STARTS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STARTS).symlink_to(run / STARTS)


def ended(
    run: Path,
    why: str,
    exit_code: int | None = None,
    metrics: str | None = None,
    otherwise: str = "",
) -> None:
    """Write why the last start of a run ended.

    Args:
        run: folder of the run.
        why: a few words; "" keeps what the training itself wrote.
        exit_code: of the training, as a shell has it.
        metrics: the file of the launcher's last training. If the last start has another, nothing
            is written.
        otherwise: a few words for a training that has written nothing; "" says the exit code.
    """
    starts = starts_of(run)
    if not starts:
        return
    last = starts[-1]
    if metrics is not None and metrics != last.start.metrics:
        return
    end: dict[str, Any] = {
        "time": now(),
        "why": why or last.end.get("why") or otherwise or f"exit code {exit_code}",
    }
    if exit_code is not None:
        end["exit_code"] = exit_code
    with replace_together(last.folder / END) as [temporary]:
        temporary.write_text(_yaml(end), encoding="utf-8")


def starts_of(run: Path) -> list[RecordedStart]:
    """The starts of a run, in their order; given its folder, or that of its checkpoints."""
    return [read_start(manifest) for manifest in manifests_of(run)]


def maker_of(checkpoint: Path) -> RecordedStart | None:
    """The start whose configuration a run goes on with: see `checkpoints.maker_of`."""
    manifest = checkpoints.maker_of(checkpoint)
    if manifest is None:
        return None
    return read_start(manifest)


def read_start(manifest: Path) -> RecordedStart:
    """The start of a manifest.

    Raises:
        ValueError: the manifest, or the record of its end, is damaged.
    """
    try:
        start = _manifest_in(manifest)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(unreadable(manifest, error)) from error
    file_of_end = manifest.with_name(END)
    end: Mapping[str, Any] = {}
    try:
        if file_of_end.exists():
            end = read_mapping(file_of_end)
    except ValueError as error:
        raise ValueError(unreadable(file_of_end, error)) from error
    return RecordedStart(manifest.parent, start, end)


def _manifest_in(file: Path) -> StartManifest:
    """What a file has of a manifest.

    Raises:
        LookupError, TypeError, ValueError: it is damaged.
    """
    values = read_mapping(file)
    # The configuration comes last: a file without it is cut.
    _ = values["configuration"]
    # An older state of this package wrote fields that are not known any more.
    known = {each.name for each in fields(StartManifest)}
    return StartManifest(**{name: value for name, value in values.items() if name in known})


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH))


def code_change(earlier: RecordedStart, now: StartManifest) -> list[str]:
    """A warning if commit or versions are not those of an earlier start."""
    old = _code_of(earlier.start)
    new = _code_of(now)
    changed = []
    for key in old | new:
        before = old.get(key)
        after = new.get(key)
        if before != after:
            changed.append(f"{key} {before!s:.12} -> {after!s:.12}")
    if not changed:
        return []
    return [f"the code is not that of start {earlier.number}: {', '.join(changed)}"]


def _code_of(start: StartManifest) -> dict[str, str]:
    code = dict(start.versions)
    code["commit"] = start.commit
    return code


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _commit() -> str:
    folder = Path(__file__).resolve().parents[3] / ".git"
    git = ["git", f"--git-dir={folder}", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:
        # There is no git here.
        return ""
    return done.stdout.strip()
