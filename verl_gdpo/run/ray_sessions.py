"""Removes what Ray leaves of a run outside its folder, and keeps its logs if the run failed.

Relies on Ray 2: the driver that starts Ray names its session `session_DATE_TIME_PROCESS`, in the
folder `ray` of $RAY_TMPDIR, $TMPDIR or /tmp, or in `_temp_dir`. A cluster that was there before has
a session of another process, which stays.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LOGS = "ray_logs"
TEMP_DIR = re.compile(r"\+*ray_kwargs\.ray_init\._temp_dir=['\"]?([^'\"]*)")


def clear_sessions(
    driver: int, command: Sequence[str], environment: Mapping[str, str], run: Path | None
) -> None:
    """Remove the sessions that a driver has started, after all of its processes have ended.

    Args:
        driver: its process id.
        command: its command, which may name another folder for Ray.
        run: if not None, the logs are moved into this folder first.
    """
    for folder in _folders(command, environment):
        for session in folder.glob(f"session_*_{driver}"):
            if run is not None and run.exists():
                with suppress(OSError):
                    shutil.move(session / "logs", run / LOGS / session.name)
            shutil.rmtree(session, ignore_errors=True)
        latest = folder / "session_latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


def _folders(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    base = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    yield Path(base) / "ray"
    for argument in command:
        if found := TEMP_DIR.match(argument):
            yield Path(found[1])
