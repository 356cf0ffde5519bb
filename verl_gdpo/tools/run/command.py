"""Says what a command is that is to be run: a trainer of verl's with its folders, or anything else.

Relies on verl 0.9 for the names `trainer.default_local_dir`, `trainer.logger` and
`trainer.resume_mode`, and for `@hydra.main(config_path=..., config_name=...)` in its trainers.
"""

import argparse
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_gdpo.tools.run.checkpoints import newest_checkpoint, whole_checkpoint
from verl_gdpo.tools.run.ray_folders import joins_cluster
from verl_gdpo.tools.run_folder.folder import of_recipes

MODULE = "verl."  # begins the name of a trainer behind `python -m`
RUN_DIR = "run_dir="  # begins an argument of our recipes
LOGGERS = "trainer.logger="  # begins an argument that takes the place of the recipes' loggers
POLICY = "actor_rollout_ref"  # the block that the configurations of PPO's trainers alone have
HYDRA_MAIN = re.compile(r"@hydra\.main\(.*?config_name=['\"](?P<name>[\w/]+)['\"]", re.S)
RESUMED = ("++trainer.resume_mode=auto", "++trainer.resume_from_path=null")


@dataclass(frozen=True)
class TrainingCommand:
    """What is known of a command, with what is added to it.

    words: program and arguments.
    folder: gets train.log, the metrics and, after a hang, the stacks.
    is_verl: whether it is a trainer of verl's, started as `python -m verl....`.
    checkpoints: the folder of verl's checkpoints; None where nobody knows it.
    trainer: the block `trainer` of verl's configuration; empty where nobody knows it, and where
        Ray's processes may not get the variable that says where the metrics are.
    remarks: sentences for the user.
    """

    words: Sequence[str]
    folder: Path
    is_verl: bool
    checkpoints: Path | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()


class VerlsTrainer(NamedTuple):
    """A trainer of verl's in a command: what stands behind `python -m`."""

    module: str
    arguments: list[str]


def understood(words: Sequence[str], folder: Path | None, *, resume: bool) -> TrainingCommand:
    """Return what is known of a command.

    Args:
        words: program and arguments.
        folder: of the run, as the user named it. With None, it is verl's folder of checkpoints, or
            a new one in `runs` for a command whose configuration is not known.
        resume: whether it has to go on from a checkpoint.

    Raises:
        ValueError: nothing can be resumed, or the folder is not known.
    """
    trainer = verls_trainer(words)
    if trainer is None:
        if resume:
            raise ValueError(
                "--resume needs a command of verl's, as in: verl-gdpo run --resume -- python -m "
                "verl.trainer.main_ppo key=value. Another command has to know itself how it goes on"
            )
        return _of_others(words, folder)
    if folder is not None and not resume and _is_as_recipes_have_it(trainer.arguments, folder):
        # The file logger is there, and the manifest of the start says the rest.
        return TrainingCommand(words, folder, is_verl=True)
    try:
        config = _configuration(trainer.module, trainer.arguments)
    except Exception as error:  # of Hydra, OmegaConf, and of a verl that is not there
        if folder is None or resume:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"the folder of the run is not known: {reason}. Correct the command, or name a "
                "folder: --run-dir FOLDER"
            ) from None
        # verl will say what is wrong, and what it prints is shown.
        return TrainingCommand(words, folder, is_verl=True)
    return _of_verl(words, folder, config, resume=resume)


def verls_trainer(words: Sequence[str]) -> VerlsTrainer | None:
    """Return the trainer of verl's that a command starts, or None for another command.

    >>> verls_trainer(["env", "A=1", "python", "-m", "verl.trainer.main_ppo", "a=1"])
    VerlsTrainer(module='verl.trainer.main_ppo', arguments=['a=1'])
    """
    for place, word in enumerate(words[:-1]):
        module = words[place + 1]
        if word == "-m" and module.startswith(MODULE):
            return VerlsTrainer(module, arguments=list(words[place + 2 :]))
    return None


def _is_as_recipes_have_it(arguments: Sequence[str], folder: Path) -> bool:
    """Return whether a command with our recipes has their loggers, and writes into this folder.

    Where nobody can tell without composing it, the answer is no.
    """
    run_dir = None
    for argument in arguments:
        if argument.lstrip("+").startswith(LOGGERS):
            return False
        if argument.startswith(RUN_DIR):
            run_dir = argument.removeprefix(RUN_DIR).strip("'\"")  # run.sh quotes it for Hydra
    return run_dir is not None and Path(run_dir).resolve() == folder.resolve()


