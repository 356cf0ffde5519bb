"""Finds the policy that a path means: the last checkpoint of a run, a checkpoint of verl, a model.

A checkpoint is merged once, into the folder `merged` beside its shards, and merged again if the
shards have changed.
"""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.terminal import note
from verl_gdpo.tools.run.checkpoints import (
    FSDP,
    checkpoints_of,
    model_fault,
    newest_checkpoint,
    step_of,
)
from verl_gdpo.tools.run.processes import warned_without_locks
from verl_gdpo.tools.run_folder.folder import read_config
from verl_gdpo.tools.run_folder.scorer_options import value_of

# It runs in a process of its own, which imports verl.
MERGE = "verl_gdpo.tools.evaluate.merge"
MERGED = "merged"
MADE_FROM = "merged_from.json"
DTYPES = ("float32", "bfloat16", "float16")
# Other names of these for a rollout.
SAME_DTYPE = {"float": "float32", "fp32": "float32", "half": "float16"}
EXPECTED = (
    "expected a run's folder, a checkpoint of verl (global_step_N), or the folder of a Hugging "
    "Face model (config.json and *.safetensors)"
)


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
        return value_of(self.config, key, default)


def find_policy(place: Path, step: int | None = None, *, trust: bool = False) -> Policy:
    """Return the policy that a path means; a checkpoint is merged, unless it was merged before.

    Args:
        step: of a run or a folder of checkpoints: this checkpoint, and not the newest.
        trust: whether to run code that the shards of a checkpoint name.

    Raises:
        ValueError: there is no such policy, or one that cannot be read; the message says what to
            do.
        OSError: the merged model cannot be written.
    """
    if not place.is_dir():
        raise ValueError(f"{place}: no such folder; {EXPECTED}")
    is_model = (place / "config.json").is_file()
    # verl leaves data.pt where it removes `actor` of an old checkpoint.
    marks = (place / "actor", place / FSDP, place / "data.pt")
    is_checkpoint = any(mark.exists() for mark in marks)
    if step is not None and (is_model or is_checkpoint):
        raise ValueError(f"--step {step}: {place} is one policy, and no run; leave it out")
    if is_model:
        return Policy(place, place)

    checkpoint = place
    if not is_checkpoint:
        checkpoint = _checkpoint_in(place, step)
    actor = checkpoint
    is_actor = checkpoint.name == "actor" or (checkpoint / FSDP).is_file()
    if not is_actor:
        actor = checkpoint / "actor"
    folder_of_checkpoints = actor.resolve().parent.parent
    if not actor.is_dir():
        raise ValueError(
            f"{actor} is missing: verl removes it from older checkpoints than the last "
            f"trainer.max_actor_ckpt_to_keep. {_other_steps(folder_of_checkpoints)}"
        )
    if not (actor / FSDP).is_file():
        raise ValueError(
            f"{actor}: no {FSDP}, so it is no whole checkpoint of verl's FSDP engine. "
            "Merge one of Megatron's with `python -m verl.model_merger merge --backend megatron "
            f"--local_dir {actor} --target_dir FOLDER`, and evaluate FOLDER"
        )
    fault = model_fault(actor)
    if fault:
        raise ValueError(f"{fault}. {_other_steps(folder_of_checkpoints)}")

    run = None
    config = None
    # verl may write the checkpoints into the folder of the run, or into one within it.
    for folder in (folder_of_checkpoints.parent, folder_of_checkpoints):
        config = read_config(folder)
        if config is not None:
            run = folder
            break
    model = merged(actor, trust=trust)
    return Policy(checkpoint, model, step_of(actor.parent.name), run, config)


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    # The import takes seconds, for which `--help` and `--compare` need not wait.
    import torch

    return bool(torch.cuda.is_available())


