"""Says when a run has to end before its driver does, as at a time limit or when it hangs.

    trainer:
      hang_minutes: 30    # the floor of the limit; 0 switches this off

Relies on verl 0.9: `FileLogger` writes each line at once; a step is logged after its validation and
its checkpoint, with `timing_s/NAME` of each part; names of validation metrics begin with "val-".
On Ray 2: the function `METHOD` calls the methods of actors.

A process that loads the plugin writes its stacks itself: see `verl_gdpo/tools/run/stacks.py`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl_gdpo.hooks.run_keys import HANG_MINUTES, hang_seconds
from verl_gdpo.terminal import note
from verl_gdpo.tools import CHECK_FAULT, CHECK_REFUSES
from verl_gdpo.tools.run.checkpoints import STARTS, manifests_in
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.processes import CANNOT_START
from verl_gdpo.tools.run.stacks import SIGNAL, files_of
from verl_gdpo.tools.run.starts import END, TIME_LIMIT_EXIT, read_start
from verl_gdpo.tools.run_folder.folder import (
    METRICS,
    MetricsReader,
    is_validation,
    newer_metrics_file,
)

POLL_SECONDS = 0.2
FAILED_EXIT = 1
HANG_FILE = "hang.txt"  # in the folder of a run that hung
MINUTES = 30.0  # of `trainer.hang_minutes`, where nothing is said
FIRST_SECONDS = 7200.0  # an update of long answers on few GPUs takes more than an hour
LONGEST_FACTOR = 5  # a step may take this many times the longest so far
UPDATE = "timing_s/update_actor"
VALIDATION = "timing_s/testing"
# {metric of a step that does more than others: the key that says how often a run has such steps}
PARTS = {VALIDATION: "test_freq", "timing_s/save_checkpoint": "save_freq"}
METHOD = "actor_method_executor"
NO_ANSWER = "it does not answer a signal"
WRITTEN_SECONDS = 3.0


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    exit_code: of the launcher.
    reason: "finished", "failed", "stopped", "time limit" or "refused".
    message: what is known beyond the log of the run.
    report: why it ended, for a person; "" if it finished, and its folder is where it was.
    has_folder: whether the folder of the run is where it was.
    """

    exit_code: int
    reason: str
    message: str = ""
    report: str = ""
    has_folder: bool = True

    @property
    def is_wanted(self) -> bool:
        """Whether somebody asked for it."""
        return self.reason in ("stopped", "time limit")


class Stopped(BaseException):
    """The run has to end, as `end` says."""

    def __init__(self, end: RunEnd) -> None:
        super().__init__(end)
        self.end = end


