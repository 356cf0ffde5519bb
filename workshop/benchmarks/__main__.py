"""Run the named benchmarks and print a table. The exit code is 1 if a goal is missed."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from workshop.benchmarks import coding, estimator, loading, run, scoring
from workshop.benchmarks.measure import Row, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--device", default="cpu", help="device of the estimator: cpu or cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each row as a line")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    unknown = {*arguments.names} - {*BENCHMARKS}
    if unknown:
        parser.error(f"unknown: {sorted(unknown)}; expected some of {[*BENCHMARKS]}")

    torch.set_num_threads(1)  # Ray gives one thread to the process that computes advantages
    rows = []
    for name in arguments.names or [name for name in BENCHMARKS if name not in ASKED_FOR]:
        for row in BENCHMARKS[name](device):
            print("  ".join(row.cells()), file=sys.stderr, flush=True)
            rows.append(row)
            if arguments.json:
                with arguments.json.open("a") as file:
                    print(json.dumps(asdict(row) | {"ratio": row.ratio}), file=file)
    print(f"\n{machine(device)}; {TIMES}\n\n{table(rows)}")
    return int(any(row.missed for row in rows))


def step_rows(_: torch.device) -> Iterator[Row]:
    from workshop.benchmarks import step  # imports verl's trainer, which the others do not need

    return step.rows()


BENCHMARKS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    "estimator": estimator.rows,
    "metrics": estimator.metrics_rows,
    "scoring": lambda _: scoring.time_rows(),
    "coding": lambda _: coding.time_rows(),
    "loading": lambda _: loading.rows(),
    "step": step_rows,
    "run": lambda _: run.rows(),
}
ASKED_FOR = ("loading", "step", "run")  # the step takes 10 minutes and 10 GB, and starts Ray
TIMES = "times are the fastest of alternating calls; step: the median pair"


def machine(device: torch.device) -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    name, *_ = (*names, platform.machine())
    cpu = f"{name}, {os.cpu_count()} cores, one thread used"
    gpu = f"; {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return f"{day}; {cpu}{gpu}; {versions}, verl {version('verl')}"


if __name__ == "__main__":
    sys.exit(main())
