"""The ends of a run: each reward at its first and last step, and validation before and after."""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_gdpo.run.folder import Metrics, training_rewards, validation_rewards

NAMES = ("first step", "last step", "validation before", "after")
NOTHING = "-"


@dataclass(frozen=True)
class End:
    """A value of a reward, and its step where that is not the one that the name says."""

    value: float
    other_step: int | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (
            "" if self.other_step is None else f" (step {self.other_step})"
        )


def ends(metrics: Metrics, reward: str) -> dict[str, End]:
    """{one of `NAMES`: its value}; without those that were not measured.

    A validation is before the training if it is of step 0, as verl counts, and after it otherwise.
    """
    training, validation = training_rewards(metrics), validation_rewards(metrics)
    last = max((step for curve in training.values() for step in curve), default=0)
    found = {}
    if curve := training.get(reward):
        found["first step"] = _end(curve, min(curve), named=1)
        found["last step"] = _end(curve, max(curve), named=last)
    curve = validation.get(reward, {})
    if 0 in curve:
        found["validation before"] = End(curve[0])
    if later := [step for step in curve if step > 0]:
        found["after"] = _end(curve, max(later), named=max(last, *later))
    return found


def _end(curve: Mapping[int, float], step: int, named: int) -> End:
    return End(curve[step], None if step == named else step)
