"""Compares what Ray is told with what verl asks of it."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tools.check.asked.answers import Answers

RAY = "ray_kwargs.ray_init"


def look_at_ray(config: Any, answers: Answers) -> None:
    """Ask what Ray makes of its arguments. It is not started."""
    _look_at_processors(config, answers)
    environment = OmegaConf.select(config, f"{RAY}.runtime_env")
    if environment is None:
        return
    _look_at_variables(environment, answers)
    folder = environment.get("working_dir")
    if folder and "://" not in str(folder) and not Path(str(folder)).expanduser().exists():
        answers.lack(
            str(folder), f"{RAY}.runtime_env.working_dir={folder}: there is no such folder"
        )


def _look_at_processors(config: Any, answers: Answers) -> None:
    """A Ray of the run's own has to have the processors and the GPUs that verl asks for."""
    from verl.single_controller.ray.base import ResourcePoolManager

    for_gpu = ResourcePoolManager.__dataclass_fields__["max_colocate_count"].default
    gpus = config.trainer.n_gpus_per_node
    needed = for_gpu * gpus
    cpus = OmegaConf.select(config, f"{RAY}.num_cpus")
    if type(cpus) is int and cpus < needed:
        # A bundle of a GPU asks Ray for so many; verl waits for ever for one that cannot be.
        answers.problems.append(
            f"{RAY}.num_cpus={cpus}: verl asks Ray for {for_gpu} CPUs for each of {gpus} GPUs, and "
            f"would wait for ever. Set {needed + 1} or more"
        )
    given = OmegaConf.select(config, f"{RAY}.num_gpus")
    if type(given) is int and given < gpus:
        # ResourcePoolManager._check_resource_available
        answers.problems.append(
            f"{RAY}.num_gpus={given}: verl asks Ray for trainer.n_gpus_per_node={gpus} GPUs. Leave "
            "it out, and Ray counts them"
        )


def _look_at_variables(environment: Any, answers: Answers) -> None:
    """See ray._private.runtime_env.validation.parse_and_validate_env_vars."""
    for name, value in (environment.get("env_vars") or {}).items():
        if not isinstance(value, str):
            key = f"{RAY}.runtime_env.env_vars.{name}"
            answers.problems.append(
                f"{key}={value}: Ray takes texts alone, and would not start. Write the quotes of "
                f"the text inside those of the shell: '+{key}=\"{value}\"'"
            )
