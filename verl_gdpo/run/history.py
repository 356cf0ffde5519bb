"""A run's starts as a table: when each began and ended, and what was changed."""

from collections.abc import Sequence
from pathlib import Path

from verl_gdpo.run.folder import MetricsReader
from verl_gdpo.run.starts import Written, starts_of

HEADER = ("start", "time", "from step", "to step", "end", "changed")
NOTHING = "-"


def history(run: Path) -> list[tuple[str, ...]]:
    """Return a row for each start under `HEADER`; nothing for a run without manifests."""
    return [_row(run, written) for written in starts_of(run)] if run.is_dir() else []


def _row(run: Path, written: Written) -> tuple[str, ...]:
    start = written.start
    steps = _steps(run, start.metrics)
    changed = [
        f"{key}: {before} -> {after} ({verdict})"
        for key, (before, after, verdict) in start.changes.items()
    ]
    return (
        str(written.number),
        start.time[: len("2026-01-01T00:00")].replace("T", " "),
        str(start.step),
        str(max(steps)) if steps else NOTHING,
        str(written.end.get("why", "not recorded")),
        "; ".join([*changed, *start.warnings]) or NOTHING,
    )


def _steps(run: Path, metrics: str) -> Sequence[int]:
    """The steps in the metrics of one start, wherever the run's folder is now."""
    file = run / "metrics" / Path(metrics).name if metrics else run
    return [step for step, _ in MetricsReader(file).new()] if file.is_file() else []
