"""Says from which checkpoint a run goes on, and which of its starts trained up to it.

    python3 verl_gdpo/tools/run/checkpoints.py RUN

prints the manifest of that start, or an empty line if none is recorded. `run.sh --resume` asks
before an environment is made, so this file imports the standard library alone.

verl 0.9 writes global_step_N/actor, then global_step_N/data.pt, then N into the file `TRACKER`,
which it empties first. Of old checkpoints it removes `actor`, and leaves data.pt. A power loss can
leave files empty or cut that were written before the tracker. So the sizes of the files are looked
at, and the directories of the archives that `torch.save` writes, but not their contents.
"""

from __future__ import annotations

import re
import shlex
import struct
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

TRACKER = "latest_checkpointed_iteration.txt"
FSDP = "fsdp_config.json"
# The manifests, which `starts.py` writes.
STARTS = "starts"
START = "start.yaml"
# The name of a file that each rank of FSDP writes.
SHARD = re.compile(r"(?P<kind>.+)_world_size_(?P<world_size>\d+)_rank_\d+\.pt")
# Megatron's folders hold these; a file *.distcp of a rank without a tensor may be empty.
NEVER_EMPTY = (".pt", ".json", ".metadata", ".safetensors")
# Lines of a manifest.
TIME = re.compile(r"^time: '(.+)'$", re.M)
FROM = re.compile(r"^checkpoint: .*", re.M)

# The records of a zip archive: APPNOTE.TXT of PKWARE, 4.3.12 and 4.3.14 to 4.3.16.
ZIP_ENTRY = b"PK\x01\x02"
ZIP_END = b"PK\x05\x06"
ZIP64_END = b"PK\x06\x06"
ZIP64_LOCATOR = b"PK\x06\x07"
ENTRY_BYTES = 46
END_BYTES = 22
END64_BYTES = 56
LOCATOR_BYTES = 20


def fault_of(checkpoint: Path) -> str:
    """Why no run can go on from a checkpoint: a file that is missing, empty or cut; "" for none.

    A whole checkpoint has the position in the rows, and `actor` with the shards of all ranks. Of
    the critic and of TransferQueue's state, what is there has to be whole.

    Args:
        checkpoint: a folder `global_step_N`.
    """
    if not checkpoint.is_dir():
        return f"{checkpoint} is missing"
    rows = checkpoint / "data.pt"
    if not rows.is_file():
        return f"{rows} is missing"
    return archive_fault(rows) or state_fault(checkpoint)


def state_fault(checkpoint: Path) -> str:
    """The same without the position in the rows, which verl does without."""
    fault = engine_fault(checkpoint / "actor")
    if fault:
        return fault
    critic = checkpoint / "critic"
    if critic.is_dir():
        fault = engine_fault(critic)
        if fault:
            return fault
    # Only asynchronous trainers write this folder.
    queue = checkpoint / "transfer_queue"
    return _first_empty(sorted(queue.rglob("*.pkl")))


def engine_fault(folder: Path) -> str:
    """Why an engine cannot load `actor` or `critic`; "" if nothing is wrong with its files."""
    if not folder.is_dir():
        return f"{folder} is missing"
    world_sizes_of = _world_sizes_of(folder)
    if world_sizes_of or (folder / FSDP).exists():
        # Whatever else was saved, and from however many ranks: verl saves the model too.
        world_sizes_of_any_kind: set[int] = set()
        for world_sizes in world_sizes_of.values():
            world_sizes_of_any_kind |= world_sizes
        world_sizes_of["model"] = world_sizes_of_any_kind
        return _shards_fault(folder, world_sizes_of)
    if not any(folder.iterdir()):
        return f"{folder} is empty"
    return _fault_of_other_engine(folder)


