"""Runs a training command, shows its progress, and leaves no process behind.

    python -m verl_gdpo.launch --run-dir runs/x [--time-limit SECONDS] -- COMMAND...

verl and Ray print hundreds of lines and start a dozen processes, some of which outlive the driver.
Everything that they print goes to RUN/train.log. Every process inherits a mark in its environment,
by which it is found and ended, whatever ended the run: success, failure, Ctrl-C or a time limit.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from verl_gdpo.faults import faults_from_outside
from verl_gdpo.run_folder import (
    metrics_file_of_next_start,
    read_metrics,
    training_rewards,
    write_versions,
)

MARK = "VERL_GDPO_RUN"
GRACE_SECONDS = 5.0  # between asking the driver to end and ending everything
TIME_LIMIT_EXIT = 124  # as timeout(1)
HEARTBEAT_SECONDS = 20.0


class Stopped(Exception):
    """The run was asked to stop; holds the exit code to leave with."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def launch(
    command: Sequence[str],
    run: Path,
    *,
    env: Mapping[str, str] | None = None,
    time_limit: float | None = None,
    quiet: bool = False,
) -> int:
    """Run `command` to its end and return its exit code (124 at the time limit, 128 + signal).

    Args:
        command: program and arguments; verl's file logger must be on for progress to show.
        run: folder of the run; made if absent.
        env: added to this process's environment.
        time_limit: seconds.
        quiet: no progress lines.
    """
    mark = uuid.uuid4().hex
    run.mkdir(parents=True, exist_ok=True)
    write_versions(run)
    environment = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(metrics_file_of_next_start(run).resolve()),
        **(env or {}),
        MARK: mark,
    }
    deadline = time.monotonic() + (time_limit or float("inf"))
    with open(run / "train.log", "ab") as log, _signals_raise():
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
        )
        try:
            for line in _progress(process, run, deadline):
                if not quiet:
                    print(line, flush=True)
            return process.wait()
        except Stopped as stopped:
            return stopped.exit_code
        finally:
            _ignore_signals()
            end_processes(process, mark)


def end_processes(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End the driver, then everything that carries `mark`.

    Raises:
        RuntimeError: a process survives SIGKILL.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    give_up = time.monotonic() + 2 * GRACE_SECONDS
    while alive := marked_processes(mark):
        if time.monotonic() > give_up:
            raise RuntimeError(f"these processes of the run survive SIGKILL: {alive}")
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=1)
    process.poll()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes with `mark` in their environment; zombies are dead."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = process.environ().get(MARK) == mark
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _progress(process: "subprocess.Popen[bytes]", run: Path, deadline: float) -> Iterator[str]:
    """A line for each step that verl logs, and a sign of life in between."""
    start = last_line = time.monotonic()
    shown = max(read_metrics(run), default=-1)
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if now > deadline:
            yield f"time limit reached after {now - start:.0f} s; stopping"
            raise Stopped(TIME_LIMIT_EXIT)
        metrics = read_metrics(run)
        for step in [step for step in metrics if step > shown]:
            shown, last_line = step, now
            rewards = "  ".join(
                f"{name} {curve[step]:.3f}"
                for name, curve in training_rewards(metrics).items()
                if step in curve
            )
            yield f"[{now - start:5.0f} s] step {step:4d}  {rewards or 'validation'}"
        if now - last_line > HEARTBEAT_SECONDS:
            last_line = now
            doing = "running" if shown >= 0 else "starting Ray, the policy and its servers"
            yield f"[{now - start:5.0f} s] {doing} ..."


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` inside the block."""

    def stop(number: int, _: object) -> None:
        raise Stopped(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """A second Ctrl-C must not interrupt the clean-up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def failure_report(run: Path, lines: int = 25) -> str:
    """Why a run failed: the last exception in its log, else the log's last lines."""
    log = (run / "train.log").read_text(errors="replace").splitlines()
    raised = [line for line in log if re.match(r"[\w.]*(Error|Exception)(\(\w+\))?: ", line)]
    return "\n".join([*(raised[-1:] or log[-lines:]), f"(whole log: {run / 'train.log'})"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="verl_gdpo.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    exit_code = launch(command, arguments.run_dir, time_limit=arguments.time_limit)
    if exit_code:
        print(failure_report(arguments.run_dir), file=sys.stderr)
        for line in faults_from_outside(arguments.run_dir, exit_code):
            print(line, file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
