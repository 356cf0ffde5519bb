"""Imports once what most processes of a run need, and forks them.

    python -m verl_gdpo.cpu.fork_server LISTENING_SOCKET_NUMBER

Each connection comes from `forked.py`, which stands for a process. The process is forked from this
one. It gets the arguments, environment, folder and standard streams of `forked.py`, and goes on as
`python SCRIPT ...` or `python -m MODULE ...`.

Neither verl nor Ray is imported here: both read the environment while they are imported, and that
differs from process to process. If this server fails, or refuses because the environment differs
in what the imported libraries have read, `forked.py` starts an interpreter as usual.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from typing import Any

# what verl and Ray import: nearly all of the time that they need to be imported
MODULES = (
    "accelerate",
    "aiohttp",
    "datasets",
    "fastapi",
    "hydra",
    "omegaconf",
    "pandas",
    "peft",
    "tensordict",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
    "transformers.generation.utils",
    "transformers.image_processing_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "uvicorn",
    "zmq",
)
# variables that Python or these libraries read when they are loaded
READ_AT_LOAD = (
    *("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH", "PYTORCH_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "ARROW_"),
)
AT_START = dict(os.environ)
HEADER_BYTES = 8
STANDARD_STREAMS = 3
HARMLESS_THREADS = {"jemalloc_bg_thd"}  # of pyarrow; jemalloc stops it before a fork


class Server:
    """Forks a process for each connection, and sends its id and its exit code back."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.connections: dict[int, socket.socket] = {}  # by the id of the forked process
        self.ended, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing wakes us
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.ended, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve until killed. Only a forked process returns, with what it is to become."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    if (wanted := self._answer()) is not None:
                        return wanted
                elif key.fileobj is self.ended:
                    self._report_ended()
                else:
                    self._kill(key.data)

    def _answer(self) -> tuple[dict[str, Any], list[int]] | None:
        connection, _ = self.listener.accept()
        streams: list[int] = []
        try:
            request, streams = receive(connection)
            if reason := reason_to_refuse(request):
                print(f"fork_server: a new interpreter, because of {reason}", flush=True)
                raise ValueError(reason)
            process = os.fork()
        except (OSError, ValueError):
            connection.close()
            _close(streams)
            return None
        if process == 0:
            self._forget(connection)
            return request, streams
        _close(streams)
        self.connections[process] = connection
        self.selector.register(connection, selectors.EVENT_READ, data=process)
        _send(connection, process)
        return None

    def _forget(self, connection: socket.socket) -> None:
        """Give up what only the server needs, in the forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for other in (connection, self.listener, self.ended, self.wake, *self.connections.values()):
            other.close()

    def _report_ended(self) -> None:
        self.ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = found
                if process in self.connections:
                    _send(self._disconnect(process), os.waitstatus_to_exitcode(status), last=True)

    def _kill(self, process: int) -> None:
        """End a process whose `forked.py` was killed: from outside, the two are one."""
        self._disconnect(process).close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def _disconnect(self, process: int) -> socket.socket:
        connection = self.connections.pop(process)
        self.selector.unregister(connection)
        return connection


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request of `forked.py`, and the standard streams that it sent along.

    Raises:
        ValueError: the request is not complete.
    """
    header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, STANDARD_STREAMS)
    try:
        with connection.makefile("rb") as file:
            request: dict[str, Any] = json.loads(file.read(int.from_bytes(header, "big")))
    except ValueError:
        _close(streams)
        raise
    return request, streams


def reason_to_refuse(request: Mapping[str, Any]) -> str | None:
    """Return what only a new interpreter can do: options, or variables that are read at load."""
    environment = request["environment"]
    unlike = sorted(
        name
        for name in {*environment, *AT_START, *os.environ}
        # libraries set a few themselves, in the process that asks as well as in this one
        if name.startswith(READ_AT_LOAD)
        and environment.get(name) not in (AT_START.get(name), os.environ.get(name))
    )
    if unlike:
        return f"other values of {', '.join(unlike)}"
    first = _without_warnings(request["arguments"])[0]
    return f"the option {first}" if first.startswith("-") and first != "-m" else None


def _without_warnings(arguments: list[str]) -> list[str]:
    return arguments[2:] if arguments[:2] == ["-W", "ignore"] else arguments


def _send(connection: socket.socket, number: int, last: bool = False) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        connection.sendall(b"%d\n" % number)
    if last:
        connection.close()


def _close(streams: list[int]) -> None:
    for stream in streams:
        os.close(stream)


def become(request: Mapping[str, Any], streams: list[int]) -> None:
    """Go on as the process that was asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    _close(streams)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import numpy

    numpy.random.seed()  # or all forked processes would draw the same numbers
    run(request["arguments"])


def run(arguments: list[str]) -> None:
    """Run like `python [-W ignore] SCRIPT ...` or `python [-W ignore] -m MODULE ...`."""
    first, *others = _without_warnings(arguments)
    if first != arguments[0]:
        warnings.simplefilter("ignore")
    if first == "-m":
        sys.argv = others
        sys.path[0] = os.getcwd()
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def threads() -> list[str]:
    """Return the names of this process's threads but the first: a forked process lacks them."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            if thread != str(os.getpid()):
                names.append(file.read().strip())
    return sorted({*names} - HARMLESS_THREADS)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        importlib.import_module(module)
    if found := threads():
        sys.exit(f"fork_server: not used, because imports have started the threads {found}")
    gc.collect()
    gc.freeze()  # the first collection in a forked process would copy all of this memory
    become(*Server(listener).serve())


if __name__ == "__main__":
    main()
