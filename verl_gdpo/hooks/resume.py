"""Records each start of a run, and refuses to go on from a checkpoint with other settings.

Relies on verl 0.9 `_load_checkpoint` of both trainers: with `trainer.resume_mode` "auto" it loads
`trainer.default_local_dir`/global_step_N, where N stands in the file `TRACKER`, and with
"resume_path" the folder `trainer.resume_from_path`. `_save_checkpoint` first writes all weights,
then `global_step_N/data.pt`, then N into that file, which it overwrites.
"""

import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from verl_gdpo.run import checkpoints, resume_rules, starts
from verl_gdpo.run.folder import of_recipes
from verl_gdpo.run.resolved_config import file_states, flat, without_environment
from verl_gdpo.run.starts import RecordedStart, StartManifest

ALLOW = "allow_change"  # a key of ours: the keys whose change is wanted


@contextmanager
def recorded_start(config: Any, *, is_ours: bool, composed: Any = None) -> Iterator[None]:
    """Check and record a start; record the end of the block, if Python gets to it.

    Args:
        config: verl's configuration. `allow_change` is taken out of it, and with W&B the run's id
            is put into the environment of Ray's processes.
        is_ours: whether a run without a manifest gets one.
        composed: `config` as Hydra composed it, where something was chosen since for this machine
            alone. A resume goes on with it, so that it chooses again.

    Raises:
        ValueError: a checkpoint would be loaded that was made with other settings; or see
            `mend_tracker`.
    """
    if is_ours and config.trainer.get("resume_mode", "auto") == "auto":
        mend_tracker(Path(config.trainer.default_local_dir))
    checkpoint = checkpoint_to_load(config)
    earlier = None if checkpoint is None else starts.maker_of(checkpoint)
    if not (is_ours or earlier):
        yield
        return
    allowed = _taken_out(config, ALLOW)
    composed = config if composed is None else composed
    _taken_out(composed, ALLOW)
    start = _start(config, checkpoint, earlier, allowed)
    for warning in start.warnings:
        _warn(warning)
    run = run_folder(config)
    try:
        starts.write(run, start, OmegaConf.to_yaml(composed))
        starts.link(run, Path(config.trainer.default_local_dir).resolve())
    except OSError as error:
        _warn(f"the start is not recorded, so that no resume is compared with it: {error}")
        yield
        return
    _join_wandb(config, start)
    why = "finished"
    try:
        yield
    except BaseException as error:
        *_, last = ["", *str(error).strip().splitlines()]
        why = f"{type(error).__name__}: {last}"
        raise
    finally:
        with suppress(OSError):  # a full disk: how the run ended is worth more
            starts.ended(run, why)


def run_folder(config: Any) -> Path:
    """`run_dir` of our recipes, or the folder of checkpoints."""
    folder = config.run_dir if of_recipes(config) else config.trainer.default_local_dir
    return Path(folder).resolve()


def checkpoint_to_load(config: Any) -> Path | None:
    """The folder `global_step_N` that verl will load; None if it starts anew."""
    mode, path = config.trainer.get("resume_mode", "auto"), None
    if mode == "resume_path" and config.trainer.resume_from_path:
        path = Path(config.trainer.resume_from_path)
    elif mode == "auto":
        path = checkpoints.newest_checkpoint(Path(config.trainer.default_local_dir))
    return path.resolve() if path and path.is_dir() and "global_step_" in path.name else None


def mend_tracker(folder: Path) -> None:
    """Write the newest checkpoint's step into the tracker if a full disk has left it empty.

    verl would stop at `int('')` or start at step 0. verl empties the file before it writes the
    number. So an empty file means that the disk was full after the newest checkpoint was complete.

    Args:
        folder: `trainer.default_local_dir`. If it holds no tracker, nothing happens.

    Raises:
        ValueError: see `whole_checkpoint`.
    """
    newest, tracker = checkpoints.whole_checkpoint(folder), folder / checkpoints.TRACKER
    if newest and not tracker.read_text().strip():
        tracker.write_text(newest.name.removeprefix("global_step_"))
        _warn(f"{tracker} was empty; it names {newest.name} again")


