"""Looks at the checkpoint that verl will load, and lets verl count those that it saved before.

Relies on verl 0.9, on `_load_checkpoint` of both trainers: with `trainer.resume_mode` "auto" it
loads `trainer.default_local_dir`/global_step_N, where N stands in the file `TRACKER`, and with
"resume_path" the folder `trainer.resume_from_path`. `_save_checkpoint` first writes all weights,
then `global_step_N/data.pt`, then N into that file, which it overwrites.

Relies also on `FSDPCheckpointManager`, of which each rank has one: `load_checkpoint(local_path)` is
called with `FOLDER/global_step_N/actor` or `critic`, and the list `previous_saved_paths` has the
folders that it has saved, the oldest first. Before and after a save, rank 0 removes the first ones
of more than `trainer.max_actor_ckpt_to_keep`. After a load the list is empty, so that each resume
would leave as many checkpoints behind as are to be kept.
"""

import json
import os
from pathlib import Path
from typing import Any

from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.hooks.refusal import warn
from verl_gdpo.tools.run import checkpoints

# {"actor": [folders that were saved before, the oldest first], "critic": [...]}, as JSON, in the
# environment of the processes of a run that goes on
SAVED_BEFORE = "VERL_GDPO_SAVED_BEFORE"
LIMITS = {"actor": "max_actor_ckpt_to_keep", "critic": "max_critic_ckpt_to_keep"}


def checkpoint_to_load(config: Any) -> Path | None:
    """The folder `global_step_N` that verl will load; None if it starts anew."""
    mode = config.trainer.get("resume_mode", "auto")
    path = None
    if mode == "resume_path" and config.trainer.resume_from_path:
        path = Path(config.trainer.resume_from_path)
    elif mode == "auto":
        path = checkpoints.newest_checkpoint(Path(config.trainer.default_local_dir))
    if path is None or not path.is_dir() or "global_step_" not in path.name:
        return None
    return path.resolve()


def check_before_load(config: Any) -> None:
    """Refuse a checkpoint that is not whole, before verl loads it.

    Raises:
        ValueError: names the file that is missing, empty or cut, and what goes on from the newest
            whole checkpoint; see `checkpoints.whole_checkpoint`.
    """
    mode = config.trainer.get("resume_mode", "auto")
    if mode == "auto":
        mend_tracker(Path(config.trainer.default_local_dir))
        return
    checkpoint = checkpoint_to_load(config)
    if checkpoint is None:
        return
    # verl begins with the first row where data.pt was not copied
    has_rows = (checkpoint / "data.pt").exists()
    fault = checkpoints.fault_of(checkpoint) if has_rows else checkpoints.state_fault(checkpoint)
    if not fault:
        return
    steps = checkpoints.whole_steps(checkpoint.parent)
    advice = f"no checkpoint in {checkpoint.parent} is whole"
    if steps:
        advice = (
            f"whole are those of the steps {steps}. To go on from the newest of them: "
            f"trainer.resume_from_path={checkpoint.parent}/global_step_{steps[-1]}"
        )
    raise ValueError(f"trainer.resume_from_path={checkpoint}: {fault}; {advice}")


def check_and_load_rows(call: Call) -> Any:
    """Check the checkpoint that a trainer with gdpo will load, before a model is loaded.

    A script with a `main` of its own has no `run_ppo` that would have looked at it.
    """
    trainer = call.instance
    if record_of(trainer) is not None:
        check_before_load(trainer.config)
    return call.hand_on()


def mend_tracker(folder: Path) -> None:
    """Write the newest checkpoint's step into the tracker if a full disk has left it empty.

    verl would stop at `int('')` or start at step 0. verl empties the file before it writes the
    number. So an empty file means that the disk was full after the newest checkpoint was complete.

    Args:
        folder: `trainer.default_local_dir`. If it holds no tracker, nothing happens.

    Raises:
        ValueError: see `whole_checkpoint`.
    """
    newest = checkpoints.whole_checkpoint(folder)
    tracker = folder / checkpoints.TRACKER
    if newest is not None and not tracker.read_text().strip():
        tracker.write_text(newest.name.removeprefix("global_step_"))
        warn(f"{tracker} was empty; it names {newest.name} again")


def note_saved_before(config: Any, checkpoint: Path | None) -> bool:
    """Put into the environment what verl's list shall hold after the load; whether there is any.

    Of each part, it is the newest ones, as many as verl may keep: what an earlier start has left
    beyond that may have been kept on purpose.

    Args:
        checkpoint: the folder that verl will load; of another run, nothing is noted.
    """
    os.environ.pop(SAVED_BEFORE, None)
    if checkpoint is None or checkpoint.parent != Path(config.trainer.default_local_dir).resolve():
        return False
    saved = {}
    for part, key in LIMITS.items():
        limit = config.trainer.get(key)
        if isinstance(limit, int) and limit > 0:
            saved[part] = _saved_up_to(checkpoint, part)[-limit:]
    if not any(saved.values()):
        return False
    os.environ[SAVED_BEFORE] = json.dumps(saved)
    return True


def _saved_up_to(checkpoint: Path, part: str) -> list[str]:
    """The folders of `actor` or `critic` of a checkpoint and those before it, the oldest first."""
    by_step = {}
    last = checkpoints.step_of(checkpoint.name)
    for path in checkpoint.parent.glob("global_step_*"):
        step = checkpoints.step_of(path.name)
        if step <= last and (path / part).is_dir():
            by_step[step] = str(path / part)
    return [by_step[step] for step in sorted(by_step)]


def load_and_count(call: Call) -> Any:
    """Fill verl's list after a load, in the worker of a rank."""
    manager = call.instance
    local_path = call["local_path"]
    result = call.hand_on()
    noted = os.environ.get(SAVED_BEFORE)
    # a verl without this list counts in another way
    is_empty = getattr(manager, "previous_saved_paths", None) == []
    if local_path is None or not noted or not is_empty:
        return result
    loaded = Path(local_path).resolve()
    saved = json.loads(noted).get(loaded.name, [])
    if saved and saved[-1] == str(loaded):
        manager.previous_saved_paths = saved
    return result
