"""Asks the nodes of a Ray cluster, and refuses one that cannot run this package as the others do.

Relies on Ray 2: `ray.init` with an address, `ray.nodes`, `NodeAffinitySchedulingStrategy`, and
`max_calls`, after which the process of a task ends. Relies on verl 0.9: `run_ppo` makes the
trainer's process by `task_runner_class.remote()`, or by its `options`, once Ray runs.
"""

import hashlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_gdpo

# an answer imports verl, which takes minutes from a slow shared disk
ANSWER_SECONDS = 300.0
REACH_SECONDS = 5.0  # for a connection from one node to another


def on_node(node_id: str, function: Callable[..., Any]) -> Any:
    """Return the function as a task for this node, in a process that ends after it."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=there)(function)


def on_every_node(
    function: Callable[..., Any], *arguments: Any, seconds: float = ANSWER_SECONDS
) -> dict[str, Any]:
    """Call a function once on each living node.

    Args:
        function: it has to be importable on the nodes.
        arguments: what it is called with.
        seconds: limit for all answers together.

    Returns:
        {address of a node: what the function returned, or the exception}.
    """
    asked = {
        address: on_node(node["NodeID"], function).remote(*arguments)
        for address, node in _living().items()
    }
    return _answers(asked, seconds)


def _living() -> dict[str, Any]:
    """{address: what Ray says of a node}."""
    return {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}


def _answers(asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    ray.wait([*asked.values()], num_returns=len(asked), timeout=seconds)
    return {node: _answer(question, seconds) for node, question in asked.items()}


def _answer(question: Any, seconds: float) -> Any:
    try:
        return ray.get(question, timeout=0)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(question, force=True)
        return TimeoutError(f"no answer within {seconds:.0f} s")
    except ray.exceptions.RayError as error:
        return error


@contextmanager
def joined(address: str, variables: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Join a cluster that runs, and leave it; yields {address of a living node: GPUs of Ray}.

    Args:
        address: as in `ray.init`.
        variables: of the environment of the processes on the nodes.

    Raises:
        ConnectionError: there is no such cluster, or none from here.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and out_of_reach({host: int(port)}):  # Ray would try for minutes
        raise ConnectionError(f"there is no Ray cluster at {address}, or no way to it from here")
    ray.init(
        address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {name: str(value) for name, value in variables.items()}},
    )
    try:
        yield {at: node["Resources"].get("GPU", 0.0) for at, node in _living().items()}
    finally:
        ray.shutdown()


class Listener:
    """Lets others connect to a free port of its node, as the processes of a run do."""

    def __init__(self) -> None:
        self.server = socket.create_server(("", 0))

    def port(self) -> int:
        return int(self.server.getsockname()[1])


def out_of_reach(ports: Mapping[str, int]) -> list[str]:
    """Those of these nodes, given with a port, to which this node cannot connect."""
    missed = []
    for node, port in ports.items():
        try:
            socket.create_connection((node, port), timeout=REACH_SECONDS).close()
        except OSError:
            missed.append(node)
    return missed


def who_reaches_whom(seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """{address of a node: those that it cannot reach, or the exception}."""
    listeners = {}
    for address, node in _living().items():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        listeners[address] = ray.remote(num_cpus=0, scheduling_strategy=there)(Listener).remote()
    asked = {node: listener.port.remote() for node, listener in listeners.items()}
    answers = _answers(asked, seconds)
    ports = {node: port for node, port in answers.items() if isinstance(port, int)}
    return on_every_node(out_of_reach, ports, seconds=seconds)


def state() -> str:
    """Return a hash of the code of this package.

    Raises:
        RuntimeError: verl, which is imported before this module, has not loaded the plugin.
    """
    if "verl_gdpo.plugin" not in sys.modules:
        raise RuntimeError("VERL_USE_EXTERNAL_PLUGINS does not include verl_gdpo there")
    root, whole = Path(verl_gdpo.__path__[0]), hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        whole.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return whole.hexdigest()[:12]


def refuse_other_states() -> None:
    """Compare the package on all nodes with that of this process; one node alone is not asked.

    Raises:
        RuntimeError: names the nodes that have another state of it, or cannot answer.
    """
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return
    ours, wrong = state(), []
    for node, answer in sorted(on_every_node(state).items()):
        if isinstance(answer, Exception):
            wrong.append(f"{node}: {str(answer).strip().splitlines()[-1]}")
        elif answer != ours:
            wrong.append(f"{node}: its files are {answer}")
    if wrong:
        raise RuntimeError(
            "verl-gdpo is not the same on all nodes of the Ray cluster; its files are "
            f"{ours} here. {'; '.join(wrong)}. Install one state of verl-gdpo "
            f"{verl_gdpo.__version__} on every node"
        )


def probing(task_runner_class: Any) -> Any:
    """Return a stand-in for a class of Ray, which first calls `refuse_other_states`."""

    def method(name: str) -> Callable[..., Any]:
        def probe_and_call(*args: Any, **kwargs: Any) -> Any:
            refuse_other_states()
            return getattr(task_runner_class, name)(*args, **kwargs)

        return probe_and_call

    return SimpleNamespace(remote=method("remote"), options=method("options"))