def _start(
    config: Any, checkpoint: Path | None, earlier: RecordedStart | None, allowed: Sequence[str]
) -> StartManifest:
    """The start to record.

    Raises:
        ValueError: it would go on with other settings than the checkpoint was made with, or the
            checkpoint is not whole.
    """
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    kept, files = without_environment(config), file_states(resolved)
    start = starts.here(kept, files=files, **_names(config, earlier))
    if checkpoint is None:
        return start
    if not checkpoints.is_whole(checkpoint):  # verl would say so after it has loaded the model
        raise ValueError(f"verl-gdpo: no resume from {checkpoint}, which lacks {checkpoints.PARTS}")
    start = replace(start, checkpoint=str(checkpoint))
    if earlier is None:
        unknown = "nothing tells whether the settings are those of its run"
        return replace(start, warnings=(f"no start is recorded that made {checkpoint}: {unknown}",))
    if gone := resume_rules.missing_files(earlier.start, start):
        raise ValueError(
            f"verl-gdpo: no resume from {checkpoint}: start {earlier.number} read a file that "
            f"cannot be read now, in {', '.join(gone)}. Put it back, or name where it lies"
        )
    composed: Any = OmegaConf.to_container(config, resolve=False)
    found = resume_rules.changes(earlier.start, start)
    found = resume_rules.without_followers(found, flat(composed))
    if reasons := resume_rules.refusal(found, allowed):
        raise ValueError(
            f"verl-gdpo: no resume from {checkpoint}, which was made with other settings, recorded "
            f"in {earlier.folder}: {reasons}. Without these changes it goes on; a new run has "
            "another run_dir or trainer.default_local_dir"
        )
    said = {
        change.key: [change.before, change.after, change.rule.verdict]
        for change in found
        if not change.rule.a_place
    }
    warnings = (*starts.code_change(earlier, start), *resume_rules.warnings(found))
    return replace(start, changes=said, warnings=warnings)


def _names(config: Any, earlier: RecordedStart | None) -> dict[str, Any]:
    """The chosen recipes and the id of the run in W&B: those of the run that goes on."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    chosen = {str(k): str(v) for k, v in choices.items() if not {*"/@"} & {*str(k)}}
    recipes = dict(earlier.start.recipes) if earlier else chosen
    logger = config.trainer.get("logger") or []
    if "wandb" not in ([logger] if isinstance(logger, str) else logger):
        return {"recipes": recipes}
    known = earlier.start.wandb_run_id if earlier else ""
    run_id = os.environ.get("WANDB_RUN_ID") or known or uuid.uuid4().hex[:8]
    return {"recipes": recipes, "wandb_run_id": run_id}


def _join_wandb(config: Any, start: StartManifest) -> None:
    """Let W&B go on with the run of this id, or begin it, in whichever process verl calls it."""
    if not start.wandb_run_id:
        return
    os.environ["WANDB_RUN_ID"] = start.wandb_run_id
    os.environ.setdefault("WANDB_RESUME", "allow")
    hand_over(config, "WANDB_RUN_ID", "WANDB_RESUME")


def hand_over(config: Any, *names: str) -> None:
    """Give variables of this process to those that Ray starts, on whichever cluster it does."""
    for name in {*names} & os.environ.keys():
        key = f"ray_kwargs.ray_init.runtime_env.env_vars.{name}"
        OmegaConf.update(config, key, os.environ[name], force_add=True)


def _taken_out(config: Any, key: str) -> list[str]:
    with open_dict(config):
        value = config.pop(key, None) or []
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _warn(text: str) -> None:
    print(f"verl-gdpo: WARNING: {text}", file=sys.stderr, flush=True)
