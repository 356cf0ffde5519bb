"""Writes docs/in_verls_trainer.md: `page.md.jinja` says the words, and the data the numbers."""

import math
from pathlib import Path
from statistics import fmean, median

from workshop.benchmarks.step_model import FLOPS_SHARES, GPUS, TOOL_RL
from workshop.benchmarks.step_model import seconds as computed_seconds
from workshop.experiments.template import template_beside
from workshop.experiments.trainer import compare, expectations, paper, results, second, task
from workshop.experiments.trainer.compare import Results, difference
from workshop.experiments.trainer.conclusions import conclusions
from workshop.experiments.trainer.pictures import NAMES
from workshop.experiments.trainer.settings import (
    FURTHER_ARMS,
    PROTOCOL,
    REPO,
    SETTINGS,
    Run,
    plan,
)

PAGE = REPO / "docs" / "in_verls_trainer.md"
OUTAGE = Path(__file__).with_name("outage.jsonl")
EFFECTS = (0.02, 0.05, 0.1)
GPU_STEPS = 105  # of recipes/task/tool_rl.yaml
RIVALS = ("grpo", "grpo_rescaled")


def write(found: Results) -> None:
    PAGE.write_text(render(found))


def render(found: Results) -> str:
    first = {run: result for run, result in found.items() if run.setting in PROTOCOL}
    return template_beside(__file__).render(
        found=found,
        second=second,
        states=states,
        failed=failed,
        conclusions=conclusions(first),
        primary=table(first),
        endpoints=endpoints(first),
        further=further(first),
        outage=len(OUTAGE.read_text().splitlines()),
        starts=starts(first),
        compare=compare,
        task=task,
        paper=paper,
        needed=needed(found),
        expectations=expectations,
        first_gains={row: difference(first, *row) for row in compare.COMPARISONS},
        second_gains=compare.holm(found),
        gpu_table=gpu_table(),
        minutes=median([result.seconds / 60 for result in first.values()] or [math.nan]),
    )


def number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def table(found: Results) -> str:
    """A line for each setting of the protocol: what the arms earn of the small reward."""
    lines = [
        "| setting | seeds | GRPO | rescaled GRPO | GDPO | GDPO minus GRPO "
        "| GDPO minus rescaled GRPO |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in PROTOCOL:
        setting = SETTINGS[name]
        means = [_mean(found, name, arm) for arm in (*RIVALS, "gdpo")]
        gains = [
            f"{gain.text()}; {gain.verdict}"
            for other in RIVALS
            if other in setting.arms
            for gain in [difference(found, name, "gdpo", other)]
        ]
        gains += ["the same as GRPO"] * (len(RIVALS) - len(gains))
        done = min(sum(Run(name, a, s) in found for s in setting.seeds) for a in setting.arms)
        seeds = f"{done} of {len(setting.seeds)}"
        lines.append(f"| {setting.title} | {seeds} | {' | '.join([*means, *gains])} |")
    return "\n".join(lines)


def endpoints(found: Results) -> str:
    """A line for each comparison: all endpoints, with 95 % intervals that are not corrected."""
    lines = [
        f"| setting | GDPO minus | {' | '.join(compare.ENDPOINTS)} |",
        "|---" * (2 + len(compare.ENDPOINTS)) + "|",
    ]
    for setting, arm, other in compare.in_order(found):
        gains = [
            difference(found, setting, arm, other, endpoint, level=0.95)
            for endpoint in compare.ENDPOINTS.values()
        ]
        cells = [gain.text() if gain.of_seed else "not kept" for gain in gains]
        row = [SETTINGS[setting].title, NAMES[other], *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _mean(found: Results, setting: str, arm: str) -> str:
    """Of the small reward."""
    runs = [Run(setting, arm, seed) for seed in SETTINGS[setting].seeds]
    values = [compare.primary(found[run], SETTINGS[setting]) for run in runs if run in found]
    return number(fmean(values)) if values else ""


def further(found: Results) -> str:
    """A line for each further arm, with 95 % intervals that are not corrected."""
    first = next(iter(SETTINGS))
    lines = ["| arm | seeds | small reward | GDPO minus it |", "|---|---|---|---|"]
    for arm in FURTHER_ARMS:
        gain = difference(found, first, "gdpo", arm, level=0.95)
        mean = _mean(found, first, arm)
        if mean:
            lines.append(f"| `{arm}` | {len(gain.of_seed)} | {mean} | {gain.text()} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def states(found: Results, edition: int) -> str:
    planned = _planned(edition)
    done = sum(run in found for run in planned)
    left = [run for run in planned if run not in found]
    given_up = sum(len(results.failures(run)) >= results.MAX_TRIES for run in left)
    lost = f", {given_up} failed twice" if given_up else ""
    if done + given_up == len(planned):
        return f"All {len(planned)} runs have ended{lost}."
    return f"So far {done} of {len(planned)} runs are done{lost}."


def failed(edition: int) -> list[str]:
    """A line for each try that failed."""
    runs = _planned(edition)
    return [f"`{run}`: {failure.reason}" for run in runs for failure in results.failures(run)]


def _planned(edition: int) -> list[Run]:
    return [run for run in plan() if SETTINGS[run.setting].edition == edition]


def starts(found: Results) -> tuple[float, float]:
    """The least and the greatest share of a reward in a starting policy's samples."""
    shares = [share for result in found.values() for share in result.start.values()]
    return (min(shares), max(shares)) if shares else (math.nan, math.nan)


def needed(found: Results) -> str:
    """A line for each comparison with two seeds: its spread, and the seeds that it would take."""
    lines = [
        f"| setting | GDPO minus | s | seeds for {' | for '.join(map(str, EFFECTS))} |",
        "|---|---|---|---|---|---|",
    ]
    for setting, arm, other in (*compare.COMPARISONS, *compare.COMPARISONS_2):
        gain = difference(found, setting, arm, other)
        if gain.verdict != "not complete":
            counts = [str(compare.seeds_needed(effect, gain.spread)) for effect in EFFECTS]
            row = [SETTINGS[setting].title, NAMES[other], number(gain.spread), *counts]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def gpu_table() -> str:
    """What the runs should take on GPUs: computed."""
    runs = len([*plan("8gpu")])
    lines = [f"| GPUs | a step | a run | all {runs} runs |", "|---|---|---|---|"]
    for gpu in GPUS:
        steps = [sum(computed_seconds(TOOL_RL, gpu, 8, share).values()) for share in FLOPS_SHARES]
        best, worst = (step * GPU_STEPS / 3600 for step in steps)
        row = f"{steps[0]:.0f} to {steps[1]:.0f} s | {best:.1f} to {worst:.1f} h"
        lines.append(f"| 8 x {gpu.name} | {row} | {runs * best:.0f} to {runs * worst:.0f} h |")
    return "\n".join(lines)