def _fault_of_other_engine(folder: Path) -> str:
    """What is empty or cut where FSDP has not written: Megatron has folders with its own files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    fault = _first_empty(path for path in files if path.name.endswith(NEVER_EMPTY))
    if fault:
        return fault
    for path in files:
        if path.suffix == ".pt":
            fault = archive_fault(path)
            if fault:
                return fault
    return ""


def model_fault(actor: Path) -> str:
    """Why the weights of FSDP's checkpoint cannot be merged; "" if nothing is wrong.

    The optimizer's shards do not count: they may have been deleted to save space.
    """
    described = (actor / FSDP, actor / "huggingface" / "config.json")
    for path in described:
        if not path.is_file():
            return f"{path} is missing"
    fault = _first_empty(described)
    if fault:
        return fault
    world_sizes = _world_sizes_of(actor).get("model", set())
    return _shards_fault(actor, {"model": world_sizes})


def _world_sizes_of(folder: Path) -> dict[str, set[int]]:
    """{kind, such as "model": the world sizes for which there are shards}."""
    found: dict[str, set[int]] = {}
    for path in folder.iterdir():
        match = SHARD.fullmatch(path.name)
        if match is not None:
            found.setdefault(match["kind"], set()).add(int(match["world_size"]))
    return found


def _shards_fault(folder: Path, world_sizes_of: Mapping[str, set[int]]) -> str:
    """What is missing, empty or cut of the shards of {kind: world sizes}."""
    if not any(world_sizes_of.values()):
        return f"{folder} has no file model_world_size_N_rank_K.pt"
    for kind in sorted(world_sizes_of):
        for world_size in sorted(world_sizes_of[kind]):
            for rank in range(world_size):
                fault = _shard_fault(folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt")
                if fault:
                    return fault
    return ""


def _shard_fault(path: Path) -> str:
    if not path.is_file():
        return f"{path} is missing"
    return archive_fault(path)


def _first_empty(files: Iterable[Path]) -> str:
    for path in files:
        if path.stat().st_size == 0:
            return f"{path} is empty"
    return ""


def archive_fault(path: Path) -> str:
    """What is wrong with an archive of `torch.save`, by its size and directory; "" for nothing.

    The directory stands behind all contents. It says where it begins, which is also the number of
    bytes before it. So a file that lacks bytes, before it or behind, does not agree with it.
    """
    size = path.stat().st_size
    if size == 0:
        return f"{path} is empty"
    cut = f"{path} is cut or damaged: its {size} bytes are not a whole archive of torch.save"
    with path.open("rb") as file:
        file.seek(max(0, size - END64_BYTES - LOCATOR_BYTES - END_BYTES))
        place = _zip_directory(file.read(), size)
        if place is None:
            return cut
        file.seek(place.begin)
        directory = file.read(place.length)
    if not _has_entries(directory, place.entries):
        return cut
    return ""


class _ZipDirectory(NamedTuple):
    """Where an archive says that its directory is.

    begin: its first byte.
    length: how many bytes it has.
    entries: how many files it lists.
    """

    begin: int
    length: int
    entries: int


def _zip_directory(tail: bytes, size: int) -> _ZipDirectory | None:
    """Where the directory of an archive is; None if the archive is not whole.

    Args:
        tail: the last bytes of the file, without a comment behind them.
        size: bytes of the file.
    """
    end = tail[-END_BYTES:]
    if len(end) < END_BYTES or not end.startswith(ZIP_END):
        return None
    first_byte_behind = size - END_BYTES
    entries, length, begin = struct.unpack_from("<HII", end, 10)
    # The records of large archives, which torch always writes, stand between directory and end.
    locator = tail[-END_BYTES - LOCATOR_BYTES : -END_BYTES]
    if locator.startswith(ZIP64_LOCATOR):
        first_byte_behind -= LOCATOR_BYTES + END64_BYTES
        before_locator = tail[: -END_BYTES - LOCATOR_BYTES]
        end64 = before_locator[-END64_BYTES:]
        if len(end64) < END64_BYTES or not end64.startswith(ZIP64_END):
            return None
        entries, length, begin = struct.unpack_from("<QQQ", end64, 32)
    if begin + length != first_byte_behind:
        return None
    return _ZipDirectory(begin, length, entries)


def _has_entries(directory: bytes, entries: int) -> bool:
    """Whether the directory of an archive has so many entries, and nothing behind them."""
    if entries == 0:
        return False
    place = 0
    for _ in range(entries):
        header = directory[place : place + ENTRY_BYTES]
        if len(header) < ENTRY_BYTES or not header.startswith(ZIP_ENTRY):
            return False
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", header, 28)
        place += ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes
    return place == len(directory)


def is_whole(checkpoint: Path) -> bool:
    """Whether a run can go on from it."""
    return not fault_of(checkpoint)


def whole_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder of checkpoints."""
    return sorted(step_of(path.name) for path in folder.glob("global_step_*") if is_whole(path))


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints: that in its own folder, or verl's, which is both."""
    if (run / TRACKER).is_file():
        return run
    return run / "checkpoints"


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that the tracker in a folder of checkpoints names; None if nothing was saved.

    If a full disk has left the tracker empty, it is the newest whole one.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    step = _text_of(tracker)
    if step:
        return folder / f"global_step_{step}"
    steps = whole_steps(folder)
    if not steps:
        return None
    return folder / f"global_step_{steps[-1]}"


