"""Which checkpoint `trainer.resume_mode=auto` goes on from, where a full disk left that unsaid.

Relies on verl 0.9 `PPOTrainer._save_checkpoint`: it writes `global_step_N/data.pt` after all
weights, and `latest_checkpointed_iteration.txt`, which says N, after that and in place.
"""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"


def mend_tracker(folder: Path) -> None:
    """Let the tracker name a checkpoint, where verl would stop at `int('')` or start at step 0.

    verl empties the file before it writes the number, so what a full disk leaves empty belongs to
    the newest checkpoint, which was whole by then.

    Args:
        folder: `trainer.default_local_dir`. Nothing is done if it holds no tracker.

    Raises:
        ValueError: the tracker names a checkpoint that is not there, or nothing and there is none.
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
