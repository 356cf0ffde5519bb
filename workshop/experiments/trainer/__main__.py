"""GDPO and its rivals in verl's own trainer, without a GPU. The protocol is in protocol.md.

python -m workshop.experiments.trainer                  # train what has no result yet
python -m workshop.experiments.trainer --list           # say what has one
python -m workshop.experiments.trainer --only 20_to_1   # settings, or runs such as 20_to_1-gdpo-3
python -m workshop.experiments.trainer --pilot  # train those that were there before the protocol
python -m workshop.experiments.trainer --page    # make docs/in_verls_trainer.md from the data
python -m workshop.experiments.trainer --hardware 8gpu --dry-run   # the commands for Qwen2.5-1.5B

A file `stop` in the work folder ends it after the run in progress. To have two trainings at a time,
start it twice. Nobody has run it on GPUs.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from verl_gdpo.terminal import printing
from workshop.experiments.trainer import on_cpu, on_gpu, page, pictures, results
from workshop.experiments.trainer.drive import drive
from workshop.experiments.trainer.results import Interrupted
from workshop.experiments.trainer.settings import REPO, Run, pilot, plan

WORK = REPO / "runs" / "experiments_trainer"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments.trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="train nothing")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="the beginnings of runs' names")
    parser.add_argument("--hardware", default="cpu", choices=["cpu", "1gpu", "8gpu"])
    parser.add_argument("--dry-run", action="store_true", help="only print the commands of GPUs")
    parser.add_argument("--pilot", action="store_true", help="GRPO alone, of a seed of its own")
    parser.add_argument("--page", action="store_true", help="train nothing")
    parser.add_argument("--work", type=Path, default=WORK, help="gets runs; %(default)s")
    parser.add_argument("--data", type=Path, help="results; by default data/ and data_2/ here")
    arguments = parser.parse_args(argv)
    if arguments.page:
        return write_page()
    hardware = arguments.hardware
    # results of several machines are never in one folder
    data = arguments.data or (None if hardware == "cpu" else results.DATA.with_name(hardware))
    runs = pilot() if arguments.pilot else [*plan(hardware)]
    for only in arguments.only or ():
        if not any(_is_of(run, only) for run in runs):
            parser.error(
                f"--only {only}: no run has this name; expected some of {[*map(str, runs)]}"
            )
    if arguments.only:
        runs = [run for run in runs if any(_is_of(run, only) for only in arguments.only)]
    if arguments.dry_run:
        if hardware == "cpu":
            parser.error("--dry-run prints the commands of GPUs; add --hardware 8gpu or 1gpu")
        for run in runs:
            print(shlex.join(on_gpu.command(run, arguments.work / "runs" / str(run))))
        return 0
    if arguments.list:
        for run in runs:
            print(f"{run}: {_state(run, data)}")
        return 0
    torch.set_num_threads(1)  # the policy's last digits depend on it
    disable_progress_bar()  # transformers' bars for files of a few kB
    try:
        drive(runs, on_cpu.train if hardware == "cpu" else on_gpu.train, arguments.work, data)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"workshop.experiments.trainer: error: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"workshop.experiments.trainer: {error}", file=sys.stderr)
        return 130
    return 0


def write_page() -> int:
    found = results.read_all()
    pictures.draw(found, pictures.PICTURES)
    page.write(found)
    return 0


def _is_of(run: Run, name: str) -> bool:
    return f"{run}-".startswith(f"{name}-")


def _state(run: Run, data: Path | None) -> str:
    failed = results.failures(run, data)
    state = "done" if results.read(run, data) else "not done"
    return f"{state}, failed {len(failed)} times" if failed else state


if __name__ == "__main__":
    sys.exit(printing(main))
