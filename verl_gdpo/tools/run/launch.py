"""Runs a training command, shows its progress, and leaves no process behind.

    verl-gdpo run [--resume] [--run-dir FOLDER] [--time-limit S] [--check] -- COMMAND...

verl and Ray print hundreds of lines and start a dozen processes. All output goes to train.log in
the folder of the run, which is verl's folder of checkpoints if none is named: see `command.py`.
With --check, `verl-gdpo check` looks at the configuration while verl starts, which takes longer,
and a problem ends the run.
Some of the processes survive the driver. Its keeper ends them all after success, failure, Ctrl-C or
the time limit, and when the launcher itself gets SIGKILL: see `processes.py`. `stop_conditions.py`
ends a run that logs no step for too long. Only one launcher at a time can use a folder. If somebody
renames or deletes the folder, the run goes on: see `held_folder.py`.
"""

import argparse
import contextlib
import os
import re
import shlex
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

from verl_gdpo.terminal import let_go_of_stdout
from verl_gdpo.tools.run import processes
from verl_gdpo.tools.run.command import TrainingCommand, understood, verls_trainer
from verl_gdpo.tools.run.end_reasons import end_report
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.progress import STARTS_UP, Progress
from verl_gdpo.tools.run.stacks import VARIABLE
from verl_gdpo.tools.run.starts import ended, starts_of
from verl_gdpo.tools.run.stop_conditions import (
    HANG_FILE,
    POLL_SECONDS,
    RunEnd,
    StopConditions,
    Stopped,
)
from verl_gdpo.tools.run_folder.folder import (
    LOGGER_FILE,
    LOGGER_ROOT,
    METRICS,
    OUR_LOGGER_FILE,
    name_metrics_file,
)

# With these, somebody asks a run to end.
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHECKED = "verl.trainer.main_ppo"  # the trainer whose configuration `verl-gdpo check` composes
PYTHON = re.compile(r"python[\d.]*")  # the name of an interpreter, such as python3.11
# a program for an interpreter: it says by its exit code whether verl-gdpo is installed there
IS_INSTALLED = """
import sys
from importlib.util import find_spec
sys.exit(find_spec("verl_gdpo") is None)
"""


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
    before: str = STARTS_UP,
    checkpoints: Path | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> RunEnd:
    """Run `command`; the exit code is the command's, or one that a shell has for how it ended.

    These are 124 at the time limit, 127 if it cannot start, and 128 + signal.

    Args:
        command: program and arguments. Progress needs verl's file or console logger, and the watch
            for hangs the file logger.
        run: folder of the run; it is made if it does not exist.
        check: a command that runs beside the first one, prints, and ends the run if it fails.
        env: variables that are added to this process's environment.
        time_limit: seconds until the run is stopped.
        quiet: if True, print no progress.
        end_with_parent: if True, stop when the parent of this process is gone.
        go_on: the command that goes on with a run that is stopped, for the report.
        before: what the command does until its first step, for its signs of life.
        checkpoints: verl's folder of checkpoints, where it is not in the folder of the run.
        trainer: the block `trainer` of verl's configuration, which says how a hang is told. Without
            it, that is read from the record of the start, which runs with gdpo make.

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
        environment = _environment(run)
        if env is not None:
            environment.update(env)
        parent = None
        if end_with_parent:
            parent = os.getppid()
        metrics = Path(environment[LOGGER_FILE])
        ends = StopConditions(held, deadline, parent, metrics, trainer or {}, started)
        progress = Progress(held, quiet, before)
        with _signals_raise():
            try:
                end = _run(command, check, environment, log, progress, ends)
            except Stopped as stopped:
                end = stopped.end
        progress.show()  # what waits for the file logger
        last_step = max(progress.shown, default=0)
        report = end_report(held, end, log, since, last_step, go_on, checkpoints)
        has_folder = held.place() == run
        _record(held, end, report, str(ends.metrics), checkpoints)
        return replace(end, report="\n".join(report), has_folder=has_folder)


def _record(
    held: HeldFolder, end: RunEnd, report: Sequence[str], metrics: str, checkpoints: Path | None
) -> None:
    """Write why the run ended into its last start, wherever its folder is."""
    why = end.message
    otherwise = ""
    if end.reason == "failed":
        otherwise = report[0]  # unless the training itself has written why
    elif not why:
        why = end.reason
    with contextlib.suppress(OSError, ValueError):  # a full disk, a damaged start: it is reported
        folder = held.place() or held.path
        if checkpoints is not None and not starts_of(folder):
            folder = checkpoints
        ended(folder, why, end.exit_code, metrics, otherwise)


def _environment(run: Path) -> dict[str, str]:
    """This process's environment, with what a run needs, and a new file for its metrics."""
    outer = tempfile.gettempdir()
    environment = dict(os.environ)
    # The keeper gives the run a TMPDIR of its own, where Ray would find no cluster that runs, and
    # the next run no compiled kernels.
    environment.setdefault("RAY_TMPDIR", outer)
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outer}/torchinductor_{os.getuid()}")
    environment.update(name_metrics_file(run))
    environment[VARIABLE] = "1"  # `stop_conditions.py` asks for stacks
    return environment