def _of_others(words: Sequence[str], folder: Path | None) -> TrainingCommand:
    if folder is not None:
        return TrainingCommand(words, folder, is_verl=False)
    folder = Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    remark = (
        f"the command is no `python -m {MODULE}MODULE`, so its configuration is not known: its "
        "checkpoints are not found, and it is ended for a hang only if it trains with gdpo into "
        f"{folder}. Steps are shown if verl logs them to the console or into a file"
    )
    return TrainingCommand(words, folder, is_verl=False, remarks=[remark])


def _of_verl(
    words: Sequence[str], folder: Path | None, config: Any, *, resume: bool
) -> TrainingCommand:
    """Return what is known of a trainer of verl's whose configuration is known.

    Args:
        config: resolved, as a dict.
    """
    trainer = config["trainer"]
    checkpoints = Path(trainer["default_local_dir"]).absolute()
    if folder is None and of_recipes(config):
        folder = Path(config["run_dir"])
    elif folder is None:
        folder = checkpoints
    added: list[str] = []
    remarks: list[str] = []
    loggers = trainer.get("logger") or []
    if isinstance(loggers, str):
        loggers = [loggers]
    if "file" not in loggers:
        loggers = [*loggers, "file"]
        added.append(f"trainer.logger=[{','.join(loggers)}]")
        remarks.append(f"`file` is added to trainer.logger: the metrics are in {folder}/metrics")
    if resume:
        if _checkpoint_to_resume(checkpoints, config) is None:
            raise ValueError(f"--resume: nothing to resume in {checkpoints}: no checkpoint")
        added += RESUMED
    elif trainer.get("resume_mode") == "auto":
        newest = newest_checkpoint(checkpoints)
        if newest is not None:
            remarks.append(
                f"verl goes on from {newest}, as trainer.resume_mode=auto says. For a new run, "
                "give another trainer.default_local_dir or trainer.experiment_name"
            )
    known_trainer: dict[str, Any] = {}
    if not _joins_cluster(config):
        known_trainer = trainer | {"logger": loggers}
    return TrainingCommand(
        list(words) + added,
        folder,
        is_verl=True,
        checkpoints=checkpoints,
        trainer=known_trainer,
        remarks=remarks,
    )


def _checkpoint_to_resume(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the newest checkpoint; None if nothing was saved.

    Raises:
        ValueError: it is one of PPO's and not whole.
    """
    if POLICY in config:
        return whole_checkpoint(folder)
    # Another trainer, such as that of SFT, saves other files, and verl says what is wrong there.
    newest = newest_checkpoint(folder)
    if newest is None or not newest.is_dir():
        # verl would start at the first step.
        return None
    return newest


def _joins_cluster(config: Mapping[str, Any]) -> bool:
    """Whether verl joins a Ray that runs, whose processes have another environment than ours.

    A run with gdpo hands the variables over itself, so its record says where its metrics are.
    """
    ray_init = (config.get("ray_kwargs") or {}).get("ray_init") or {}
    return bool(ray_init.get("address")) or joins_cluster(os.environ, ray_init.get("_temp_dir"))


def _configuration(module: str, arguments: Sequence[str]) -> Any:
    """Return the configuration that a trainer of verl's gets, as a dict without interpolations.

    Raises:
        ValueError: verl is not installed, or a name of the configuration is not there.
        HydraException, OmegaConfBaseException: Hydra refuses the arguments.
    """
    # It loads Hydra and torch, for which neither --help nor another command has to wait.
    from verl_gdpo.tools import compose

    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    compose.add_config_arguments(parser)
    options, _ = parser.parse_known_intermixed_args(arguments)
    file = compose.file_of_verl(module)
    declared = HYDRA_MAIN.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    if declared is None:
        raise ValueError(f"{module} is no trainer of the installed verl that Hydra configures")
    if options.config_name == compose.PLAIN:
        options.config_name = declared["name"]
    composed = compose.compose_config(
        options.config_dir, options.config_name, options.overrides, options.config_path, file
    )
    config: Any = OmegaConf.to_container(composed, resolve=True)
    if not (config.get("trainer") or {}).get("default_local_dir"):
        raise ValueError(f"{module} has no trainer.default_local_dir")
    return config
