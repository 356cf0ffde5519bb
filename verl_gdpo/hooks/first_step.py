"""Says at once where the `format` of a task is 0 for all samples of the first step that has any.

A policy of any skill writes the form now and then, so that a reason is likely that no training
mends: a prompt that has a part of the form already, a tag that decoding takes away, or calls in a
format that the task was not told to read.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.hooks.configuration import has_own_scorer
from verl_gdpo.scoring.function_list import JOINT, KEY, entries_of, task_of_entry
from verl_gdpo.tasks import TASK_BY_SOURCE, Task

logger = logging.getLogger(__name__)

FORMAT = "format"  # the reward of tasks that ask for a form


class FormatReward(NamedTuple):
    """The reward `format` of a task, for the rows of a data source."""

    task: str
    source: str
    name: str


@dataclass
class Zeros:
    """The samples so far, which all have a `format` of 0.

    response: the first one, with its special tokens.
    """

    count: int = 0
    response: str = ""


@dataclass
class FirstFormats:
    """Looks at each `format` once: in the first step in which it applies.

    seen: those of which all is known.
    zeros: {reward: its samples}, of those that have had too few samples.
    of_source: {data source: its rewards `format`}. Without it, each step would read the
        configuration anew for each of its sources.
    """

    seen: set[FormatReward] = field(default_factory=set)
    zeros: dict[FormatReward, Zeros] = field(default_factory=dict)
    of_source: dict[str, list[FormatReward]] = field(default_factory=dict)

    def look(
        self, config: Any, rows: BatchRows, response_of: Callable[[int], str], least: int = 1
    ) -> None:
        """Log a line for each `format` that is 0 for all of its first samples.

        Args:
            response_of: returns the response of a row, with its special tokens.
            least: samples, of one call or several, before anything is said. A step has as many as
                it has; dynamic sampling looks at a few groups at a time.
        """
        # One row of each data source is enough to know which tasks score it.
        for source in dict.fromkeys(rows.sources):
            if source not in self.of_source:
                self.of_source[source] = list(format_rewards(config, source))
            for reward in self.of_source[source]:
                if reward in self.seen or reward.name not in rows.columns:
                    continue
                samples = _samples_with(reward, rows)
                if not samples:
                    continue
                # One sample that has the form shows that the run can score it.
                column = rows.columns[reward.name]
                if any(column[row] != 0 for row in samples):
                    self.seen.add(reward)
                    continue
                # Only the first response is decoded, because a batch of them takes seconds.
                zeros = self.zeros.setdefault(reward, Zeros())
                if zeros.count == 0:
                    zeros.response = response_of(samples[0])
                zeros.count += len(samples)
                if zeros.count >= least:
                    self.seen.add(reward)
                    _warn(reward, rows.step, zeros)


def format_rewards(config: Any, source: str) -> Iterator[FormatReward]:
    """Yield the rewards `format` of the tasks that score rows of a data source.

    A run may have it under the name of verl's own scorer.
    """
    # Without a function of the user's, the task of the data source scores.
    if not has_own_scorer(config):
        task = TASK_BY_SOURCE.get(source)
        if task is not None and _has_format(task):
            yield FormatReward(task.name, source, FORMAT)
            for verls, ours in task.verl_names.items():
                if ours == FORMAT:
                    yield FormatReward(task.name, source, verls)
        return
    for name, entry in entries_of(config).items():
        if not entry.get("task"):
            continue
        task = task_of_entry(f"{KEY}.{name}", entry)
        if _has_format(task):
            yield FormatReward(task.name, source, f"{name}{JOINT}{FORMAT}")


def _has_format(task: Task) -> bool:
    return FORMAT in task.reward_names


def _samples_with(reward: FormatReward, rows: BatchRows) -> list[int]:
    """Return the samples of the data source to which the reward applies."""
    samples = []
    for row in rows.samples:
        value = rows.columns[reward.name][row]
        if rows.sources[row] == reward.source and value is not ABSENT and value is not None:
            samples.append(row)
    return samples


def _warn(reward: FormatReward, step: int | None, zeros: Zeros) -> None:
    logger.warning(
        "verl-gdpo: %s of task %s is 0 for all %d samples of data_source %r in step %s, the first "
        "with such rows. The prompt may have a part of the form already, decoding may take a tag "
        "away, or the policy may call tools in another format: `verl-gdpo check` with the run's "
        "overrides looks for all three. The first response, with its special tokens: %r",
        reward.name,
        reward.task,
        zeros.count,
        reward.source,
        step,
        zeros.response,
    )
