"""Writes the results as Parquet again, from a checkout of the commit that trained them.

git worktree add ../archive ee55291
python -m workshop.experiments.pack ../archive
"""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop.experiments import results


def pack(archive: Path) -> None:
    """Read the files of the archive, and write one Parquet file an edition."""
    results.write([*simulated(archive)], results.SIMULATION)
    folders = {1: "data", 2: "data_2"}
    for edition, path in results.EDITIONS.items():
        folder = archive / "workshop/experiments/trainer" / folders[edition]
        results.write([*trained(folder)], path)


def simulated(archive: Path) -> Iterator[dict[str, Any]]:
    """A row for each setting of the simulation."""
    outcomes: dict[str, list[dict[str, Any]]] = {}
    file = archive / "workshop/experiments/map/data/outcomes.csv"
    for line in csv.DictReader(file.read_text().splitlines()):
        draws = {name: [float(n) for n in line[name].split()] for name in ("shares", "small")}
        outcome = {"optimizer": line["optimizer"], "arm": line["arm"], **draws}
        outcomes.setdefault(line["setting"], []).append(outcome)
    for name, of_setting in outcomes.items():
        yield {"setting": name, "outcomes": of_setting}


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


if __name__ == "__main__":
    pack(Path(sys.argv[1]).resolve())
