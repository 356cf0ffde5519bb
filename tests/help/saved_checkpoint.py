"""A checkpoint as verl's trainer leaves it with FSDP, with empty files."""

import os

from verl_gdpo.run.checkpoints import TRACKER


def save_checkpoint(folder, step, ranks=1, written_at=None):
    """Save it to a folder of checkpoints, whose tracker names it then; return its own folder."""
    checkpoint = folder / f"global_step_{step}"
    (checkpoint / "actor" / "huggingface").mkdir(parents=True)
    for kind in ("model", "optim", "extra_state"):
        for rank in range(ranks):
            (checkpoint / "actor" / f"{kind}_world_size_{ranks}_rank_{rank}.pt").touch()
    (checkpoint / "actor" / "fsdp_config.json").touch()
    rows = checkpoint / "data.pt"
    rows.touch()
    if written_at is not None:
        os.utime(rows, (written_at, written_at))
    (folder / TRACKER).write_text(str(step))
    return checkpoint
