"""Writes the results as Parquet again, from a checkout of the commit that trained them.

    git worktree add ../archive ee55291
    python -m workshop.experiments.pack ../archive

It takes some ten minutes, because the advice on the held-out runs is counted in the archive.
"""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop.experiments import results

# runs in the archive: {setting: what its arms earned, and the advice on each held-out run}
ADVISED = """
import json
from verl_gdpo.tools.advice.evidence import FIRST_STEPS
from workshop.experiments.map.held_out import *

advised = {}
for settings, earned in (
    (SETTINGS, earned_in_map()),
    (drawn_settings(), earned_in_drawn()),
):
    for name, setting in settings.items():
        rows = [
            {
                "steps": steps,
                "is_sure": bool(case.is_sure),
                "is_the_rule": bool(case.is_the_rule),
                "cost": float(case.cost),
            }
            for steps in (FIRST_STEPS, 2)
            for case in cases({name: setting}, earned, steps)
        ]
        advised[name] = {"earned": earned[name], "advised": rows}
print(json.dumps(advised))
"""


def pack(archive: Path) -> None:
    """Read the files of the archive, and write one Parquet file an edition."""
    results.write([*simulated(archive)], results.SIMULATION)
    folders = {1: "data", 2: "data_2"}
    for edition, path in results.EDITIONS.items():
        folder = archive / "workshop/experiments/trainer" / folders[edition]
        results.write([*trained(folder)], path)


def simulated(archive: Path) -> Iterator[dict[str, Any]]:
    """A row for each setting of the simulation, and for each that was drawn at random."""
    data = archive / "workshop/experiments/map/data"
    measured = {
        line.pop("setting"): {name: float(text) for name, text in line.items()}
        for line in _lines(data / "dumps.csv")
    }
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(data / "outcomes.csv"):
        draws = {name: [float(n) for n in line[name].split()] for name in ("shares", "small")}
        outcome = {"optimizer": line["optimizer"], "arm": line["arm"], **draws}
        outcomes.setdefault(line["setting"], []).append(outcome)
    for name, counted in _advised(archive).items():
        parts = {"measured": measured.get(name), "outcomes": outcomes.get(name, [])}
        yield {"setting": name, **parts, **counted}


def trained(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each run and reward."""
    for file in sorted(folder.glob("*.json")):
        name, *ending = file.stem.split(".")
        setting, arm, seed = name.split("-")
        kept = json.loads(file.read_text())
        shares = kept.get("shares") or {size: kept[size] for size in ("small", "large")}
        for reward, curve in shares.items():
            yield {
                **{"setting": setting, "arm": arm, "seed": int(seed)},
                "replaced": ending == ["replaced"],
                "seconds": kept["seconds"],
                "start": [*kept["start"].values()],
                "reward": reward,
                "shares": curve,
                "varies": kept.get("varies", {}).get(reward),
                "spread": kept.get("spread", {}).get(reward),
            }


def _lines(file: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(file.read_text().splitlines())]


def _advised(archive: Path) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", ADVISED]
    done = subprocess.run(command, cwd=archive, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    pack(Path(sys.argv[1]).resolve())
