"""Finds the folder of a run that somebody renames, deletes or unmounts while the run goes on.

verl holds its metrics file open, as the launcher does `train.log`, and both are written on wherever
they are. verl writes rollouts and checkpoints by name, and makes the folder again for them.
"""

import os
from pathlib import Path
from types import TracebackType

DELETED = " (deleted)"  # what Linux puts after the name of a folder that is gone


class HeldFolder:
    """A folder that is held open, so that it is found again under another name.

    It is a context manager, which lets go of the folder at its end.

    Args:
        path: the folder, which must exist. verl gets this name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._real = path.resolve()
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)

    def __enter__(self) -> "HeldFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def place(self) -> Path | None:
        """Return where the folder is now; None if no name leads to it."""
        if self._is_at(self.path):
            return self.path
        moved = Path(self._name())
        if self._is_at(moved):
            return moved
        return None

    def follow(self, file: Path) -> Path | None:
        """Return where a file is now, if it moves with the folder; None if no name leads to it.

        Args:
            file: its path when the folder was opened. A file outside of the folder stays there.
        """
        inside = file.resolve()
        if not inside.is_relative_to(self._real):
            return file
        place = self.place()
        if place is None:
            return None
        return place / inside.relative_to(self._real)

    def loss(self) -> str:
        """Say what has become of the folder; "" if it is where it was."""
        place = self.place()
        if place == self.path:
            return ""
        gone = f"the run folder {self.path} is gone"
        again = f"For rollouts and checkpoints verl makes {self.path} again."
        if place is not None:
            return (
                f"{gone}: it is now {place}. The training goes on. verl writes its metrics, and "
                f"the launcher train.log, into {place}. {again}"
            )
        lost = "No step is shown and no hang is noticed from here on."
        if self._name().endswith(DELETED):
            return (
                f"{gone}: it was deleted. The training goes on. What verl writes into its metrics, "
                f"and train.log, are lost at its end. {again} {lost}"
            )
        return (
            f"{gone}: its disk is away, or something else is in its place. The training goes on, "
            f"and verl writes where it can. {again} {lost}"
        )

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False

    def _name(self) -> str:
        """Return the name that Linux has for the folder."""
        try:
            return os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:  # /proc is not there
            return DELETED
