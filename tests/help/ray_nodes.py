"""Nodes of Ray on this machine, started as on a cluster, and ended by their process ids."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time

import psutil
from ray_session import ray_folder

HEAD, OTHER, THIRD, FOURTH = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
STARTED_SECONDS = 180
CPUS = 16
FILLER = f"""
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus={CPUS}, resources={{f"node:{{sys.argv[2]}}": 0.001}})
class Filler:
    def ready(self):
        return "full"

filler = Filler.remote()
print(ray.get(filler.ready.remote()), flush=True)
sys.stdin.read()
"""


class Nodes:
    """The cluster. Each node is a session of processes, so that it can die as a whole.

    Args:
        folder: Ray's, with a short path.
        environment: of all nodes.
    """

    def __init__(self, folder, environment):
        self.folder = folder
        with socket.create_server((HEAD, 0)) as server:
            self.address = f"{HEAD}:{server.getsockname()[1]}"
        # whoever can reach the port of a cluster without a token can run programs there
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**os.environ, **environment, **self.token}
        self.started = {}

    def start(self, node, python=sys.executable, **environment):
        """Ray gives up on a node that is not ready after 30 s, so it may start several times."""
        deadline = time.monotonic() + STARTED_SECONDS
        where = [f"--address={self.address}"]
        if node == HEAD:
            where = ["--head", f"--port={self.address.split(':')[1]}", "--include-dashboard=false"]
        command = [
            *(python, "-c", "from ray.scripts.scripts import main; main()", "start", *where),
            *(f"--node-ip-address={node}", f"--temp-dir={self.folder}/{node}", "--block"),
            *(f"--num-cpus={CPUS}", "--num-gpus=1", "--object-store-memory=300000000"),
        ]
        while node not in self.started:
            with open(f"{self.folder}/{node}.log", "wb") as log:
                self.started[node] = subprocess.Popen(
                    command,
                    env={**self.environment, **environment},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while "Ray runtime started" not in (said := self.log(node)):
                assert time.monotonic() < deadline, said
                if self.started[node].poll() is not None:
                    self.kill(node)
                    break
                time.sleep(0.2)

    def log(self, node):
        with open(f"{self.folder}/{node}.log", errors="replace") as file:
            return file.read()

    def processes(self, node):
        """{process: its title}."""
        session, found = self.started[node].pid, {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = " ".join(process.cmdline())
        return found

    def actors(self, name):
        """{node: process} of the actors of a class, one for each node."""
        return {
            node: process
            for node in self.started
            for process, title in self.processes(node).items()
            if title.startswith(f"ray::{name}")
        }

    @contextlib.contextmanager
    def filled(self, node):
        """No CPU of this node is free, so that verl's first process starts on another one."""
        with subprocess.Popen(
            [sys.executable, "-c", FILLER, self.address, node],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout.readline() == b"full\n"
            yield

    def kill(self, node):
        """As when a machine loses its power."""
        while found := self.processes(node):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        self.started.pop(node).wait()


@contextlib.contextmanager
def ray_nodes(environment):
    """A cluster without nodes, of which nothing is left afterwards."""
    with ray_folder() as folder:
        nodes = Nodes(folder, environment)
        try:
            yield nodes
        finally:
            for node in [*nodes.started]:
                nodes.kill(node)
