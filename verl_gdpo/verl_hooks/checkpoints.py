"""Repairs the file that names the newest checkpoint, which a full disk can leave empty.

Relies on verl 0.9 `PPOTrainer._save_checkpoint`. It first writes all weights, then
`global_step_N/data.pt`, then N into `latest_checkpointed_iteration.txt`, overwriting that file.
"""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"


def mend_tracker(folder: Path) -> None:
    """Write the newest checkpoint's step into the tracker if it is empty.

    verl would stop at `int('')` or start at step 0. verl empties the file before it writes the
    number. So an empty file means that the disk was full after the newest checkpoint was complete.

    Args:
        folder: `trainer.default_local_dir`. If it holds no tracker, nothing happens.

    Raises:
        ValueError: the tracker names a checkpoint that does not exist, or it is empty and no
            checkpoint is complete.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return
    said = tracker.read_text().strip()
    whole = [path.parent.name for path in folder.glob("global_step_*/data.pt")]
    steps = sorted(int(name.removeprefix("global_step_")) for name in whole)
    if said == "" and steps:
        tracker.write_text(str(steps[-1]))
        logger.warning("verl-gdpo: %s was empty; it says %d again", tracker, steps[-1])
    elif not (folder / f"global_step_{said}").is_dir():
        raise ValueError(
            f"{tracker} says {said!r}, but {folder} has {steps or 'no'} whole checkpoints. Write "
            "one of these numbers into it, or delete it to start anew"
        )
