"""Asks the nodes of a Ray cluster, and refuses one that cannot run this package as the others do.

Relies on Ray 2: `ray.nodes`, `NodeAffinitySchedulingStrategy`, and `max_calls`, after which the
process of a task ends. Relies on verl 0.9: `run_ppo` makes the trainer's process by
`task_runner_class.remote()`, or by its `options`, once Ray runs.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import verl  # noqa: F401 - it loads the plugin, also where a node is asked
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_gdpo

# an answer imports verl, which takes minutes from a slow shared disk
ANSWER_SECONDS = 300.0


def state() -> str:
    """Return a hash of the code of this package.

    Raises:
        RuntimeError: verl, which this module imports, has not loaded the plugin.
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
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    ours = state()
    questions = {node["NodeManagerAddress"]: _asked(node["NodeID"], state) for node in nodes}
    ray.wait([*questions.values()], num_returns=len(nodes), timeout=ANSWER_SECONDS)
    answers = {address: _answer(question) for address, question in sorted(questions.items())}
    if wrong := [f"{node}: {answer}" for node, answer in answers.items() if answer != ours]:
        raise RuntimeError(
            f"verl-gdpo is not the same on all nodes of the Ray cluster: its files are {ours} "
            f"here. {'; '.join(wrong)}. Install one state of verl-gdpo {verl_gdpo.__version__} on "
            "every node"
        )


def _asked(node_id: str, function: Callable[[], str]) -> Any:
    """Call a function on a node, in a process that ends after it."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=there)
    return options(function).remote()


def _answer(question: Any) -> str:
    """Return the state that a node has told, or why it has not."""
    try:
        return str(ray.get(question, timeout=0))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(question, force=True)
        return f"no answer within {ANSWER_SECONDS:.0f} s"
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]


def probing(task_runner_class: Any) -> Any:
    """Return a stand-in for a class of Ray, which first calls `refuse_other_states`."""

    def method(name: str) -> Callable[..., Any]:
        def probe_and_call(*args: Any, **kwargs: Any) -> Any:
            refuse_other_states()
            return getattr(task_runner_class, name)(*args, **kwargs)

        return probe_and_call

    return SimpleNamespace(remote=method("remote"), options=method("options"))
