"""Stands for a Python process that `fork_server.py` forks.

    python -I -S forked.py SOCKET [-W ignore] SCRIPT|-m MODULE [ARGUMENT ...]

It waits for the forked process, passes signals on to it, and ends as it ends. If there is no
server, or it refuses, this process becomes `python SCRIPT ...` itself. It needs nothing but the
standard library, so that it starts in 30 ms.
"""

import json
import os
import signal
import socket
import sys
import time
from typing import BinaryIO

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOST_EXIT = 1  # the server died, and the exit code with it


def main() -> None:
    path, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
            request(connection, arguments)
            answers = connection.makefile("rb")
            process = answers.readline()
        except OSError:  # the server is gone, or goes now
            process = b""
        if process:
            follow(int(process), answers)
    os.execv(sys.executable, [sys.executable, *arguments])


def request(connection: socket.socket, arguments: list[str]) -> None:
    """Ask for a process like this one."""
    umask = os.umask(0)
    os.umask(umask)
    wanted = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
    }
    text = json.dumps(wanted).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(text)


def follow(process: int, answers: BinaryIO) -> None:
    """Wait for the forked process, and end as it ends."""

    def pass_on(number: int, _: object) -> None:
        if os.path.exists(f"/proc/{process}"):
            os.kill(process, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    answer = answers.readline()
    if not answer:
        while os.path.exists(f"/proc/{process}"):
            time.sleep(0.1)
    code = int(answer or LOST_EXIT)
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
