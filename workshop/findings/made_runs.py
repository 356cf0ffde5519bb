"""Made metrics of runs whose label is known: healthy ones, and ones with one fault that begins.

There are two parts. Rules are tuned on the first one; the second one has other seeds, other healthy
kinds, other ways in which a fault begins, other noise, other sizes and other gaps of the log.
Beside each stand other healthy runs, whose noise and curves are harder to tell from faults.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from verl_gdpo.tools.run_folder.finding_rules import FEW
from workshop.findings import made_metrics as made
from workshop.findings.made_metrics import Columns, Floats, Maker, Noise, Part, Shape, Way

FALLING = 100  # rows in which a fault comes, at most, and at most a third of the run
TUNING = Part(
    seed=1,
    healthy={
        "flat": Shape("flat"),
        "learning": Shape(),
        "saturating": Shape(last=(1, 1), advantages=(1.5, 4)),
        "harder prompts once": Shape(drops=1),
        "a weight ends": Shape(schedule="ends"),
        "restarts": Shape(restarts=True),
        "data sources": Shape(sources=True),
        "spikes of a step": Shape(spike=1),
        "sparse": Shape(first=(0.002, 0.02), last=(0.02, 0.2)),
        "longer answers": Shape(length=(1.2, 2), entropy=(0.15, 0.4), kl=(0.05, 0.5)),
        "rewards that oppose": Shape(opposed=True),
        "validation stays": Shape(validation="stays"),
    },
    lengths={60: 192, 400: 192, 1500: 192},
    sick_rows=(90, 350),
    ways=(Way(0.0), Way(0.5), Way(1.0)),
    noises=(Noise(), Noise(0.5), Noise(0, 5)),
    series=(2, 4, 12),
    groups=(32, 128, 512),
    samples=(4, 8, 16),
    ranges=((0, 1), (0, 2)),
    gaps=(1, 1, 5),
    every=(2, 5, 10),
)
HELD_OUT = Part(
    seed=2,
    healthy={
        "stairs": Shape("stairs", entropy=(0.15, 0.3)),
        "late": Shape("late", kl=(0.1, 0.5)),
        "waves": Shape("wave"),
        "harder prompts three times": Shape(drops=3, length=(1, 2)),
        "a weight begins": Shape("late", schedule="begins"),
        "restarts and data sources": Shape(restarts=True, sources=True),
        "rewards of prompts of their own": Shape(own_prompts=True),
        "spikes of two steps": Shape(spike=2, kl=(0.05, 0.5)),
        "sparse, longer answers": Shape("late", (0.002, 0.02), (0.02, 0.2), length=(1.5, 2)),
        "saturating, entropy to .15": Shape("stairs", last=(1, 1), entropy=(0.15, 0.16)),
        "shorter answers, rewards that oppose": Shape(length=(0.5, 0.8), opposed=True),
        "flat, longer answers, KL to .5": Shape("flat", length=(1.8, 2), kl=(0.45, 0.5)),
        "stairs, validation stays": Shape("stairs", validation="stays"),
    },
    lengths={80: 208, 300: 208, 900: 208, 2000: 208},
    sick_rows=(120, 300),
    ways=(
        Way(0.0),
        Way(1.0, lambda t: t * t * (3 - 2 * t)),
        Way(1.0, lambda t: np.ceil(t * 3) / 3),
    ),
    noises=(Noise(), Noise(0.8), Noise(0, 3), Noise(0.4, 4)),
    series=(1, 3, 8, 20),
    groups=(48, 96, 256),
    samples=(5, 8, 12),
    ranges=((0, 1), (-3, 3), (-1, 0)),
    gaps=(1, 1, 2, 10),
    every=(1, 4, 20),
)

# Noise that lasts for many steps, rewards that stand still, curricula, and small validations.
HARDER = {
    "noise that lasts": Shape(wander=0.15),
    "plateaus": Shape("plateaus"),
    "curriculum": Shape("curriculum"),
    "saturating, small validation": Shape(last=(0.95, 1), test_rows=50),
    "small validation": Shape("stairs", test_rows=30),
    "small validation that stays": Shape(validation="stays", test_rows=64),
    "plateaus, noise that lasts": Shape("plateaus", wander=0.15, length=(1, 2)),
    "curriculum, small validation": Shape("curriculum", test_rows=50, sources=True),
}
LASTING = (Noise(0.9), Noise(0.95), Noise(0.7, 4))
OTHER_TUNING = TUNING._replace(
    seed=3, healthy=HARDER, lengths={100: 200, 500: 200, 1200: 200}, noises=LASTING
)
# Beside these, other seeds, lengths, samples and ranges are what is held out.
OTHER_HELD_OUT = HELD_OUT._replace(
    seed=4, healthy=HARDER, lengths={90: 200, 400: 200, 1600: 200}, noises=LASTING
)

Fault = Callable[[Maker, Floats], None]  # changes a run; from 0 to 1, how far the fault is there


def _level(name: str, low: float, high: float, first: float | None = None) -> Fault:
    """A metric goes to a level, from `first` if that is given; on the logarithm."""

    def fault(run: Maker, ramp: Floats) -> None:
        old = np.full(run.rows, first) if first else run.paths[name]
        run.paths[name] = old * (run.uniform(low, high) / old) ** ramp

    return fault


def _times(factor: float, *names: str) -> Fault:
    def fault(run: Maker, ramp: Floats) -> None:
        for name in names:
            run.paths[name] = run.paths[name] * factor**ramp

    return fault


def _hacked(factor: float) -> Fault:
    def fault(run: Maker, ramp: Floats) -> None:
        _times(factor, made.LENGTH)(run, ramp)
        run.rates[:2] = [run.uniform(0.4, 0.9) - 0.2 * ramp, 0.4 + 0.4 * ramp][: len(run.rates)]

    return fault


def _constant(share: float, rate: float | None) -> Fault:
    def fault(run: Maker, ramp: Floats) -> None:
        run.varies[0] = run.uniform(0.2, 0.8) * (1 - ramp) + share * ramp
        run.rates[0] = run.rates[0] if rate is None else run.rates[0] * (1 - ramp) + rate * ramp

    return fault


def _ignored(low: float, high: float) -> Fault:
    return lambda run, _: run.shares.update({0: run.uniform(low, high)})


def _worse_in_validation(fall: float) -> Fault:
    def fault(run: Maker, ramp: Floats) -> None:
        first = run.uniform(0.35, 0.75)
        run.rates[0] = first + 0.15 * ramp
        run.tests[0] = first - fall * ramp

    return fault


def _traded(fall: float, gain: float) -> Fault:
    """Of two rewards, one falls while the other rises; the length stays."""

    def fault(run: Maker, ramp: Floats) -> None:
        run.rates[0] = run.uniform(0.4, 0.9) - fall * ramp
        run.rates[1] = run.uniform(0.2, 0.9 - gain) + gain * ramp

    return fault


def _zero(*names: str) -> Fault:
    def fault(run: Maker, ramp: Floats) -> None:
        for name in names:
            run.paths[name] = np.where(ramp > 0, 0.0, run.paths[name])

    return fault


def _collapse(run: Maker, ramp: Floats) -> None:
    run.rates[0] = 0.62 * (1 - ramp) + 0.016 * ramp


def _infinite(run: Maker, ramp: Floats) -> None:
    run.paths["actor/grad_norm"] = np.where(ramp > 0, np.inf, run.paths["actor/grad_norm"])


# {kind: (how the topic begins that names it, the fault)}
SICK: dict[str, tuple[str, Fault]] = {
    "gradient infinite": ("no number", _infinite),
    "gradient norm to 22,000": ("gradient", _level("actor/grad_norm", 22_000, 22_000)),
    "entropy to .1 of its start": ("entropy", _times(0.1, made.ENTROPY)),
    "entropy to .03 of its start": ("entropy", _times(0.03, made.ENTROPY)),
    "entropy to .01 of its start": ("entropy", _times(0.01, made.ENTROPY)),
    "ppo_kl .003 to .3": ("update", _level(made.KL, 0.3, 0.3, first=0.003)),
    "kl_loss .003 to 3": ("reference", _level(made.KL_LOSS, 3, 3, first=0.003)),
    "pg_clipfrac to .55-.9": ("clipped", _level(made.CLIPPED, 0.55, 0.9)),
    "response clip_ratio to .55-.9": ("length limit", _level(made.CUT, 0.55, 0.9)),
    "aborted_ratio to .5": ("aborted", _level("response/aborted_ratio", 0.5, 0.5)),
    "reward .62 to .016": ("collapse correctness", _collapse),
    "length to a third, reward -.2": ("length correctness", _hacked(1 / 3)),
    "length times 3, reward -.2": ("length correctness", _hacked(3)),
    "reward dead at its lowest": ("constant correctness", _constant(0, 0)),
    "reward the same in all groups": ("constant correctness", _constant(0, None)),
    "reward varies in 3 % of the groups": ("constant correctness", _constant(0.03, None)),
    "reward saturated, varies in 3 %": ("constant correctness", _constant(0.03, 0.995)),
    "share 0 to 2 % of a fair one": ("ignored correctness", _ignored(0, 0.02)),
    "share -50 to 0 % of a fair one": ("ignored correctness", _ignored(-0.5, 0)),
    "validation -.1 in 24, training +.15": ("validation correctness", _worse_in_validation(0.1)),
    "validation -.3 in 10, training +.15": ("validation correctness", _worse_in_validation(0.3)),
    "gradient norm 0": ("untrained", _zero("actor/grad_norm")),
    "advantages 0": ("untrained", _zero(made.LARGEST, made.SMALLEST)),
    "reward -.2, another +.2": ("traded correctness", _traded(0.2, 0.2)),
    "reward -.3, another +.4": ("traded correctness", _traded(0.3, 0.4)),
}
VALIDATIONS_OF = {"validation -.3 in 10, training +.15": 10}  # of the others: 24


@dataclass(frozen=True)
class MadeRun:
    """rows: (step, metrics) in the order in which a run logs them; a resume goes back in steps."""

    kind: str
    steps: int
    series: int
    rows: list[tuple[int, dict[str, float]]]
    begin: int = 0  # the step at which the fault begins; 0 for a healthy run


def healthy_runs(part: Part, steps: int, seeds: range) -> Iterator[MadeRun]:
    """One run a seed; the kinds take turns, and a quarter of the runs has no `gdpo/` metrics."""
    for seed in seeds:
        kind = [*part.healthy][seed % len(part.healthy)]
        rng = np.random.default_rng([part.seed, 1, steps, seed])
        gap = int(rng.choice([gap for gap in part.gaps if steps >= 60 * gap]))
        run = Maker(rng, part, steps // gap, part.healthy[kind])
        columns = run.columns(plain=bool(rng.random() < 1 / 4))
        rows = _rows(columns, gap, rng if run.shape.restarts else None)
        yield MadeRun(kind, steps, run.series, rows)


def sick_runs(part: Part, kind: str, rows: int, seeds: range) -> Iterator[MadeRun]:
    """Runs with one fault, that is there at most two thirds into the run."""
    topic, fault = SICK[kind]
    for seed in seeds:
        rng = np.random.default_rng([part.seed, 2, rows, seed, [*SICK].index(kind)])
        healthy = [*part.healthy.values()][rng.integers(len(part.healthy))]
        of_ignored = topic.startswith("ignored")
        of_traded = topic.startswith("traded")
        if of_ignored or of_traded:
            most = FEW if of_traded else max(part.series)  # the rule looks at no more
            part = part._replace(series=tuple(n for n in part.series if 1 < n <= most))
        has_sources = healthy.sources and not of_ignored and not of_traded
        run = Maker(rng, part, rows, Shape(healthy.curve, sources=has_sources))
        way = part.ways[seed % len(part.ways)]
        begin, lasts = int(rng.integers(25, max(26, rows // 3))), way.slow * min(FALLING, rows / 3)
        if topic.startswith("validation"):
            run.every = int(rng.choice([n for n in (1, 4, 20) if 30 * n <= rows]))
            count = VALIDATIONS_OF.get(kind, 24)
            begin = int(rng.integers(5, rows - 24 * run.every))
            lasts = count * run.every
        fault(run, way.rise(np.clip((np.arange(rows) - begin) / max(lasts, 1e-9), 0, 1)))
        columns = run.columns(plain=" " not in topic and rng.random() < 1 / 4)
        first = 1 if of_ignored else (begin + 1) * run.gap
        yield MadeRun(kind, rows * run.gap, run.series, _rows(columns, run.gap), first)


def _rows(
    columns: Columns, gap: int, restarts: np.random.Generator | None = None
) -> list[tuple[int, dict[str, float]]]:
    rows = [
        (row * gap, {n: v for n, v in zip(columns, values, strict=True) if v == v})  # NaN is none
        for row, values in enumerate(np.column_stack([*columns.values()]).tolist(), start=1)
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