def _run(
    command: Sequence[str],
    check: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    progress: Progress,
    ends: StopConditions,
) -> RunEnd:
    """Start the driver, and say how it ended after all processes of the run have ended."""

    def keep(command: Sequence[str], **streams: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            processes.keeper(command),
            env=environment,
            stdin=subprocess.PIPE,
            # In its own session, so that Ctrl-C reaches only us, and we pass it on once.
            start_new_session=True,
            **streams,
        )

    driver = keep(command, stdout=log, stderr=subprocess.STDOUT)
    keepers = [driver]
    try:
        if check:
            ends.checking = keep(check)
            keepers.append(ends.checking)
        return _wait(driver, progress, ends)
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


def _wait(driver: "subprocess.Popen[bytes]", progress: Progress, ends: StopConditions) -> RunEnd:
    """Wait for the driver and say how it ended; raise if the run has to end before.

    A driver that has ended keeps its own exit code, unless the check says that it was refused.
    """
    while driver.poll() is None:
        ends.raise_if_due()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(POLL_SECONDS)
        progress.show()
    ends.look_for_trainings()
    has_failed = driver.returncode != 0
    if has_failed:
        # The check can know why the driver failed.
        _wait_for_check(ends)
    ends.raise_if_check_failed()
    if has_failed:
        return RunEnd(processes.code_of_shell(driver.returncode), "failed")
    return RunEnd(0, "finished")


def _wait_for_check(ends: StopConditions) -> None:
    """Wait until the check has ended, or somebody wants the run to end, as with Ctrl-C."""
    with contextlib.suppress(Stopped):
        while ends.checking is not None and ends.checking.poll() is None:
            ends.raise_if_unwanted()
            time.sleep(POLL_SECONDS)


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


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    words = _words(options)
    try:
        if not words:
            raise ValueError("expected a command behind --, as in: verl-gdpo run -- python ...")
        command = understood(words, options.run_dir, resume=options.resume)
        check: Sequence[str] = ()
        if options.check:
            check = _check_of(words, options.check_option)
        was_empty = not (command.folder.exists() and any(command.folder.iterdir()))
        for remark in [*command.remarks, *_variables_without_effect(command.folder)]:
            _say(remark)
        if options.run_dir is None:
            _say(f"everything that it prints: {command.folder}/train.log")
        end = _launched(command, check, options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"verl-gdpo run: {error}", file=sys.stderr)
        return 2
    if end.reason == "refused":  # the check has printed why
        if was_empty and end.has_folder:
            shutil.rmtree(command.folder, ignore_errors=True)
    elif end.report:
        print(end.report, file=sys.stderr)
    elif end.reason == "finished" and options.run_dir is None:
        folder = shlex.quote(str(command.folder))
        _say(f"finished; its rewards and findings: verl-gdpo summary {folder}")
    return end.exit_code


def _variables_without_effect(run: Path) -> Iterator[str]:
    """Yield a sentence for each place of the user's for metrics, which the launcher replaces."""
    for name in (LOGGER_FILE, LOGGER_ROOT):
        value = os.environ.get(name)
        # A launcher that runs in the command of another one finds the file of that.
        if value is not None and value != os.environ.get(OUR_LOGGER_FILE):
            yield (
                f"{name}={value} has no effect here: verl's file logger writes into {run / METRICS}"
            )


