"""Packs runs of ./run_demo.sh into demonstration.parquet, beside those that are there.

python -m workshop.experiments.demonstration FOLDER/SETTING-SEED ...    # run_dir of ./run_demo.sh
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from verl_gdpo.tools.run_folder.folder import read_config, read_metrics, training_rewards
from workshop.experiments.demonstration import FILE
from workshop.experiments.results import write


def rows_of(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, seed, step and reward; an arm's folder has its name."""
    for run in (path.parent for folder in folders for path in sorted(folder.glob("*/metrics"))):
        setting, seed = run.parent.name.rpartition("-")[0], read_config(run).seed
        for reward, curve in training_rewards(read_metrics(run)).items():
            for step, mean in curve.items():
                values = {"setting": setting, "arm": run.name, "seed": seed, "step": step}
                yield {**values, "reward": reward, "mean": mean}


if __name__ == "__main__":
    new = [*rows_of([*map(Path, sys.argv[1:])])]
    renewed = {(row["setting"], row["seed"]) for row in new}
    old = pq.read_table(FILE).to_pylist()
    write([row for row in old if (row["setting"], row["seed"]) not in renewed] + new, FILE)
