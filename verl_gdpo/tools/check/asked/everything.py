"""All questions about a run, in their order."""

from collections.abc import Collection
from typing import Any

from verl_gdpo.tools.check.asked import batches, engines, files, loaders, losses, models
from verl_gdpo.tools.check.asked.answers import Answers
from verl_gdpo.tools.check.asked.roles import Roles, make_roles


def ask_verl(
    config: Any,
    steps: int | None,
    is_elsewhere: bool = False,
    modules_elsewhere: Collection[str] = (),
) -> Answers:
    """Return what verl's own code says of a configuration.

    Args:
        steps: of the run; None if they are not known.
        is_elsewhere: the run will be on another machine, whose files nobody here can look at.
        modules_elsewhere: see `Answers`.
    """
    answers = Answers(modules_elsewhere=modules_elsewhere)
    roles = Roles()
    look = answers.look
    look("the blocks of the roles", make_roles, config, roles)
    look("batches", batches.look_at_batches, config, roles)
    look("the loader of rows", loaders.look_at_loaders, config)
    look("losses", losses.look_at_losses, config, roles)
    look("learning rates", losses.look_at_learning_rates, config, roles, steps)
    look("names", engines.look_at_names, config, roles)
    look("numbers", engines.look_at_numbers, config, roles)
    look("Ray and TransferQueue", engines.look_at_places, config, roles)
    look("types of numbers", engines.look_at_precision, config, roles)
    look("the adapter", engines.look_at_adapter, config, roles)
    look("the model", models.look_at_model, config, roles)
    look("the reward model", files.look_at_reward_model, config)
    of_files = Answers(modules_elsewhere=modules_elsewhere)
    look = of_files.look
    look("folders", files.look_at_folders, config)
    look("the checkpoint to go on with", files.look_at_resume, config)
    look("agent loops", files.look_at_agent_loops, config)
    look("the adapter's files", files.look_at_adapter_files, config)
    if is_elsewhere:
        answers.warnings += of_files.problems
    else:
        answers.problems += of_files.problems
    answers.warnings += of_files.warnings
    answers.notes += of_files.notes
    return answers
