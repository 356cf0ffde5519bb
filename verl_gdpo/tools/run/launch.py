"""Runs a training command, shows its progress, and leaves no process behind.

    python -m verl_gdpo.tools.run.launch --run-dir RUN [--time-limit S] [--check] -- COMMAND...

verl and Ray print hundreds of lines and start a dozen processes. All output goes to RUN/train.log.
With --check, `verl-gdpo check` looks at the configuration while verl starts, which takes longer,
and a problem ends the run.
Some of the processes survive the driver. Its keeper ends them all after success, failure, Ctrl-C or
the time limit, and when the launcher itself gets SIGKILL: see `processes.py`. `end_conditions.py`
ends a run that logs no step for too long. Only one launcher at a time can use a folder. If somebody
renames or deletes the folder, the run goes on: see `held_folder.py`.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from verl_gdpo.tools.run import processes
from verl_gdpo.tools.run.console import ASKED, Progress, end_report
from verl_gdpo.tools.run.end_conditions import (
    HANG_FILE,
    POLL_SECONDS,
    EndConditions,
    RunEnd,
    Stopped,
)
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.stacks import VARIABLE
from verl_gdpo.tools.run.starts import ended
from verl_gdpo.tools.run_folder.folder import claim_metrics_file


def launch(
    command: Sequence[str],
    run: Path,
    *,
    check: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    time_limit: float | None = None,
    quiet: bool = False,
    end_with_parent: bool = False,
    go_on: str | None = None,
) -> RunEnd:
    """Run `command`; the exit code is the command's, 124 at the time limit, or 128 + signal.

    Args:
        command: program and arguments. Progress and the watch need verl's file logger.
        run: folder of the run; it is made if it does not exist.
        check: a command that runs beside the first one, prints, and ends the run if it fails.
        env: variables that are added to this process's environment.
        time_limit: seconds until the run is stopped.
        quiet: if True, print no progress.
        end_with_parent: if True, stop when the parent of this process is gone.
        go_on: the command that goes on with a run that is stopped, for the report.

    Raises:
        RuntimeError: a living process uses the folder.
        OSError: the folder cannot be written.
    """
    deadline = time.monotonic() + (time_limit or float("inf"))
    run.mkdir(parents=True, exist_ok=True)
    with (
        processes.locked(run / "lock", f"the run folder {run}"),
        processes.adopting() as started,
        HeldFolder(run) as held,
        open(run / "train.log", "a+b") as log,
    ):
        since = log.seek(0, os.SEEK_END)
        (run / HANG_FILE).unlink(missing_ok=True)
        environment = {**_environment(run), **(env or {})}
        ends = EndConditions(held, deadline, os.getppid() if end_with_parent else None, started)
        progress = Progress(held, quiet)
        with _signals_raise():
            try:
                end = _run(command, check, environment, log, progress, ends)
            except Stopped as stopped:
                end = stopped.end
        last_step = max(progress.shown, default=0)
        report = end_report(held, end, log, since, last_step, go_on)
        has_folder = held.place() == run
        _record(held, end, report, environment["VERL_FILE_LOGGER_PATH"])
        return replace(end, report="\n".join(report), has_folder=has_folder)


def _record(held: HeldFolder, end: RunEnd, report: Sequence[str], metrics: str) -> None:
    """Write why the run ended into its last start, wherever its folder is."""
    why = end.message
    otherwise = ""
    if end.reason == "failed":
        otherwise = report[0]  # unless the training itself has written why
    elif not why:
        why = end.reason
    with contextlib.suppress(OSError, ValueError):  # a full disk, a damaged start: it is reported
        ended(held.place() or held.path, why, end.exit_code, metrics, otherwise)


def _environment(run: Path) -> dict[str, str]:
    """This process's environment, with what a run needs, and a new file for its metrics."""
    outer = tempfile.gettempdir()
    return {
        "RAY_TMPDIR": outer,  # where Ray looks for a cluster that runs
        "TORCHINDUCTOR_CACHE_DIR": f"{outer}/torchinductor_{os.getuid()}",  # for the next run
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(claim_metrics_file(run).resolve()),
        VARIABLE: "1",  # `end_conditions.py` asks for them
    }


def _run(
    command: Sequence[str],
    check: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    progress: Progress,
    ends: EndConditions,
) -> RunEnd:
    """Start the driver, and say how it ended after all processes of the run have ended."""

    def keep(command: Sequence[str], **streams: Any) -> "subprocess.Popen[bytes]":
        # in its own session, so that Ctrl-C reaches only us, and we pass it on once
        streams |= {"stdin": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen(processes.keeper(command), env=environment, **streams)

    keepers = [keep(command, stdout=log, stderr=subprocess.STDOUT)]
    try:
        if check:
            ends.checking = keep(check)
            keepers.append(ends.checking)
        return _wait(keepers[0], progress, ends)
    finally:
        for number in ASKED:  # a second Ctrl-C must not interrupt the clean-up
            signal.signal(number, signal.SIG_IGN)
        for keeper in reversed(keepers):
            keeper.communicate()  # closes its input
        try:
            processes.end(ends.started)
        except RuntimeError as error:  # why the run ended is worth more
            progress.say(str(error))
        for keeper in keepers:
            processes.remove_temporary(keeper.pid)


def _wait(process: "subprocess.Popen[bytes]", progress: Progress, ends: EndConditions) -> RunEnd:
    """Wait for the driver and say how it ended; raise if the run has to end before."""
    while (code := process.poll()) is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        progress.show()
        ends.raise_if_due()
    while code and ends.checking is not None and ends.checking.poll() is None:
        time.sleep(POLL_SECONDS)  # the check can know why the driver failed
    ends.raise_if_due()
    return RunEnd(code if code >= 0 else 128 - code, "failed" if code else "finished")


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise `Stopped` in the block; nohup still ignores SIGHUP."""

    def stop(number: int, _: object) -> None:
        raise Stopped(RunEnd(128 + number, "stopped"))

    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in ASKED if not (is_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(
        "verl_gdpo.tools.run.launch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--end-with-parent", action="store_true", help="stop with the parent")
    parser.add_argument("--go-on", metavar="COMMAND", help="what goes on with a stopped run")
    parser.add_argument("--check", action="store_true", help="check the configuration meanwhile")
    parser.add_argument("--check-option", action="append", default=[], help="one of that check")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    run = arguments.run_dir
    was_empty = not (run.exists() and any(run.iterdir()))
    try:
        end = launch(
            command,
            run,
            check=_check_of(command, arguments.check_option) if arguments.check else (),
            time_limit=arguments.time_limit,
            end_with_parent=arguments.end_with_parent,
            go_on=arguments.go_on,
        )
    except (RuntimeError, OSError) as error:
        print(f"verl_gdpo.tools.run.launch: {error}", file=sys.stderr)
        return 2
    if end.reason == "refused":  # the check has printed why
        if was_empty and end.has_folder:
            shutil.rmtree(run, ignore_errors=True)
    elif end.report:
        print(end.report, file=sys.stderr)
    return end.exit_code


def _check_of(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the command that checks the configuration of `PYTHON -m MODULE key=value ...`."""
    python, _, _, *configuration = command
    return [python, "-m", "verl_gdpo", "check", "--brief", *options, *configuration]


if __name__ == "__main__":
    sys.exit(main())
