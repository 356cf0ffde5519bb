"""What the stages gave, in one file that is whole at any moment, and as a table."""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.terminal import render

KEPT = (
    *("timing_s/", "perf/", "training/rollout_", "gdpo/", "actor/", "prompt_length/"),
    *("response_length/", "critic/score/mean", "critic/advantages/", "training/global_step"),
)
TAIL_LINES = 60
LEAST_AGREEMENT = 0.99
AGREEMENT = "training/rollout_actor_probs_pearson_corr"
COLUMNS = {  # of a training: the median of its steps after the first
    "step s": "timing_s/step",
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "reference": "timing_s/ref",
    "update": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
    "tokens/s": "perf/throughput",
    "GPU GiB": "actor/perf/max_memory_allocated_gb",
    "agreement": AGREEMENT,
}


class Results:
    """`{"machine": ..., "stages": {name: {...}}}`, from the file where an earlier call left it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: dict[str, Any] = {"machine": {"gpus": []}, "stages": {}}
        if path.exists():
            self.all = json.loads(path.read_text())

    def save(self) -> None:
        """A kill leaves the file of before, or the new one."""
        with replace_together(self.path) as [new]:
            new.write_text(json.dumps(self.all, indent=1))

    def stage(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.all["stages"].setdefault(name, {})
        return found


def kept(metrics: Mapping[str, float]) -> dict[str, float]:
    """What is read later; JSON has no NaN."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {name: value for name, value in finite.items() if name.startswith(KEPT)}


def tail(log: Path) -> list[str]:
    """The last lines of a log, of which progress bars make one."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
        text = file.read().decode(errors="replace")
    return [line.rpartition("\r")[2][:400] for line in text.splitlines()][-TAIL_LINES:]


def problem_of_training(
    steps: Mapping[str, Mapping[str, float]], wanted: int, agreement: bool
) -> str:
    """What a training that ended by itself lacks; empty when nothing."""
    if len(steps) < wanted:
        return f"{len(steps)} of {wanted} steps"
    if agreement:
        low = {step: m.get(AGREEMENT) for step, m in steps.items()}
        low = {step: v for step, v in low.items() if v is None or not v > LEAST_AGREEMENT}
        if low:
            return f"{AGREEMENT} is not above {LEAST_AGREEMENT}: {low}"
    return ""


def medians(steps: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of the steps after the first, which has to compile and to allocate."""
    later = [steps[step] for step in sorted(steps, key=int)][1:] or list(steps.values())
    found = {}
    for key in COLUMNS.values():
        values = [step[key] for step in later if key in step]
        if values:
            found[key] = statistics.median(values)
    return found


def table(stages: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[Sequence[str]] = []
    for name, stage in stages.items():
        of_steps = medians(stage.get("steps", {}))
        cells = [_cell(of_steps.get(key)) for key in COLUMNS.values()]
        seconds = f"{stage['seconds']:.0f}" if "seconds" in stage else ""
        count = str(len(stage.get("steps", {})) or "")
        rows.append([name, str(stage.get("status", "")), seconds, count, *cells])
    return render(["stage", "status", "seconds", "steps", *COLUMNS], rows, left=(0, 1))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