class HangWatch:
    """Counts how long the metrics file of a run has had no new line.

    The limit is `LONGEST_FACTOR` times the longest step so far, and at least the floor. It is at
    least `FIRST_SECONDS` until a step of this start has had an update, and each of `PARTS` that the
    run has.

    Args:
        metrics: the file.
        trainer: the block `trainer` of the run's configuration.
        clock: seconds. It stands still while the machine is suspended.

    Raises:
        ValueError: `trainer.hang_minutes` is something else than a number of minutes.
    """

    def __init__(
        self,
        metrics: Path,
        trainer: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        minutes = trainer.get(HANG_MINUTES, MINUTES)
        if str(minutes).startswith("${"):
            # Only the environment of the run knows the value.
            minutes = MINUTES
        self.floor = hang_seconds(minutes)
        if "file" not in (trainer.get("logger") or ()):
            # No line ever comes, so the run is not watched.
            self.floor = 0.0
        self.silence = 0.0
        self._lines = MetricsReader(metrics)
        self._clock = clock
        self._last = clock()
        self._longest = 0.0
        self._missing = {UPDATE}
        for part, key in PARTS.items():
            # A frequency that only the environment of the run knows counts too.
            if trainer.get(key) not in (None, 0, -1):
                self._missing.add(part)

    @property
    def limit(self) -> float:
        """How long the silence may become."""
        limit = max(self.floor, LONGEST_FACTOR * self._longest)
        if self._missing:
            limit = max(limit, FIRST_SECONDS)
        return limit

    def is_overdue(self, most: float) -> bool:
        """Read new lines, and return whether the silence is longer than the limit.

        Args:
            most: seconds that count at most of the time since the last call, in which this process
                may have been stopped.
        """
        now = self._clock()
        self.silence += min(now - self._last, most)
        self._last = now
        try:
            for _, metrics in self._lines.new():
                self._add(metrics)
            can_tell = self._lines.run.is_file()
        except OSError:
            # Its disk is away for a moment.
            can_tell = False
        if not can_tell:
            # A line may have come that nobody can read.
            self.silence = 0.0
        is_watched = self.floor > 0.0
        return is_watched and self.silence > self.limit

    def follow(self, metrics: Path) -> None:
        """Read on in the same file, which may have another name by now."""
        self._lines.run = metrics

    def look_away(self) -> None:
        """Forget the silence so far: nobody can tell whether a line has come."""
        self._last = self._clock()
        self.silence = 0.0

    def _add(self, metrics: Mapping[str, float]) -> None:
        """Count a new line, whose step took as long as the silence before it."""
        self._longest = max(self.silence, self._longest)
        self.silence = 0.0
        if is_validation(metrics):
            # One before the first step has no `timing_s`, and says how long it takes all the same.
            self._missing.discard(VALIDATION)
        else:
            self._missing.difference_update(metrics)


@dataclass
class StopConditions:
    """What ends a run before its driver does.

    A command may train several times, as a script does. The training that began last is watched,
    until its record says that it has ended: what the script does then logs no steps.

    folder: of the run. If it is gone, the run is not ended for it, and is not watched for hangs.
    parent: id of the process whose end ends the run; None if it is no matter.
    metrics: the file that is watched.
    trainer: the block `trainer` of the configuration. If it is empty, nothing is watched until the
        manifest of a start has one.
    started: returns the living processes of the run.
    """

    folder: HeldFolder
    deadline: float
    parent: int | None
    metrics: Path
    trainer: Mapping[str, Any] = field(default_factory=dict)
    started: Callable[[], Sequence[psutil.Process]] = tuple
    checking: "subprocess.Popen[bytes] | None" = None
    reads_manifests: bool = field(init=False)
    known: int = field(init=False)  # how many starts of the run are not new
    start: str = field(init=False)  # the folder in `STARTS` of the watched training; "" without one
    watch: HangWatch = field(init=False)

    def __post_init__(self) -> None:
        self.reads_manifests = not self.trainer
        self.known = len(manifests_in(self.folder.path / STARTS))
        self._watch(self.metrics, self.trainer, start="")

    def raise_if_due(self) -> None:
        """Raise Stopped if the run has to end."""
        self.raise_if_check_failed()
        self.raise_if_unwanted()
        self._raise_if_it_hangs()

    def raise_if_unwanted(self) -> None:
        """Raise Stopped after the time limit, and when the parent is gone."""
        if time.monotonic() > self.deadline:
            raise Stopped(RunEnd(TIME_LIMIT_EXIT, "time limit"))
        if self.parent is not None and os.getppid() != self.parent:
            raise Stopped(RunEnd(128 + signal.SIGHUP, "stopped"))

    def raise_if_check_failed(self) -> None:
        """Raise Stopped if the check has ended and found a problem, or has failed itself."""
        if self.checking is None:
            return
        code = self.checking.poll()
        # It is None while the check goes on.
        if code is None or code == 0:
            return
        if code in (CANNOT_START, CHECK_FAULT):
            # It has said why. That says nothing of the configuration, so the run goes on.
            self.checking = None
            with suppress(OSError):  # nobody reads our messages any more
                note("WARNING: the check did not run to its end; the run goes on")
            return
        if code in CHECK_REFUSES:
            raise Stopped(RunEnd(FAILED_EXIT, "refused", "the check found a problem"))
        message = f"the check itself ended, with exit code {code}: see verl-gdpo check -v"
        raise Stopped(RunEnd(FAILED_EXIT, "failed", message))

    def _raise_if_it_hangs(self) -> None:
        self.look_for_trainings()
        place = self.folder.place()
        metrics = self.folder.follow(self.metrics)
        if metrics is None or self._has_ended(place):
            self.watch.look_away()
            return
        self.watch.follow(metrics)
        if not self.watch.is_overdue(most=10 * POLL_SECONDS):
            return
        hang_file = (place or self.folder.path) / HANG_FILE
        busy = write_stacks(self.started(), hang_file)
        if not self.watch.is_overdue(most=0.0):
            # A step has come while the stacks were written.
            return
        message = (
            f"HangError: no step was logged for {self.watch.silence:.0f} s, and "
            f"{self.watch.limit:.0f} s were allowed; ++trainer.hang_minutes=N allows more. "
            f"Busy or silent: {'; '.join(busy) or 'none'}. "
            f"The stacks of all processes on this machine: {hang_file}"
        )
        raise Stopped(RunEnd(FAILED_EXIT, "failed", message))

    def look_for_trainings(self) -> None:
        """Watch the training that began last. Its manifest says how, if it has one."""
        place = self.folder.place()
        if place is None:
            return
        try:
            if self.reads_manifests:
                self._read_new_manifests(place)
            self._follow_newest_file(place)
        except ValueError as error:
            raise Stopped(RunEnd(FAILED_EXIT, "failed", str(error))) from None
        except OSError:
            # Its disk is away for a moment, and the next look comes soon.
            return

    def _read_new_manifests(self, place: Path) -> None:
        for manifest in manifests_in(place / STARTS)[self.known :]:
            start = read_start(manifest).start
            self.known += 1
            trainer = start.configuration.get("trainer", {})
            self._watch(Path(start.metrics), trainer, start=manifest.parent.name)

    def _has_ended(self, place: Path | None) -> bool:
        """Return whether a training of a script has ended, and the script goes on."""
        if place is None or not self.start:
            return False
        return (place / STARTS / self.start / END).exists()

    def _follow_newest_file(self, place: Path) -> None:
        """Watch a newer file of the run's folder, as of a training without a manifest."""
        watched = self.folder.follow(self.metrics)
        if watched is None or not watched.parent.samefile(place / METRICS):
            return
        newer = newer_metrics_file(watched)
        if newer is not None:
            self._watch(self.metrics.with_name(newer.name), self.trainer, start="")

    def _watch(self, metrics: Path, trainer: Mapping[str, Any], start: str) -> None:
        self.metrics = metrics
        self.trainer = trainer
        self.start = start
        self.watch = HangWatch(metrics, trainer)


def write_stacks(processes: Iterable[psutil.Process], file: Path) -> list[str]:
    """Write the stacks of processes into a file.

    Returns:
        The first line of each process that runs a method for Ray, or does not answer.
    """
    stacks = [stacks_of(process.pid) for process in processes]
    whole = "\n\n".join(stacks) + "\n"
    with suppress(OSError):  # of a full disk
        # A command line may have bytes that are no text in any encoding.
        file.write_text(whole, encoding="utf-8", errors="backslashreplace")
    first_lines = []
    for text in stacks:
        if METHOD in text or NO_ANSWER in text:
            first_line, _, _ = text.partition("\n")
            first_lines.append(first_line)
    return first_lines


def stacks_of(process_id: int) -> str:
    """Return the state of a process on this machine and the stacks of its threads, or why not."""
    try:
        process = psutil.Process(process_id)
        command = " ".join(process.cmdline())[:80] or process.name()
        title = f"process {process_id}, {process.status()}: {command}"
        files = files_of(process_id)
        stacks = "it does not load verl-gdpo"
        if files:
            stacks = _written(process_id, files[0])
    except (psutil.Error, OSError) as error:
        return f"process {process_id}: {error}"
    return f"{title}\n{stacks}"


def _written(process_id: int, file: Path) -> str:
    """Return what the process's own handler writes into its file."""
    before = len(file.read_bytes())
    last = before
    os.kill(process_id, SIGNAL)
    give_up = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)
        size = len(file.read_bytes())
        has_begun = size > before
        if has_begun and size == last:
            # It does not grow any more.
            break
        last = size
    written = file.read_bytes()[before:]
    return written.decode(errors="replace") or NO_ANSWER
