"""When does GDPO train better than GRPO? Trains every arm in every setting of the map.

python -m workshop.experiments.map               # train what has no outcome yet; it can be stopped
python -m workshop.experiments.map --list        # say how much that is
python -m workshop.experiments.map --page        # make docs/when_gdpo_helps.md from the data
python -m workshop.experiments.map --settings "two, 1:1" --arms gdpo grpo --optimizer sgd --draws 2
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from workshop.experiments.map import results
from workshop.experiments.map.arms import ARMS
from workshop.experiments.map.draws import DRAWS
from workshop.experiments.map.optimizers import OPTIMIZERS
from workshop.experiments.map.results import Job
from workshop.experiments.map.settings import SETTINGS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments.map",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--settings", nargs="+", metavar="NAME", default=[*SETTINGS])
    parser.add_argument("--arms", nargs="+", metavar="ARM", default=[], choices=[*ARMS])
    parser.add_argument(
        "--optimizer", nargs="+", default=[*results.OPTIMIZERS], choices=[*OPTIMIZERS]
    )
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help="%(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--data", type=Path, default=results.DATA, help="%(default)s")
    parser.add_argument("--list", action="store_true", help="train nothing")
    parser.add_argument("--page", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    unknown = {*arguments.settings} - {*SETTINGS}
    if unknown:
        parser.error(f"unknown settings: {sorted(unknown)}; expected some of {[*SETTINGS]}")
    found = results.read(arguments.data)
    if arguments.page:
        # the page reads the trainer's data too, whose packages the processes need not load
        from workshop.experiments.map import dumps, page, pictures

        if not dumps.DUMPS.exists():
            dumps.write()
        pictures.draw(found, pictures.PICTURES)
        page.write(found)
        return
    jobs = [
        *results.missing(
            found, arguments.optimizer, arguments.settings, arguments.arms, arguments.draws
        )
    ]
    left = sum(len(job.arms) for job in jobs)
    print(f"{left} outcomes are missing, of {len(jobs)} settings and draws", file=sys.stderr)
    if not arguments.list:
        run(jobs, found, arguments.data, arguments.processes)


def run(jobs: list[Job], found: results.Found, path: Path, processes: int) -> None:
    """Train in several processes, and keep each outcome at once."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a process has one core; the workers start with this
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        started = {pool.submit(job.run): job for job in jobs}
        for done, future in enumerate(as_completed(started), 1):
            job = started[future]
            for arm, outcome in future.result().items():
                key = results.Key(job.optimizer, job.setting, arm)
                found.setdefault(key, {})[job.draw] = outcome
            results.write(found, path)
            print(f"{done}/{len(jobs)} {job}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
