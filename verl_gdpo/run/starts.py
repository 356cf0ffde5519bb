"""Writes and reads the manifest of each start of a run; none is ever overwritten.

RUN/starts/2/start.yaml     what the second start began with; see `Start`
RUN/starts/2/composed.yaml  its configuration as Hydra composed it, with which a run can go on
RUN/starts/2/end.yaml       when and why it ended; not there if nothing could write it

RUN is `run_dir` of our recipes, and else `trainer.default_local_dir`, the folder of checkpoints.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from verl_gdpo.atomic import replace_together
from verl_gdpo.run.contents import Contents
from verl_gdpo.run.processes import MARK

FOLDER, START, COMPOSED, END = "starts", "start.yaml", "composed.yaml", "end.yaml"
# verl writes the step of the newest checkpoint into it, beside the checkpoints
TRACKER = "latest_checkpointed_iteration.txt"
SIGNALS, TIME_LIMIT_EXIT = 128, 124  # exit codes of a shell, and of timeout(1)
# packages whose versions can change a result
PACKAGES = ("verl-gdpo", "verl", "torch", "ray", "vllm", "transformers")


@dataclass(frozen=True)
class Start:
    """One start of a run.

    checkpoint: the folder `global_step_N` that it went on from; "" for none.
    changes: {key: [before, after]} of the settings that differ from the start before.
    warnings: what was said of the resume.
    recipes: the chosen recipes, such as {"estimator": "grpo"}.
    code: "commit" and "changed", of the checkout that holds this package; or nothing.
    files: {key: SHA-256} of the files that the configuration names.
    metrics: the file in which verl's file logger wrote.
    mark: of the launcher; "" without one.
    """

    time: str
    files: Mapping[str, str] = field(default_factory=dict)
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
    mark: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)  # the longest part comes last

    @property
    def contents(self) -> Contents:
        """What is compared with other starts."""
        return Contents(self.configuration, self.files)

    @property
    def step(self) -> int:
        """The step that it went on from."""
        return int(self.checkpoint.rpartition("global_step_")[2] or 0)


@dataclass(frozen=True)
class Written:
    """A start that was read, with its folder, and its end as far as it is known."""

    folder: Path
    start: Start
    end: Mapping[str, Any]

    @property
    def number(self) -> int:
        return int(self.folder.name)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def here(configuration: Mapping[str, Any], **more: Any) -> Start:
    """A start at this time, in this process, on this machine."""
    return Start(
        now(),
        configuration=configuration,
        versions=versions(),
        code=_code(),
        machine={
            "name": platform.node(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
        },
        command=tuple(sys.argv),
        folder=str(Path.cwd()),
        metrics=os.environ.get("VERL_FILE_LOGGER_PATH", ""),
        mark=os.environ.get(MARK, ""),
        **more,
    )


def write(run: Path, start: Start, composed: str) -> Path:
    """Write a new start, whole or not at all; return its folder.

    Args:
        composed: the configuration as Hydra composed it, as YAML.

    Raises:
        OSError: the run's folder cannot be written.
    """
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix=".begun-", dir=folder))
    begun.chmod(0o755)
    try:
        (begun / START).write_text(_yaml(asdict(start)))
        (begun / COMPOSED).write_text(composed)
        number = max((one.number for one in starts_in(folder)), default=0) + 1
        while True:
            try:
                # fails if another start took this number
                return begun.rename(folder / str(number))
            except OSError:
                if not (folder / str(number)).exists():
                    raise
                number += 1
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def link(run: Path, checkpoints: Path) -> None:
    """Let the starts be found from the folder of checkpoints, where it is not in that of the run.

    Raises:
        OSError: the folder of checkpoints cannot be written.
    """
    if run in (checkpoints, checkpoints.parent) or (checkpoints / FOLDER).exists():
        return
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / FOLDER).symlink_to(run / FOLDER)


def ended(run: Path, why: str, exit_code: int | None = None, mark: str | None = None) -> None:
    """Write why the last start of a run ended.

    Args:
        run: folder of the run.
        why: a few words; "" keeps what the training itself wrote, or says what the exit code says.
        exit_code: of the training, as a shell has it.
        mark: of the launcher that says this. If the last start has another one, nothing is written.
    """
    starts = starts_of(run)
    if not starts or (mark is not None and starts[-1].start.mark != mark):
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


def starts_of(run: Path) -> list[Written]:
    """The starts of a run, in their order; given its folder, or that of its checkpoints."""
    for folder in (run, run / "checkpoints", run.parent):
        if found := starts_in(folder / FOLDER):
            return found
    return []


def starts_in(folder: Path) -> list[Written]:
    """The starts in a folder `starts`."""
    found = []
    for path in folder.glob(f"*/{START}"):
        if path.parent.name.isdecimal():
            end = path.with_name(END)
            found.append(Written(path.parent, _start(path), _read(end) if end.exists() else {}))
    return sorted(found, key=lambda written: written.number)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that verl would load from the folder of checkpoints; None if it has none."""
    tracker = folder / TRACKER
    step = tracker.read_text().strip() if tracker.exists() else ""
    return folder / f"global_step_{step}" if step else None


def maker_of(checkpoint: Path) -> Written | None:
    """The start whose configuration a run goes on with; None if no start is recorded.

    It is the last start that had begun when the checkpoint was written, or that went on from an
    earlier checkpoint.

    Args:
        checkpoint: a folder `global_step_N`, in the folder of checkpoints.
    """
    rows = checkpoint / "data.pt"  # written when the weights are whole
    made = (rows if rows.exists() else checkpoint).stat().st_mtime
    fitting = [
        one
        for one in starts_of(checkpoint.resolve().parent)
        if one.start.checkpoint or datetime.fromisoformat(one.start.time).timestamp() <= made
    ]
    return fitting[-1] if fitting else None


def _start(path: Path) -> Start:
    read = _read(path)
    read |= {key: tuple(read[key]) for key in ("warnings", "command")}
    return Start(**read)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(
            yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        )
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read: {' '.join(str(error).split())}. It is written once, when the "
            f"run starts; put back the file, or delete {path.parent} if you can do without"
        ) from error


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


def versions() -> dict[str, str]:
    """{package: version} of what can change a result, here."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _code() -> dict[str, Any]:
    """The commit of the checkout that holds this package, and whether its files were changed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):  # no git here, or another user's checkout
        return {}
