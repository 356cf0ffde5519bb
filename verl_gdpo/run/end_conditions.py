"""Says when a run has to end before its driver does, as at a time limit or when it hangs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_gdpo.run.checkpoints import STARTS, manifests_in
from verl_gdpo.run.hang_watch import HangWatch
from verl_gdpo.run.resolved_config import flat
from verl_gdpo.run.stacks import write_stacks
from verl_gdpo.run.starts import TIME_LIMIT_EXIT, read_start

POLL_SECONDS = 0.2
FAILED_EXIT = 1
CHECK_REFUSES = (1, 2)  # problems, or a wrong option: it has printed which
HANG_FILE = "hang.txt"  # in the folder of a run that hung
GO_ON = "A start with trainer.resume_mode=auto continues from the last checkpoint"


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    exit_code: of the launcher.
    reason: "finished", "failed", "stopped", "time limit", "hang", "folder deleted" or "refused".
    message: what is known beyond the log of the run.
    """

    exit_code: int
    reason: str
    message: str = ""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody asked for it."""
        return self.reason in ("stopped", "time limit")


class Stopped(BaseException):
    """The run has to end, as `end` says."""

    def __init__(self, end: RunEnd) -> None:
        super().__init__(end)
        self.end = end


@dataclass
class EndConditions:
    """What ends a run before its driver does.

    parent: id of the process whose end ends the run; None if it is no matter.
    started: returns the living processes of the run.
    """

    run: Path
    deadline: float
    parent: int | None
    started: Callable[[], Sequence[psutil.Process]] = tuple
    checking: "subprocess.Popen[bytes] | None" = None
    watch: HangWatch | None = None
    earlier: Sequence[Path] = field(init=False)  # manifests
    folder: int = field(init=False)  # its inode

    def __post_init__(self) -> None:
        self.earlier, self.folder = manifests_in(self.run / STARTS), self.run.stat().st_ino

    def raise_if_due(self) -> None:
        """Raise Stopped if the run has to end."""
        if self.checking is not None and (code := self.checking.poll()):
            if code in CHECK_REFUSES:
                raise Stopped(RunEnd(FAILED_EXIT, "refused", "the check found a problem"))
            message = (
                f"the check itself ended, with exit code {code}, perhaps in the reward function: "
                "verl-gdpo check -v, with the same arguments, shows more"
            )
            raise Stopped(RunEnd(FAILED_EXIT, "failed", message))
        if time.monotonic() > self.deadline:
            raise Stopped(RunEnd(TIME_LIMIT_EXIT, "time limit"))
        if self.parent is not None and os.getppid() != self.parent:
            raise Stopped(RunEnd(128 + signal.SIGHUP, "stopped"))
        if self._is_gone():
            message = f"the run's folder {self.run} was deleted or moved"
            raise Stopped(RunEnd(FAILED_EXIT, "folder deleted", message))
        self._raise_if_it_hangs()

    def _raise_if_it_hangs(self) -> None:
        if self.watch is None:
            self._begin_to_watch()
        if self.watch is None or not self.watch.is_overdue(most=10 * POLL_SECONDS):
            return
        busy = write_stacks(self.started(), self.run / HANG_FILE)
        if self.watch.is_overdue(most=0.0):  # no step has come meanwhile
            message = (
                f"HangError: {self.watch.problem()}. Busy or silent: {'; '.join(busy) or 'none'}. "
                f"The stacks of all processes on this machine: {self.run / HANG_FILE}. {GO_ON}"
            )
            raise Stopped(RunEnd(FAILED_EXIT, "hang", message))

    def _begin_to_watch(self) -> None:
        """Watch the run as soon as the manifest of this start says how."""
        try:
            for manifest in manifests_in(self.run / STARTS)[len(self.earlier) :]:
                start = read_start(manifest).start
                self.watch = HangWatch(Path(start.metrics), flat(start.configuration))
        except ValueError as error:
            raise Stopped(RunEnd(FAILED_EXIT, "failed", str(error))) from None
        except OSError:  # a disk that is away for a moment
            self.watch = None

    def _is_gone(self) -> bool:
        try:
            return self.run.stat().st_ino != self.folder
        except FileNotFoundError:
            return True
        except OSError:  # a disk that is away for a moment
            return False
