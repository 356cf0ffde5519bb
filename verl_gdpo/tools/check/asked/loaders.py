"""Whether the rows of a run can be loaded in batches, as verl's trainer makes its loaders."""

import warnings
from typing import Any

from verl_gdpo.tools.check.asked.answers import Answers


def look_at_loaders(config: Any, answers: Answers) -> None:
    """Make the loader of the training rows, of numbers in the place of rows; it starts nothing."""
    data = config.data
    size = data.get("gen_batch_size") or data.train_batch_size
    answers.ask("data.dataloader_num_workers", _make_loader, data, size)
    if not config.trainer.get("use_v1", False):
        return
    mode = config.trainer.v1.trainer_mode
    parts = (config.trainer.v1.get(mode) or {}).get("parameter_sync_step", 1)
    # verl.trainer.ppo.v1.trainer_base.PPOTrainer.step
    if data.train_batch_size % parts:
        answers.problems.append(
            f"data.train_batch_size={data.train_batch_size}: no multiple of "
            f"trainer.v1.{mode}.parameter_sync_step={parts}, and each update takes a part. Change "
            "one of them"
        )
    # PPOTrainer._next_train_batch; where groups are filtered, verl takes single prompts
    filters = (config.algorithm.get("filter_groups") or {}).get("enable", False)
    if mode == "sync" and not filters and data.train_batch_size % size:
        answers.problems.append(
            f"data.gen_batch_size={size}: data.train_batch_size={data.train_batch_size} is no "
            "multiple of that, and verl loads whole batches of it. Set a divisor, or leave it out"
        )


def _make_loader(data: Any, size: int) -> None:
    """As PPOTrainer._init_dataloader of verl 0.9.1."""
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.trainer.ppo.v1.trainer_base import StatefulDataLoader

    rows = list(range(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch counts the processors of this machine
        StatefulDataLoader(
            dataset=rows,
            batch_size=size,
            num_workers=data["dataloader_num_workers"],
            drop_last=True,
            sampler=create_rl_sampler(data, rows),
        )
