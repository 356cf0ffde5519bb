"""Runs a training command, shows its progress, and leaves no process behind.

    python -m verl_gdpo.run.launch --run-dir runs/x [--time-limit SECONDS] [--check] -- COMMAND...

verl and Ray print hundreds of lines and start a dozen processes. All output goes to RUN/train.log.
With --check, `verl-gdpo check` looks at the configuration while verl starts, which takes longer,
and a problem ends the run.
Some of the processes survive the driver, so the launcher ends them all after success, failure,
Ctrl-C or the time limit. A watchdog ends them if the launcher itself gets SIGKILL. If processes
survive even that, the next start in the folder ends them. Only one launcher at a time can use a run
folder.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl_gdpo.run.faults import faults_from_outside
from verl_gdpo.run.folder import claim_metrics_file
from verl_gdpo.run.lock import BusyError, locked
from verl_gdpo.run.processes import MARK, end_run, family_of, watchdog
from verl_gdpo.run.progress import Progress
from verl_gdpo.run.starts import ended
from verl_gdpo.terminal import printable

GRACE_SECONDS = 5.0  # the driver gets this time to end by itself
POLL_SECONDS = 0.2
TIME_LIMIT_EXIT = 124  # the exit code of timeout(1)
REFUSED_EXIT = 2
CHECK_EXIT = 1
LOG_END_BYTES = 1 << 20  # a failure's reason is searched in this much of the log's end


class RefusedError(Exception):
    """The check found a problem and printed it."""


class Stopped(BaseException):
    """The run was asked to stop. `exit_code` is the launcher's exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def launch(
    command: Sequence[str],
    run: Path,
    *,
    check: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    time_limit: float | None = None,
    quiet: bool = False,
    end_with_parent: bool = False,
) -> int:
    """Run `command` and return its exit code, 124 at the time limit, or 128 + signal.

    Args:
        command: program and arguments. Progress needs verl's file logger.
        run: folder of the run; it is made if it does not exist.
        check: a command that runs beside the first one, prints, and ends the run if it fails.
        env: variables that are added to this process's environment.
        time_limit: seconds until the run is stopped.
        quiet: if True, print no progress.
        end_with_parent: if True, stop when the parent of this process is gone.

    Raises:
        BusyError: a living process uses the folder.
        OSError: the folder cannot be written, or the command does not exist.
        RefusedError: `check` failed.
        RuntimeError: a process of the run survives SIGKILL.
    """
    deadline = time.monotonic() + (time_limit or float("inf"))
    ends = _Ends(deadline, os.getppid() if end_with_parent else None)
    run.mkdir(parents=True, exist_ok=True)
    with locked(run / "lock", f"the run folder {run}") as lock:
        progress = Progress(run, quiet)
        if left := end_run(family_of(lock)):
            progress.say(f"ended processes of an earlier start of this run: {', '.join(left)}")
        mark = family_of(lock) + uuid.uuid4().hex
        environment = {
            **os.environ,
            "VERL_FILE_LOGGER_PATH": str(claim_metrics_file(run).resolve()),
            **(env or {}),
            MARK: mark,
        }
        with open(run / "train.log", "ab") as log, _signals_raise():
            try:
                with watchdog(mark, log):
                    exit_code = _run(command, check, environment, log, progress, ends)
                ended(run, "", exit_code, mark)
                return exit_code
            except RefusedError:
                ended(run, "the check found a problem", CHECK_EXIT, mark)
                raise
            except Stopped as stopped:
                ended(run, "", stopped.exit_code, mark)
                if stopped.exit_code == TIME_LIMIT_EXIT:
                    progress.say("time limit reached; stopped")
                return stopped.exit_code


@dataclass
class _Ends:
    """What ends a run before its driver does."""

    deadline: float
    parent: int | None  # process id
    checking: "subprocess.Popen[bytes] | None" = None

    def raise_if_due(self) -> None:
        """Raise RefusedError or Stopped if the run has to end."""
        if self.checking is not None and self.checking.poll():
            raise RefusedError
        if time.monotonic() > self.deadline:
            raise Stopped(TIME_LIMIT_EXIT)
        if self.parent is not None and os.getppid() != self.parent:
            raise Stopped(128 + signal.SIGHUP)


def _run(
    command: Sequence[str],
    check: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    progress: Progress,
    ends: _Ends,
) -> int:
    """Start the driver, and return its exit code after all processes of the run have ended."""
    # in its own session, so that Ctrl-C reaches only us, and we pass it on once
    alone: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, **alone
    )
    try:
        if check:
            ends.checking = subprocess.Popen(check, env=environment, **alone)
        return _wait(process, progress, ends)
    finally:
        _ignore_signals()
        if process.poll() is None:
            process.terminate()  # gives it time to end Ray
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        end_run(environment[MARK], process.pid)
        process.poll()


def _wait(process: "subprocess.Popen[bytes]", progress: Progress, ends: _Ends) -> int:
    """Wait for the driver and return its exit code; raise if the run has to end before."""
    while (code := process.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        progress.show()
        ends.raise_if_due()
    while code and ends.checking is not None and ends.checking.poll() is None:
        time.sleep(POLL_SECONDS)  # the check can know why the driver failed
    ends.raise_if_due()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise `Stopped` in the block; nohup still ignores SIGHUP."""

    def stop(number: int, _: object) -> None:
        raise Stopped(128 + number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Ignore signals, so that a second Ctrl-C does not interrupt the clean-up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def failure_report(run: Path, since: int = 0, lines: int = 25) -> str:
    """Return why a run failed: the last exception in its log, or the log's last lines.

    Args:
        since: position in the log, in bytes, at which this start begins.
        lines: number of the last lines to return if the log has no exception.
    """
    with (run / "train.log").open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - LOG_END_BYTES))
        log = file.read().decode(errors="replace").splitlines()
    raised = [line for line in log if re.match(r"[\w.]*(Error|Exception)(\(\w+\))?: ", line)]
    said = [printable(line) for line in raised[-1:] or log[-lines:]]
    return "\n".join([*said, f"(whole log: {run / 'train.log'})"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="verl_gdpo.run.launch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument(
        "--end-with-parent", action="store_true", help="stop when the starting process is gone"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the configuration of COMMAND meanwhile"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    run, log = arguments.run_dir, arguments.run_dir / "train.log"
    since = log.stat().st_size if log.exists() else 0
    was_empty = not (run.exists() and any(run.iterdir()))
    try:
        exit_code = launch(
            command,
            run,
            check=_check_of(command) if arguments.check else (),
            time_limit=arguments.time_limit,
            end_with_parent=arguments.end_with_parent,
        )
    except (BusyError, OSError) as error:
        print(f"verl_gdpo.run.launch: {error}", file=sys.stderr)
        return REFUSED_EXIT
    except RefusedError:
        if was_empty:
            shutil.rmtree(run)
        return CHECK_EXIT
    if exit_code:
        print(failure_report(run, since), file=sys.stderr)
        for line in faults_from_outside(run, exit_code):
            print(line, file=sys.stderr)
    return exit_code


def _check_of(command: Sequence[str]) -> list[str]:
    """Return the command that checks the configuration of `PYTHON -m MODULE key=value ...`."""
    python, _, _, *configuration = command
    return [python, "-m", "verl_gdpo", "check", "--brief", *configuration]


if __name__ == "__main__":
    sys.exit(main())
