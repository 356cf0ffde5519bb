"""Made metrics of runs whose label is known: healthy ones, and ones with one fault that begins.

The labels were fixed before the rules were tuned.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workshop.findings.made_metrics import ABSENT, Columns, Maker

HEALTHY = (
    "flat",
    "learning",
    "saturated",
    "curriculum",  # harder prompts take up to half of the reward away at once
    "weight schedule",  # a reward ends
    "restarts",  # steps that are repeated or lost, and null values
    "sources",
    "spikes",  # of gradient, KL and entropy for one step
    "sparse",
    "lengthening",  # longer answers, falling entropy, a growing KL
    "trade-off",  # two rewards that oppose each other
)
WRECKED = (
    "reward is NaN for 30 steps",
    "gradient is NaN",
    "gradient norm 22,000",
    "entropy 1e-4",
    "KL .4 where it was .001",
    "KL to the reference .4 where it was .001",
    "|A| grows e^10",
    "correctness .62 to .016 at once",
    "correctness .62 to .016 slowly",
)
LENGTHS = (60, 500, 5000)


@dataclass(frozen=True)
class MadeRun:
    """rows: (step, metrics) in the order in which a run logs them; a resume goes back in steps."""

    kind: str
    steps: int
    seed: int
    rows: list[tuple[int, dict[str, float]]]
    begin: int | None = None  # the step at which the fault begins; None for a healthy run
    onset: int | None = None  # the step from which on it is plain to see


def healthy_runs(seeds: range, steps: int) -> Iterator[MadeRun]:
    """One run a seed; the kinds take turns, and a third of the runs has no `gdpo/` metrics."""
    for seed in seeds:
        kind = HEALTHY[seed % len(HEALTHY)]
        rng = np.random.default_rng([1, steps, seed])
        run = Maker(rng, steps, kind)
        columns = run.columns(plain=bool(rng.random() < 1 / 3))
        yield MadeRun(kind, steps, seed, _rows(columns, rng if kind == "restarts" else None))


def wrecked_runs(seeds: range, steps: int) -> Iterator[MadeRun]:
    """One run of each fault a seed."""
    for seed in seeds:
        for number, kind in enumerate(WRECKED):
            rng = np.random.default_rng([2, steps, seed, number])
            flat = rng.random() < 0.5
            run = Maker(rng, steps, "flat" if flat else "learning", highest=0.62)
            columns = run.columns(plain=bool(rng.random() < 1 / 3))
            begin = int(rng.integers(max(20, steps // 4), 3 * steps // 4))
            onset = _break(kind, columns, run, begin)
            yield MadeRun(kind, steps, seed, _rows(columns), begin + 1, onset)


def _break(kind: str, columns: Columns, run: Maker, begin: int) -> int:
    """Put one fault into the metrics from the step `begin` on; return when it is there."""
    after = np.arange(run.steps) >= begin
    if kind == "reward is NaN for 30 steps":
        for name in [name for name in columns if name.endswith("/mean") and "length" not in name]:
            columns[name][begin : begin + 30] = np.nan
    elif kind == "gradient is NaN":
        columns["actor/grad_norm"][after] = np.nan
    elif kind == "gradient norm 22,000":
        columns["actor/grad_norm"][after] = (22_000 * run._noise(0.3))[after]
    elif kind == "entropy 1e-4":
        columns["actor/entropy"] += 0.02
        columns["actor/entropy"][after] = (1e-4 * run._noise(0.3))[after]
    elif kind.startswith("KL"):
        name = "actor/kl_loss" if "reference" in kind else "actor/ppo_kl"
        columns[name] = np.where(after, 0.4, 0.001) * run._noise(0.25)
    elif kind == "|A| grows e^10":
        growth = np.exp(
            10 * np.clip((np.arange(run.steps) - begin) / (run.steps - 1 - begin), 0, 1)
        )
        for end in ("min", "max"):
            columns[f"critic/advantages/{end}"] *= growth
        return int(np.argmax(growth >= 100)) + 1
    else:
        return _collapse(columns, run, begin, slowly=kind.endswith("slowly"))
    return begin + 1


def _collapse(columns: Columns, run: Maker, begin: int, slowly: bool) -> int:
    """Correctness falls to .016, in 3 steps or in a fifth of the run; in plain verl both do."""
    wait = run.steps // 5 if slowly else 3
    falls = np.clip((np.arange(run.steps) - begin) / wait, 0, 1)
    plain = not any(name.startswith("gdpo/") for name in columns)
    for number, name in enumerate(run.names[: 2 if plain else 1]):
        rate = run.rates[number] * (1 - falls) + 0.016 * falls
        run.rates[number] = rate
        if not plain:
            mean = run._means(rate, run.groups * run.samples)
            columns |= run._of_reward(name, rate, mean)
    total = [run._means(rate, run.groups * run.samples) for rate in run.rates]
    columns["critic/score/mean"] = total[0] + total[1]
    return begin + wait + 1


def _rows(
    columns: Columns, restarts: np.random.Generator | None = None
) -> list[tuple[int, dict[str, float]]]:
    names = list(columns)
    rows = [
        (step, {name: value for name, value in zip(names, values, strict=True) if value != ABSENT})
        for step, values in enumerate(np.column_stack(list(columns.values())).tolist(), start=1)
    ]
    if restarts is None:
        return rows
    for _ in range(int(restarts.integers(1, 4))):  # go back to a checkpoint, and repeat its steps
        last = int(restarts.integers(len(rows) // 2, len(rows)))
        first = max(0, last - int(restarts.integers(1, 20)))
        noise = float(np.exp(restarts.normal(0, 0.1)))
        again = [
            (step, {n: v * noise if n.startswith("actor/") else v for n, v in values.items()})
            for step, values in rows[first:last]
        ]
        rows = [*rows[:last], *again, *rows[last:]]
    del rows[len(rows) // 3]  # a line that could not be read
    return rows
