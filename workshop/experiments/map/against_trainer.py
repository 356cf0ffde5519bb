"""The map beside verl's trainer: which of its two optimisers says what the trainer does."""

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from workshop.experiments.map.compare import gain
from workshop.experiments.map.results import OPTIMIZERS, Outcomes
from workshop.experiments.trainer import compare as trainer
from workshop.experiments.trainer.results import read_all

# the setting of the trainer: that of the map
SAME = {
    "20_to_1": "two, 20:1",
    "1_to_1": "two, 1:1",
    "by_prompt": "two answers, range by prompt",
    "tool_rl": "as ToolRL: format x 1, graded x 6",
}
RIVALS = {"grpo": "grpo", "grpo_rescaled": "grpo_range"}
ENDPOINTS = {"small": trainer.primary, "shares": trainer.mean_of_all}


class Beside(NamedTuple):
    """GDPO minus a rival, in the trainer and in the map."""

    setting: str
    rival: str
    endpoint: str
    trainer: float
    of_optimizer: dict[str, float]

    def error(self, optimizer: str) -> float:
        return self.of_optimizer[optimizer] - self.trainer


def beside(found: Outcomes) -> Iterator[Beside]:
    runs = read_all()
    for setting, _, rival in trainer.in_order(runs):
        for name, endpoint in ENDPOINTS.items():
            of_map = {
                optimizer: gain(found, optimizer, SAME[setting], RIVALS[rival], field=name).mean
                for optimizer in OPTIMIZERS
            }
            shown = trainer.difference(runs, setting, "gdpo", rival, endpoint).mean
            yield Beside(setting, rival, name, shown, of_map)


def trained(setting: str) -> str:
    """GDPO minus GRPO in verl's trainer, of the mean of all shares."""
    runs = read_all()
    gain = trainer.difference(runs, setting, "gdpo", "grpo", trainer.mean_of_all, level=0.95)
    return "not complete" if gain.verdict == "not complete" else gain.text()


def mean_error(rows: list[Beside], optimizer: str) -> float:
    """Of the absolute errors."""
    return fmean(abs(row.error(optimizer)) for row in rows)
