"""Logs a small table of the rollouts of a step to W&B and tensorboard.

It is asked for by

    trainer:
      log_rollouts: {every: 20, rows: 8}    # each 20th step; `rows` is 8 if it is left out

Relies on verl 0.9 `Tracking.logger`, whose "wandb" is that module, and whose "tensorboard" has a
SummaryWriter called `writer`. verl logs the metrics of a step afterwards, so both share its step.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from omegaconf import OmegaConf
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

NAME = "gdpo/rollouts"
KEY = "trainer.log_rollouts"
MOST_ROWS = 64
CHARACTERS = 1000  # of a prompt, from its end, and of a response, from its start
TRACKERS = ("wandb", "tensorboard")
FIRST = ("group", "session", "data_source", "advantage", "response_tokens")

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, config={"extra": "forbid", "strict": True})
class RolloutTable:
    """Which steps log a table, and of how many rows."""

    every: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 8

    @classmethod
    def of(cls, config: Any, has_rewards: bool) -> "RolloutTable | None":
        """Return what `trainer.log_rollouts` of verl's configuration asks for; None for nothing.

        Args:
            has_rewards: whether this trainer knows the rewards of a step's rollouts.

        Raises:
            ValueError: the key holds something else, or the run writes no rollouts or has no
                rewards or tracker for them.
        """
        block = OmegaConf.select(config, KEY)
        if block is None:
            return None
        if not has_rewards:
            raise ValueError(
                f"{KEY}={block} needs a V1 trainer with algorithm.adv_estimator=gdpo or "
                "reward.reward_manager.name=gdpo; without them, no table would be logged"
            )
        try:
            table = cls(**block)
        except (TypeError, ValidationError):
            raise ValueError(
                f"{KEY}={block}: expected {{every: STEPS, rows: ROWS}}, with steps of 1 or more, "
                f"and 1 to {MOST_ROWS} rows"
            ) from None
        if not config.trainer.get("rollout_data_dir"):
            raise ValueError(f"{KEY} needs trainer.rollout_data_dir, whose rollouts it shows")
        logger = config.trainer.logger
        trackers = [logger] if isinstance(logger, str) else [*logger]
        if not {*TRACKERS} & {*trackers}:
            raise ValueError(f"{KEY}: trainer.logger={trackers} has none of {TRACKERS}")
        return table

    def log(
        self,
        trackers: Mapping[str, Any],
        step: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        columns: Columns,
    ) -> None:
        """Log the table of a step, if it is one of those that do.

        Args:
            trackers: verl's `Tracking.logger`.
            inputs, outputs: the prompt and the response of each row.
            columns: what `DumpRows.columns` returns for these rows.
        """
        if step % self.every:
            return
        rows, rewards = chosen(columns, self.rows, step), columns["rewards"]
        names = list(dict.fromkeys(name for row in rows for name in rewards[row]))
        header = ["step", *FIRST, *names, "prompt", "response"]
        lines = [
            [
                step,
                *(columns[name][row] for name in FIRST),
                *(rewards[row].get(name) for name in names),
                _cut(inputs[row], at_start=True),
                _cut(outputs[row]),
            ]
            for row in rows
        ]
        if "wandb" in trackers:
            table = trackers["wandb"].Table(header, lines, allow_mixed_types=True)
            trackers["wandb"].log({NAME: table}, step=step)
        if "tensorboard" in trackers:
            text = "\n\n".join(_block(header, line) for line in lines)
            trackers["tensorboard"].writer.add_text(NAME, text, step)


def chosen(columns: Columns, count: int, step: int) -> list[int]:
    """Return at most `count` rows: whole groups, in an order that the step draws."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(columns["group"]):
        if not columns["is_padding"][row]:
            members.setdefault(group, []).append(row)
    order = np.random.default_rng(step).permutation(sorted(members)).tolist()
    return [row for group in order for row in members[group]][:count]


def _cut(text: str, at_start: bool = False) -> str:
    more = len(text) - CHARACTERS
    if more <= 0:
        return text
    left_out = f"[{more} more characters]"
    return f"{left_out} {text[more:]}" if at_start else f"{text[:CHARACTERS]} {left_out}"


def _block(header: Sequence[str], line: Sequence[Any]) -> str:
    """Return Markdown for a block of code, in which nothing that a model wrote is Markdown."""
    text = "\n".join(map("{}: {}".format, header, line))
    return textwrap.indent(text, "    ", lambda _: True)
