"""The data of the map: what is kept of the runs, in files of text."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from workshop.experiments.map.compare import Bootstrap, Interval, Outcome, outcomes
from workshop.experiments.map.settings import SETTINGS

DATA = Path(__file__).parent / "data"
MATTERS = 0.02  # a smaller difference counts as none
FIRST = 4  # seeds whose mean is kept too, so that a few runs can be compared with the data
REACHED = 0.8  # of the outcome
# what tells the parts of GDPO apart: each pair differs in one thing
PARTS = {
    "scale": ("grpo_range", "grpo"),
    "each reward": ("gdpo_no_batch_norm", "grpo_range"),
    "batch norm": ("gdpo", "gdpo_no_batch_norm"),
    "batch norm on GRPO": ("grpo_batch_norm", "grpo"),
    "ranges as weights": ("gdpo_weighted", "grpo"),
}
CURVES = ("two, 20:1", "two answers, range by prompt", "two and four noises of 0.05")
CURVE_ARMS = ("gdpo", "grpo", "grpo_range")


@dataclass(frozen=True)
class Row:
    """One arm in one setting."""

    rate: float
    is_edge: bool
    outcome: float  # mean over training
    final: float
    steps: int | None  # until the mean over the seeds reaches 0.8
    of_first: float  # the outcome of the first seeds alone
    hits: tuple[float, ...]  # of each reward, mean over training
    less_than_gdpo: Interval  # GDPO minus this arm


@dataclass(frozen=True)
class Map:
    """Everything that the pictures and the page show."""

    seeds: int
    cpu_minutes: float
    rows: Mapping[str, Mapping[str, Row]]  # setting, arm
    parts: Mapping[str, Mapping[str, Interval]]  # setting, what the pair differs in
    curves: Mapping[tuple[str, str, int], Sequence[float]]  # setting, arm, reward

    def gain(self, setting: str, over: str = "grpo") -> Interval:
        return self.rows[setting][over].less_than_gdpo


def verdict(interval: Interval) -> str:
    """In words, from the interval that holds for all settings at once."""
    for sign, word in ((1, "more"), (-1, "less")):
        if min(sign * interval.low_all, sign * interval.high_all) > 0:
            return word if sign * interval.mean >= MATTERS else f"a little {word}"
    return "no difference" if max(-interval.low_all, interval.high_all) < MATTERS else "open"


@cache
def _bootstrap(seeds: int) -> Bootstrap:
    return Bootstrap(seeds)


def run_setting(
    name: str, seeds: int, settings: int
) -> tuple[dict[str, Row], dict[str, Interval], dict[tuple[str, str, int], Sequence[float]]]:
    """Train all arms in one setting; `settings` is the number that the intervals allow for."""
    setting = SETTINGS[name]
    found = outcomes(setting, range(seeds))
    worth_K = np.array([reward.worth for reward in setting.rewards])

    def more(one: str, other: str) -> Interval:
        difference_S = found[one].outcome_S - found[other].outcome_S
        return _bootstrap(seeds).interval(difference_S, settings)

    rows = {arm: _row(outcome, worth_K, more("gdpo", arm)) for arm, outcome in found.items()}
    parts = {what: more(*pair) for what, pair in PARTS.items()}
    curves = {
        (name, arm, k): found[arm].hit_TK[:, k].tolist()
        for arm in CURVE_ARMS
        for k, reward in enumerate(setting.rewards)
        if name in CURVES and reward.worth
    }
    return rows, parts, curves


def _row(outcome: Outcome, worth_K: np.ndarray, less_than_gdpo: Interval) -> Row:
    reached = outcome.hit_TK @ worth_K / worth_K.sum() >= REACHED
    return Row(
        rate=outcome.rate,
        is_edge=outcome.is_edge,
        outcome=float(outcome.outcome_S.mean()),
        final=float(outcome.final_S.mean()),
        steps=int(reached.argmax()) if reached.any() else None,
        of_first=float(outcome.outcome_S[:FIRST].mean()),
        hits=tuple(outcome.hit_TK.mean(0).tolist()),
        less_than_gdpo=less_than_gdpo,
    )


ARM_COLUMNS = ("setting", "arm", "rate", "is_edge", "outcome", "final", "steps", "of_first", "hits")
INTERVAL_COLUMNS = Interval._fields


def write(found: Map, folder: Path = DATA) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made = {"seeds": found.seeds, "cpu_minutes": round(found.cpu_minutes, 1)}
    (folder / "made.json").write_text(json.dumps(made) + "\n")
    _write(folder / "arms.csv", (*ARM_COLUMNS, *INTERVAL_COLUMNS), _arm_lines(found))
    _write(
        folder / "parts.csv",
        ("setting", "part", *INTERVAL_COLUMNS),
        (
            (name, what, *map(_text, interval))
            for name, parts in found.parts.items()
            for what, interval in parts.items()
        ),
    )
    lines = ((*key, " ".join(map(_text, curve))) for key, curve in found.curves.items())
    _write(folder / "curves.csv", ("setting", "arm", "reward", "steps"), lines)


def _arm_lines(found: Map) -> Iterable[tuple[object, ...]]:
    for name, rows in found.rows.items():
        for arm, row in rows.items():
            numbers = map(_text, (row.outcome, row.final))
            steps = "" if row.steps is None else row.steps
            hits = " ".join(f"{hit:.3f}" for hit in row.hits)
            rest = (steps, _text(row.of_first), hits, *map(_text, row.less_than_gdpo))
            yield (name, arm, f"{row.rate:.4g}", int(row.is_edge), *numbers, *rest)


def _text(number: float) -> str:
    return f"{number:.4f}"


def _write(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)


def read(folder: Path = DATA) -> Map:
    made = json.loads((folder / "made.json").read_text())
    rows: dict[str, dict[str, Row]] = {}
    for line in _lines(folder / "arms.csv"):
        rows.setdefault(line["setting"], {})[line["arm"]] = Row(
            rate=float(line["rate"]),
            is_edge=line["is_edge"] == "1",
            outcome=float(line["outcome"]),
            final=float(line["final"]),
            steps=int(line["steps"]) if line["steps"] else None,
            of_first=float(line["of_first"]),
            hits=tuple(map(float, line["hits"].split())),
            less_than_gdpo=_interval(line),
        )
    parts: dict[str, dict[str, Interval]] = {}
    for line in _lines(folder / "parts.csv"):
        parts.setdefault(line["setting"], {})[line["part"]] = _interval(line)
    curves = {
        (line["setting"], line["arm"], int(line["reward"])): [*map(float, line["steps"].split())]
        for line in _lines(folder / "curves.csv")
    }
    return Map(made["seeds"], made["cpu_minutes"], rows, parts, curves)


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _interval(line: Mapping[str, str]) -> Interval:
    return Interval(*(float(line[column]) for column in INTERVAL_COLUMNS))