def _words(options: argparse.Namespace) -> list[str]:
    """Return program and arguments; argparse leaves the -- in front of them."""
    words: list[str] = options.command
    if words[:1] == ["--"]:
        return words[1:]
    return words


def _say(text: str) -> None:
    try:
        print(f"verl-gdpo run: {text}", flush=True)
    except OSError:  # The reader of our output has gone, which ends no training.
        let_go_of_stdout()


def _launched(
    command: TrainingCommand, check: Sequence[str], options: argparse.Namespace
) -> RunEnd:
    before = "running"
    if command.is_verl:
        before = STARTS_UP
    return launch(
        command.words,
        command.folder,
        check=check,
        time_limit=options.time_limit,
        end_with_parent=options.end_with_parent,
        go_on=options.go_on or _goes_on(command, options),
        before=before,
        checkpoints=command.checkpoints,
        trainer=command.trainer,
    )


def _goes_on(command: TrainingCommand, options: argparse.Namespace) -> str | None:
    """Return the line that goes on with a run; None where nobody knows its checkpoints."""
    if command.checkpoints is None:
        return None
    words = ["verl-gdpo", "run", "--resume"]
    if options.run_dir is not None:
        words += ["--run-dir", str(options.run_dir)]
    words.append("--")
    return shlex.join(words + _words(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo run",
        usage="verl-gdpo run [OPTIONS] -- COMMAND...",
        description="Run a training command: show its progress, write what it prints into "
        "train.log, say why it ended, and leave no process behind.",
        epilog="Of `python -m verl.trainer.main_ppo ...` and verl's other trainers it knows the "
        "configuration: it writes into trainer.default_local_dir, adds `file` to trainer.logger, "
        "ends a run that hangs, and says how a stopped run goes on. Of any other command it shows "
        "the steps that verl logs, if it does, and writes into a new folder in runs/. The exit "
        "code is the command's, 124 at the time limit, 127 if it cannot start, 128 + signal, or 2 "
        "for wrong arguments.",
    )
    add = parser.add_argument
    about = "the folder of train.log and metrics; default: verl's folder of checkpoints"
    add("--run-dir", type=Path, metavar="FOLDER", help=about)
    about = "go on from the newest checkpoint, which has to be whole (trainer.resume_mode=auto)"
    add("--resume", action="store_true", help=about)
    add("--time-limit", type=float, metavar="SECONDS", help="stop the run after this time")
    about = "stop the run when the process that started this command is gone"
    add("--end-with-parent", action="store_true", help=about)
    about = "what to say of how a stopped run goes on; default: this command with --resume"
    add("--go-on", metavar="TEXT", help=about)
    about = "let `verl-gdpo check` look at the configuration meanwhile; a problem ends the run"
    add("--check", action="store_true", help=about)
    about = "an option for that check, as in --check-option=--allow-flat; may be repeated"
    add("--check-option", action="append", default=[], metavar="OPTION", help=about)
    about = "program and arguments, behind --"
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=about)
    return parser


def _check_of(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the command that checks the configuration of `PYTHON -m MODULE key=value ...`.

    Raises:
        ValueError: the command is not the trainer whose configuration `check` knows, or its Python
            has no verl-gdpo.
    """
    trainer = verls_trainer(words)
    if trainer is None or trainer.module != CHECKED:
        raise ValueError(f"--check needs a command such as: python -m {CHECKED} key=value ...")
    python = _python_of(words)
    # Python ends with the same exit code if it lacks a module as `check` if it finds a problem, and
    # a problem ends the run.
    if not _has_verl_gdpo(python):
        raise ValueError(
            f"--check: {python} has no verl-gdpo, so it cannot check the configuration. Install "
            "verl-gdpo there, or leave out --check"
        )
    return [python, "-m", "verl_gdpo", "check", "--brief", *options, *trainer.arguments]


def _python_of(words: Sequence[str]) -> str:
    """Return the Python that a command starts `CHECKED` with.

    It is this process's own if the command does not name one: torchrun is installed beside it.
    """
    before = words[: list(words).index(CHECKED)]
    for word in reversed(before):
        if PYTHON.fullmatch(Path(word).name):
            return word
    return sys.executable


def _has_verl_gdpo(python: str) -> bool:
    """Return whether an interpreter starts, and finds verl-gdpo."""
    try:
        done = subprocess.run([python, "-c", IS_INSTALLED], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