def _text_of(tracker: Path) -> str:
    """What the tracker says. A power loss may leave other bytes in it than those of a text."""
    return tracker.read_text(encoding="utf-8", errors="replace").strip()


def whole_checkpoint(folder: Path) -> Path | None:
    """The `newest_checkpoint`, from which a run can go on; None if nothing was saved.

    Raises:
        ValueError: the tracker names a checkpoint that is not whole, or is empty and none is. The
            message has the line that goes on from the newest whole one.
    """
    newest = newest_checkpoint(folder)
    tracker = folder / TRACKER
    if newest is None:
        if not tracker.exists():
            return None
        fault = f"{folder} has no whole checkpoint"
    else:
        fault = fault_of(newest)
        if not fault:
            return newest
    steps = whole_steps(folder)
    if steps:
        advice = (
            f"Whole are the checkpoints of the steps {steps}. To go on from the newest of them, "
            f"write its step: echo {steps[-1]} > {shlex.quote(str(tracker))}, and give the same "
            "command again"
        )
    else:
        advice = f"No checkpoint there is whole. Delete {tracker} to start anew"
    raise ValueError(f"{tracker} says {_text_of(tracker)!r}, but {fault}. {advice}")


def manifests_in(folder: Path) -> list[Path]:
    """The manifests in a folder `starts`, in their order."""
    manifests = [path for path in folder.glob(f"*/{START}") if path.parent.name.isdecimal()]
    return sorted(manifests, key=lambda path: int(path.parent.name))


def manifests_of(run: Path) -> list[Path]:
    """The manifests of a run, in their order; given its folder, or that of its checkpoints."""
    for folder in (run, run / "checkpoints", run.parent):
        manifests = manifests_in(folder / STARTS)
        if manifests:
            return manifests
    return []


def maker_of(checkpoint: Path) -> Path | None:
    """The manifest of the start that trained up to a checkpoint; None if none is recorded.

    It is the last one that began before the checkpoint was written, and at an earlier step. So a
    start that went on from the checkpoint, and was stopped before it saved another, does not count.

    Args:
        checkpoint: a folder `global_step_N`, in the folder of checkpoints.
    """
    dated = checkpoint / "data.pt"
    if not dated.exists():
        dated = checkpoint
    written = dated.stat().st_mtime
    for manifest in reversed(manifests_of(checkpoint.resolve().parent)):
        text = manifest.read_text(encoding="utf-8", errors="replace")
        time = TIME.search(text)
        if time is None:
            raise ValueError(unreadable(manifest, "no time of its start"))
        began = datetime.fromisoformat(time[1]).timestamp()
        went_on_from = step_of("".join(FROM.findall(text)))
        if began <= written and went_on_from < step_of(checkpoint.name):
            return manifest
    return None


def step_of(checkpoint: str) -> int:
    """The step of a checkpoint by its name; 0 without one."""
    steps = re.findall(r"global_step_(\d+)", checkpoint)
    if not steps:
        return 0
    return int(steps[-1])


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
