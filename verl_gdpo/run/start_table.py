"""Shows the starts of a run as a table, and what each reward was at both ends of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from verl_gdpo.run.folder import Metrics, MetricsReader, training_rewards, validation_rewards
from verl_gdpo.run.starts import RecordedStart, starts_of

STARTS = ("start", "time", "from step", "to step", "end", "changed")
ENDS = ("first step", "last step", "validation before", "after")
NOTHING = "-"
END_CHARACTERS = 80  # Ray's messages have hundreds


def history(run: Path) -> list[tuple[str, ...]]:
    """Return a row for each start under `STARTS`; nothing for a run without manifests."""
    return [_row(run, recorded) for recorded in starts_of(run)] if run.is_dir() else []


def _row(run: Path, recorded: RecordedStart) -> tuple[str, ...]:
    start = recorded.start
    # wherever the run's folder is now
    file = run / "metrics" / Path(start.metrics).name
    steps = [step for step, _ in MetricsReader(file).new()] if file.is_file() else []
    changes = [
        f"{key}: {before} -> {after} ({verdict})"
        for key, (before, after, verdict) in start.changes.items()
    ]
    return (
        str(recorded.number),
        start.time[: len("2026-01-01T00:00")].replace("T", " "),
        str(start.step),
        str(max(steps, default=NOTHING)),
        # all of it stays in the start's end.yaml
        shorten(str(recorded.end.get("why", "not recorded")), END_CHARACTERS, placeholder=" ..."),
        "; ".join([*changes, *start.warnings]) or NOTHING,
    )


@dataclass(frozen=True)
class EndValue:
    """A value of a reward, and its step where that is not the one that the name says."""

    value: float
    other_step: int | None = None

    def __str__(self) -> str:
        place = "" if self.other_step is None else f" (step {self.other_step})"
        return f"{self.value:.3f}{place}"


def ends(metrics: Metrics) -> dict[str, dict[str, EndValue]]:
    """{reward: {one of `ENDS`: its value}}, without those that were not measured.

    A validation is before the training if it is of step 0, as verl counts, and after it otherwise.
    """
    training, validation = training_rewards(metrics), validation_rewards(metrics)
    last = max((step for curve in training.values() for step in curve), default=0)
    values: dict[str, dict[str, EndValue]] = {name: {} for name in (*training, *validation)}
    for name, curve in training.items():
        values[name]["first step"] = _end(curve, min(curve), named=1)
        values[name]["last step"] = _end(curve, max(curve), named=last)
    for name, curve in validation.items():
        if 0 in curve:
            values[name]["validation before"] = EndValue(curve[0])
        if later := [step for step in curve if step > 0]:
            values[name]["after"] = _end(curve, max(later), named=max(last, *later))
    return values


def _end(curve: Mapping[int, float], step: int, named: int) -> EndValue:
    return EndValue(curve[step], None if step == named else step)
