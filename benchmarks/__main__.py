"""Run all benchmarks, print one table; exit code 1 if a goal is missed."""

import argparse
import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch

from benchmarks import estimator, scoring
from benchmarks.measure import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="cpu", help="of the tensors: cpu, cuda")
    device = torch.device(parser.parse_args().device)

    torch.set_num_threads(1)  # what Ray gives the process in which verl computes advantages
    estimator.check_agreement(device)  # also the warm-up
    rows = []
    for row in chain(
        estimator.memory_rows(device),  # first, while the heap is fresh
        estimator.time_rows(device),
        estimator.growth_rows(device),
        estimator.metrics_rows(device),
        scoring.time_rows(),
    ):
        print("  ".join(row.cells()), file=sys.stderr, flush=True)
        rows.append(row)
    print(f"\n{machine(device)}; the fastest of calls in turns\n\n{table(rows)}")
    return int(any(row.missed for row in rows))


def machine(device: torch.device) -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    parts = [
        f"{datetime.now(timezone.utc):%Y-%m-%d}",
        f"{cpu}, {os.cpu_count()} cores, one thread used",
        *([torch.cuda.get_device_name(device)] if device.type == "cuda" else []),
        f"Python {platform.python_version()}, torch {torch.__version__}, verl {version('verl')}",
    ]
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
