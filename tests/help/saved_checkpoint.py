"""A checkpoint as verl's trainer leaves it with FSDP, whose archives hold a few bytes."""

import os
import zipfile

from verl_gdpo.tools.run.checkpoints import TRACKER


def write_archive(path, content="weights"):
    """An archive as `torch.save` writes it, for whoever does not read what is in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def save_checkpoint(folder, step, ranks=1, written_at=None):
    """Save it to a folder of checkpoints, whose tracker names it then; return its own folder."""
    checkpoint = folder / f"global_step_{step}"
    (checkpoint / "actor" / "huggingface").mkdir(parents=True)
    for kind in ("model", "optim", "extra_state"):
        for rank in range(ranks):
            write_archive(checkpoint / "actor" / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    for name in ("fsdp_config.json", "huggingface/config.json"):
        (checkpoint / "actor" / name).write_text("{}")
    rows = checkpoint / "data.pt"
    write_archive(rows)
    if written_at is not None:
        os.utime(rows, (written_at, written_at))
    (folder / TRACKER).write_text(str(step))
    return checkpoint
