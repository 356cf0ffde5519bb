"""All questions about a run, in their order."""

from collections.abc import Collection
from typing import Any

from verl_gdpo.tools.check.asked import (
    batches,
    cluster,
    engines,
    files,
    idle,
    loaders,
    losses,
    megatron,
    models,
    names,
    numbers,
)
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import Roles, make_roles


def ask_verl(
    config: Any, steps: int | None, is_elsewhere: bool = False, given: Collection[str] = ()
) -> Answers:
    """Return what verl's own code says of a configuration.

    Args:
        steps: of the run; None if they are not known.
        is_elsewhere: the run will be on another machine, whose files nobody here can look at.
        given: the keys of the configuration that stand on the command line.
    """
    answers = Answers(is_elsewhere=is_elsewhere)
    roles = Roles()
    look = answers.look
    look("the blocks of the roles", make_roles, config, roles)
    look("batches", batches.look_at_batches, config, roles)
    look("the loader of rows", loaders.look_at_loaders, config)
    look("losses", losses.look_at_losses, config, roles)
    look("advantages", losses.look_at_advantages, config)
    look("learning rates", losses.look_at_learning_rates, config, roles, steps)
    look("weights in 16 bits", losses.look_at_small_steps, config, roles)
    look("steps to skip", losses.look_at_skipping, config)
    look("names", names.look_at_names, config, roles)
    look("numbers", numbers.look_at_numbers, config, roles)
    look("checkpoints", engines.look_at_saving, config, roles)
    look("settings that are not read", idle.look_at_idle_settings, config)
    look("settings whose switch is off", idle.look_at_switches, config, given)
    look("Ray", cluster.look_at_ray, config)
    look("TransferQueue", engines.look_at_queue, config)
    look("FSDP", engines.look_at_fsdp, config, roles)
    look("Megatron", megatron.look_at_megatron, config, roles, steps)
    look("types of numbers", engines.look_at_precision, config, roles)
    look("the processor", engines.look_at_processor, config, roles)
    look("the adapter", engines.look_at_adapter, config, roles)
    look("the folders of models", models.look_at_folders_of_models, config)
    look("the model", models.look_at_model, config, roles)
    look("the critic's model", models.look_at_critic_model, config, roles)
    look("the reward model", files.look_at_reward_model, config)
    look("folders", files.look_at_folders, config)
    look("the checkpoint to go on with", files.look_at_resume, config, roles)
    look("files of code", files.look_at_code, config)
    look("files of settings", files.look_at_settings_files, config)
    look("agent loops", files.look_at_agent_loops, config)
    look("the adapter's files", files.look_at_adapter_files, config)
    return answers