def choose_dtype(policy: Policy) -> str:
    """Return the precision to compute in: float32, and on a GPU that of the policy in training.

    This is the precision of the run's rollout, or the one that the model's config.json names.

    Raises:
        ValueError: the run's rollout has a precision that no engine here computes in.
    """
    if not has_gpu():
        return "float32"
    config = json.loads((policy.model / "config.json").read_bytes())
    of_model = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    key = "actor_rollout_ref.rollout.dtype"
    named = str(policy.of_config(key, "auto"))
    if named == "auto":
        named = str(of_model)
    dtype = SAME_DTYPE.get(named, named)
    if dtype not in DTYPES:
        raise ValueError(
            f"{key}={named}: expected {', '.join(DTYPES)} or auto. Name the precision of this "
            "evaluation with --dtype"
        )
    return dtype


def _checkpoint_in(place: Path, step: int | None) -> Path:
    """Return the folder `global_step_N` of a run or of a folder of checkpoints.

    Args:
        step: None for the newest.

    Raises:
        ValueError: there is none.
    """
    folder = checkpoints_of(place)
    if not folder.is_dir():
        config = read_config(place)
        if config is not None:
            folder = Path(OmegaConf.select(config, "trainer.default_local_dir") or folder)

    wanted = "checkpoint"
    checkpoint: Path | None
    if step is None:
        checkpoint = newest_checkpoint(folder)
    else:
        wanted = f"checkpoint of step {step}"
        checkpoint = folder / f"global_step_{step}"
    if checkpoint is None or not checkpoint.is_dir():
        steps = sorted(step_of(path.parent.name) for path in folder.glob("global_step_*/actor"))
        raise ValueError(
            f"{place}: no {wanted} in {folder}, which has the steps {steps}; a run saves one every "
            f"trainer.save_freq steps. Otherwise {EXPECTED}"
        )
    return checkpoint


def _other_steps(folder: Path) -> str:
    """Return a sentence that says which checkpoints of a folder can be evaluated."""
    steps = []
    for checkpoint in folder.glob("global_step_*"):
        if not model_fault(checkpoint / "actor"):
            steps.append(step_of(checkpoint.name))
    if not steps:
        return f"No checkpoint in {folder} has a whole model"
    return f"The checkpoints of the steps {sorted(steps)} have a whole model: --step {max(steps)}"


def merged(actor: Path, *, trust: bool = False) -> Path:
    """Return the Hugging Face folder of a checkpoint, in the precision of its shards.

    It appears whole or not at all, and what a killed merge has left goes away.
    """
    target = actor / MERGED
    temporary = actor / f".{MERGED}.tmp"
    shards = {}
    for path in sorted(actor.glob("model_world_size_*.pt")):
        about = path.stat()
        shards[path.name] = [about.st_size, about.st_mtime_ns]
    made_from = json.dumps(shards)
    if _text_of(target / MADE_FROM) == made_from:
        return target
    note(f"merging the shards of {actor}")
    with (actor / FSDP).open("rb+") as lock:
        with warned_without_locks(actor, "Merge it only once at a time"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have been quicker.
        if _text_of(target / MADE_FROM) == made_from:
            return target
        rmtree(temporary, ignore_errors=True)
        try:
            _run_merger(actor, temporary, lock.fileno(), trust)
            (temporary / MADE_FROM).write_text(made_from)
            rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        finally:
            rmtree(temporary, ignore_errors=True)
    return target


def _text_of(path: Path) -> str:
    """Return what a file holds; "" if there is none."""
    if path.is_file():
        return path.read_text()
    return ""


def _run_merger(actor: Path, target: Path, lock: int, trust: bool) -> None:
    """Merge in another process, which keeps the lock if this one is killed."""
    environment = dict(os.environ)
    if not has_gpu():
        environment["VERL_PLATFORM"] = "cpu"
    command = [sys.executable, "-m", MERGE, str(actor), str(target)]
    if trust:
        command.append("--trust")
    done = subprocess.run(
        command,
        env=environment,
        pass_fds=(lock,),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        # The last line of a traceback says what has failed.
        lines = done.stderr.strip().splitlines()
        reason = ""
        if lines:
            reason = lines[-1]
        raise ValueError(f"{actor}: the shards cannot be merged: {reason}")
