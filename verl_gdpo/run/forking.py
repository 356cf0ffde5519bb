"""Lets a run without a GPU start its processes by forking one that has imported their libraries.

verl starts nine Python processes one after the other. On two cores each needs 3 to 7 seconds for
imports alone, and one second when it is forked. `verl_gdpo.cpu.fork_server` says how.

With a GPU every process starts as usual: we have not tried forks there, and a start that takes a
minute matters less in a run of hours.
"""

import contextlib
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

FORKED = Path(__file__).parents[1] / "cpu" / "forked.py"
# verl hands it to Ray, which puts it in front of the script and arguments of each worker
WORKERS_INTERPRETER = "ray_kwargs.ray_init.runtime_env.py_executable"


@contextlib.contextmanager
def fork_server(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> Iterator[list[str]]:
    """Start a server, and yield what takes the place of `command[0]`, the interpreter.

    Nothing is started, and the interpreter yielded, unless `command` starts verl without a GPU.
    The server ends with the block, and its forked processes have the environment of the run.

    Args:
        command: PYTHON -m MODULE ARGUMENT...
        log: gets what the server prints.
    """
    if not (environment.get("VERL_PLATFORM") == "cpu" and command[1:2] == ["-m"]):
        yield [command[0]]
        return
    # sockets need short paths, which $TMPDIR may not have; only its owner can enter the folder
    folder = tempfile.mkdtemp(prefix="verl_gdpo_", dir="/tmp")
    path = f"{folder}/fork_server"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)  # whoever asks while the server imports has to wait
            server = subprocess.Popen(
                [command[0], "-m", "verl_gdpo.cpu.fork_server", str(listener.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
        try:
            yield [command[0], "-I", "-S", str(FORKED), path]
        finally:
            server.kill()
            server.wait()
    finally:
        shutil.rmtree(folder)


def workers_too(interpreter: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the override with which Ray starts its workers by the same interpreter, if any.

    A value in `command` wins.
    """
    if len(interpreter) == 1 or any(WORKERS_INTERPRETER in argument for argument in command):
        return []
    value = shlex.join(interpreter).replace("\\", "\\\\").replace("'", "\\'")
    return [f"++{WORKERS_INTERPRETER}='{value}'"]
