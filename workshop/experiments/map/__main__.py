"""When does GDPO train better than GRPO? Trains every arm in every setting of the map.

python -m workshop.experiments.map                  # data, pictures and docs/when_gdpo_helps.md
python -m workshop.experiments.map --page           # pictures and page from the data that are there
python -m workshop.experiments.map --settings "two, 1:1" "two, 20:1" --seeds 50    # only prints
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from workshop.experiments.map import page, pictures, results
from workshop.experiments.map.results import Map, run_setting
from workshop.experiments.map.settings import SETTINGS

SEEDS = 400


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments.map",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each arm; {SEEDS}")
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="some of the settings")
    parser.add_argument("--page", action="store_true", help="train nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    unknown = {*(arguments.settings or ())} - {*SETTINGS}
    if unknown:
        parser.error(f"unknown settings: {sorted(unknown)}; expected some of {[*SETTINGS]}")
    if arguments.seeds is not None and arguments.seeds < 2:
        parser.error(f"--seeds: expected 2 or more, got {arguments.seeds}")
    is_part = arguments.settings is not None or arguments.seeds is not None
    if arguments.page and is_part:
        parser.error("--page trains nothing: leave out --settings and --seeds")

    if not arguments.page:
        names = arguments.settings or [*SETTINGS]
        found = run(names, arguments.seeds or SEEDS, arguments.processes)
        if is_part:
            print(page.table(found))
            return
        results.write(found)
    found = results.read()  # rounded, so that pictures and page are those of the files
    pictures.draw(found, pictures.PICTURES)
    page.write(found, page.PAGE)


def run(names: list[str], seeds: int, processes: int) -> Map:
    os.environ["OMP_NUM_THREADS"] = "1"  # a process has one core; the workers start with this
    done = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(run_setting, name, seeds, len(names)): name for name in names}
        for job in as_completed(jobs):
            done[jobs[job]] = job.result()
            print(f"{len(done)}/{len(names)} {jobs[job]}", file=sys.stderr, flush=True)
    used = os.times()  # the processes have ended, so it counts them
    return Map(
        seeds=seeds,
        cpu_minutes=(used.children_user + used.children_system) / 60,
        rows={name: done[name][0] for name in names},
        parts={name: done[name][1] for name in names},
        curves={key: curve for name in names for key, curve in done[name][2].items()},
    )


if __name__ == "__main__":
    main()
