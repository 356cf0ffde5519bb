"""Says from which checkpoint a run goes on, and which of its starts trained up to it.

    python3 verl_gdpo/run/checkpoints.py RUN

prints the manifest of that start, or an empty line if none is recorded. `run.sh --resume` asks
before an environment is made, so this file imports the standard library alone.

verl 0.9 writes global_step_N/actor, then global_step_N/data.pt, then N into the file `TRACKER`,
which it empties first. Of old checkpoints it removes `actor`, and leaves data.pt.
"""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path

TRACKER, FSDP = "latest_checkpointed_iteration.txt", "fsdp_config.json"
PARTS = "data.pt and, in actor/, the files of all ranks"  # of a whole checkpoint
STARTS, START = "starts", "start.yaml"  # the manifests, which `starts.py` writes
# of a file that each rank of FSDP writes
SHARD = re.compile(r"(.+)_world_size_(\d+)_rank_\d+\.pt")
# of a manifest
TIME, FROM = re.compile(r"^time: '(.+)'$", re.M), re.compile(r"^checkpoint: .*", re.M)


def is_whole(checkpoint: Path) -> bool:
    """Whether a run can go on from it: the rows' position, and `actor` with all its shards."""
    actor = checkpoint / "actor"
    if not (actor.is_dir() and (checkpoint / "data.pt").is_file()):
        return False
    names = {path.name for path in actor.iterdir()}
    expected = {
        f"{kind}_world_size_{match[2]}_rank_{rank}.pt"
        for match in filter(None, map(SHARD.fullmatch, names))
        for kind in ("model", match[1])
        for rank in range(int(match[2]))
    }
    return expected <= names and bool(expected if FSDP in names else names)


def whole_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder of checkpoints."""
    return sorted(step_of(path.name) for path in folder.glob("global_step_*") if is_whole(path))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that the tracker in a folder of checkpoints names; None if nothing was saved.

    If a full disk has left the tracker empty, it is the newest whole one.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    step = tracker.read_text().strip() or "".join(map(str, whole_steps(folder)[-1:]))
    return folder / f"global_step_{step}" if step else None


def whole_checkpoint(folder: Path) -> Path | None:
    """The `newest_checkpoint`, from which a run can go on; None if nothing was saved.

    Raises:
        ValueError: the tracker names a checkpoint that is not whole, or is empty and none is.
    """
    newest, tracker = newest_checkpoint(folder), folder / TRACKER
    if tracker.exists() and not (newest and is_whole(newest)):
        raise ValueError(
            f"{tracker} says {tracker.read_text().strip()!r}, but {folder} has "
            f"{whole_steps(folder) or 'no'} whole checkpoints, with {PARTS}. Write one of these "
            "numbers into it, or delete it to start anew"
        )
    return newest


def manifests_in(folder: Path) -> list[Path]:
    """The manifests in a folder `starts`, in their order."""
    manifests = [path for path in folder.glob(f"*/{START}") if path.parent.name.isdecimal()]
    return sorted(manifests, key=lambda path: int(path.parent.name))


def manifests_of(run: Path) -> list[Path]:
    """The manifests of a run, in their order; given its folder, or that of its checkpoints."""
    folders = (run, run / "checkpoints", run.parent)
    return next(filter(None, (manifests_in(folder / STARTS) for folder in folders)), [])


def maker_of(checkpoint: Path) -> Path | None:
    """The manifest of the start that trained up to a checkpoint; None if none is recorded.

    It is the last one that began before the checkpoint was written, and at an earlier step. So a
    start that went on from the checkpoint, and was stopped before it saved another, does not count.

    Args:
        checkpoint: a folder `global_step_N`, in the folder of checkpoints.
    """
    rows = checkpoint / "data.pt"
    written = (rows if rows.exists() else checkpoint).stat().st_mtime
    for manifest in reversed(manifests_of(checkpoint.resolve().parent)):
        text = manifest.read_text(encoding="utf-8", errors="replace")
        if (time := TIME.search(text)) is None:
            raise ValueError(unreadable(manifest, "no time of its start"))
        step = step_of("".join(FROM.findall(text)))
        if datetime.fromisoformat(time[1]).timestamp() <= written and step < step_of(
            checkpoint.name
        ):
            return manifest
    return None


def step_of(checkpoint: str) -> int:
    """The step of a checkpoint by its name; 0 without one."""
    return int(["0", *re.findall(r"global_step_(\d+)", checkpoint)][-1])


def unreadable(manifest: Path, why: object) -> str:
    """What to do about a manifest that cannot be read."""
    reason = " ".join(str(why).split())
    return f"{manifest}: cannot be read: {reason}. Put back the file, or delete its folder"


def main() -> None:
    run = Path(sys.argv[1])
    try:
        checkpoint = whole_checkpoint(run / "checkpoints")
        if checkpoint is None:
            raise ValueError(f"nothing to resume in '{run}': no checkpoint")
        print(maker_of(checkpoint) or "")
    except (OSError, ValueError) as error:
        sys.exit(f"run.sh: {error}")


if __name__ == "__main__":
    main()
