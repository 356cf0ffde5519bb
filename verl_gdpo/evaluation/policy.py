"""Finds the policy that a path means: the last checkpoint of a run, a checkpoint of verl, a model.

A checkpoint is merged once, into the folder `merged` beside its shards, and merged again if the
shards have changed.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.evaluation.engines import has_gpu
from verl_gdpo.run.checkpoints import FSDP, TRACKER, newest_checkpoint, step_of
from verl_gdpo.run.folder import read_config

MERGE = "verl_gdpo.hooks.merge"  # runs in a process of its own, which imports verl
MERGED, MADE_FROM = "merged", "merged_from.json"
EXPECTED = (
    "expected a run's folder, a checkpoint of verl (global_step_N), or the folder of a Hugging "
    "Face model (config.json and *.safetensors)"
)
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Policy:
    """A model, and what is known of the run that it comes from.

    place: what the user named, or the checkpoint in it.
    model: a Hugging Face folder.
    step: of training; 0 for a model that is no checkpoint.
    run: the folder of its run, if it is known.
    config: the configuration of its run, as a DictConfig, if it is known.
    """

    place: Path
    model: Path
    step: int = 0
    run: Path | None = None
    config: Any = None

    def of_config(self, key: str, default: Any) -> Any:
        """Return a value of the run's configuration, or the default without one."""
        value = None if self.config is None else OmegaConf.select(self.config, key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        return default if value is None else value

    def content(self) -> str:
        """Return a hash of the model's files."""
        whole = hashlib.sha256()
        for path in sorted(path for path in self.model.iterdir() if path.is_file()):
            if path.name == MADE_FROM:  # times of files are no content
                continue
            whole.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    whole.update(block)
        return whole.hexdigest()


def find_policy(place: Path, step: int | None = None) -> Policy:
    """Return the policy that a path means; a checkpoint is merged, unless it was merged before.

    Args:
        step: of a run or a folder of checkpoints: this checkpoint, and not the newest.

    Raises:
        ValueError: there is no such policy, or one that cannot be read; the message says what to
            do.
        OSError: the merged model cannot be written.
    """
    if not place.is_dir():
        raise ValueError(f"{place}: no such folder; {EXPECTED}")
    is_model = (place / "config.json").is_file()
    if is_model and step is not None:
        raise ValueError(f"--step {step}: {place} is a model, and has no checkpoints")
    if is_model:
        return Policy(place, place)
    checkpoint = _checkpoint_in(place, step)
    actor = checkpoint / "actor" if checkpoint.name != "actor" else checkpoint
    _check_is_fsdp(actor)
    run = _run_of(actor)
    config = None if run is None else read_config(run)
    return Policy(checkpoint, merged(actor), step_of(actor.parent.name), run, config)


def choose_dtype(policy: Policy) -> str:
    """Return the precision to compute in: float32, and on a GPU that of the policy in training.

    This is the precision of the run's rollout, or the one that the model's config.json names.
    """
    if not has_gpu():
        return "float32"
    config = json.loads((policy.model / "config.json").read_text())
    of_model = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return str(policy.of_config("actor_rollout_ref.rollout.dtype", of_model))


def _checkpoint_in(place: Path, step: int | None) -> Path:
    """The folder `global_step_N` that a path means, or `actor` in it."""
    if (place / "actor").is_dir() or (place / FSDP).is_file():
        if step is not None:
            raise ValueError(f"--step {step}: {place} is one checkpoint; name the run")
        return place
    folder = _checkpoints_of(place)
    if step is not None:
        if not (folder / f"global_step_{step}").is_dir():
            steps = sorted(step_of(path.name) for path in folder.glob("global_step_*"))
            raise ValueError(f"--step {step}: {folder} has checkpoints of the steps {steps}")
        return folder / f"global_step_{step}"
    newest = newest_checkpoint(folder)
    if newest is None or not newest.is_dir():
        raise ValueError(
            f"{place}: no checkpoint in {folder}; a run saves one every trainer.save_freq steps. "
            f"Otherwise {EXPECTED}"
        )
    return newest


def _checkpoints_of(place: Path) -> Path:
    """The folder of checkpoints of a run, wherever its configuration put it."""
    if (place / TRACKER).is_file():
        return place
    own = place / "checkpoints"
    config = None if own.is_dir() else read_config(place)
    other = None if config is None else OmegaConf.select(config, "trainer.default_local_dir")
    return Path(other) if other and Path(other).is_dir() else own


def _run_of(actor: Path) -> Path | None:
    """The folder of the run that saved a checkpoint, as far as the place of it tells."""
    folder = actor.resolve().parent.parent
    return next((run for run in (folder.parent, folder) if read_config(run) is not None), None)


def _check_is_fsdp(actor: Path) -> None:
    if not (actor / FSDP).is_file():
        raise ValueError(
            f"{actor}: no {FSDP}, so it is no whole checkpoint of verl's FSDP engine. "
            "Merge one of Megatron's with `python -m verl.model_merger merge --backend megatron "
            f"--local_dir {actor} --target_dir FOLDER`, and evaluate FOLDER"
        )


def merged(actor: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint, in the precision of its shards.

    It appears whole or not at all, and what a killed merge has left goes away.
    """
    target = actor / MERGED
    shards = sorted(actor.glob("model_world_size_*.pt"))
    times = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in shards}
    if _times_in(target / MADE_FROM) == times:
        return target
    print(f"evaluate: merging the shards of {actor}", file=sys.stderr, flush=True)
    with (actor / FSDP).open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _times_in(target / MADE_FROM) == times:  # another process was quicker
            return target
        for left in actor.glob(f".{MERGED}.*.tmp"):
            rmtree(left, ignore_errors=True)
        temporary = actor / f".{MERGED}.{uuid.uuid4().hex}.tmp"
        try:
            _run_merger(actor, temporary, lock.fileno())
            (temporary / MADE_FROM).write_text(json.dumps(times))
            rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        finally:
            rmtree(temporary, ignore_errors=True)
    return target


def _times_in(path: Path) -> Mapping[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _run_merger(actor: Path, target: Path, lock: int) -> None:
    """Merge in another process, which keeps the lock if this one is killed."""
    platform = {} if has_gpu() else {"VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", MERGE, str(actor), str(target)],
        env={**os.environ, **platform},
        pass_fds=(lock,),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise ValueError(f"{actor}: the shards cannot be merged: {why}")
