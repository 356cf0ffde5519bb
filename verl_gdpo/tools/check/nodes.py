"""What every node of a running Ray cluster has for a run on it: a table with a line a node.

Ray starts a process on each node, and this process says what it sees. So a node is seen with the
environment that the run's own processes will have there.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.run.starts import versions
from verl_gdpo.settings.of_run import uses_gdpo_manager
from verl_gdpo.terminal import render
from verl_gdpo.tools.check import gpus
from verl_gdpo.tools.check.machine import named_cluster

HEADER = (
    *("node", "GPUs", "driver", "capability", "GB of a GPU", "of the host", "in /dev/shm"),
    *("model", "files"),
)


def look(model: str, folder: str, disk_gb: float, on_gpus: bool) -> dict[str, Any]:
    """What this node has; for a process of Ray on it.

    Args:
        model: `actor_rollout_ref.model.path`.
        folder: of the checkpoints, where `disk_gb` have to be free.
        on_gpus: whether GPUs are needed.
    """
    from verl_gdpo.verl_hooks.nodes import state

    found, problems = [], []
    try:
        if on_gpus:
            found = gpus.find_gpus({})  # Ray hides them from a process that asks for none
            is_new = all(int(gpu.driver.split(".")[0]) >= gpus.LEAST_DRIVER for gpu in found)
            there = gpus.first_that_exists(Path(folder))
            problems = gpus.missing(found, there, disk_gb, cuda_runs=is_new or _cuda_runs())
    except ValueError as error:
        problems = [str(error)]
    is_folder = Path(model).expanduser().is_dir()
    memory_gb, shared_gb = gpus.host_now()
    return {
        "gpus": [(gpu.name, gpu.memory_mib * 2**20 / 1e9) for gpu in found],
        "drivers": sorted({gpu.driver for gpu in found}),
        "capabilities": sorted({".".join(map(str, gpu.capability)) for gpu in found}),
        "problems": problems,
        "memory_gb": memory_gb,
        "shared_gb": shared_gb,
        "model": is_folder or gpus.cached_config(model) is not None,
        "files": state(),
        "versions": versions(),
    }


def _cuda_runs() -> bool:
    """Whether torch finds a GPU all the same, as with CUDA's packages for older drivers."""
    visible = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], env=visible).returncode == 0


def cluster_to_ask(config: Any) -> str:
    """The address of the cluster that a run of ours on several nodes would join; "" for none."""
    is_ours = config.algorithm.adv_estimator == "gdpo" or uses_gdpo_manager(config)
    return named_cluster(config)[1] if is_ours and config.trainer.nnodes > 1 else ""


def ask_nodes(config: Any, address: str) -> tuple[str, list[str]]:
    """Ask all nodes of this cluster; return a table, and a sentence for each problem.

    Raises:
        ConnectionError: there is no such cluster, or none from here.
    """
    from verl_gdpo.verl_hooks import nodes

    path, on_gpus = str(config.actor_rollout_ref.model.path), config.trainer.device == "cuda"
    shape, disk_gb = gpus.shape_and_disk_gb(config) if on_gpus else (None, gpus.LEAST_DISK_GB)
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    with nodes.joined(address, variables) as counted:
        folder = str(Path(str(config.trainer.default_local_dir)).resolve())
        answers = nodes.on_every_node(look, path, folder, disk_gb, on_gpus)
        missed = nodes.who_reaches_whom()
    here = {"files": nodes.state(), "versions": versions()}
    wanted, problems = config.trainer.nnodes, []
    if len(answers) < wanted:
        problems.append(f"trainer.nnodes={wanted}, but {len(answers)} nodes are alive")
    for node, answer in sorted(answers.items()):
        if isinstance(answer, Exception):
            found = [str(answer).strip().splitlines()[-1]]
        else:
            found = [*answer["problems"], *differences(answer, here)]
            found += _too_small(config, shape, answer, counted[node]) if on_gpus else []
            if not answer["model"]:
                found.append(f"{path} is neither a folder there nor in the cache of its hub")
        if isinstance(missed.get(node), list) and missed[node]:
            found.append(f"no connection to a port of {', '.join(missed[node])}")
        problems += [f"{node}: {problem}" for problem in found]
    return render(HEADER, [_row(*pair) for pair in sorted(answers.items())]), problems


def differences(answer: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What a node has in another state than this process."""
    found = []
    if answer["files"] != here["files"]:
        found.append(f"the files of verl-gdpo are {answer['files']}, and {here['files']} here")
    old, new = here["versions"], answer["versions"]
    return found + [
        f"{name} {new.get(name, 'is not there')}, and {old.get(name, 'none')} here"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _too_small(
    config: Any, shape: gpus.ModelShape | None, answer: Mapping[str, Any], counted: float
) -> list[str]:
    wanted, count = config.trainer.n_gpus_per_node, len(answer["gpus"])
    if min(count, counted) < wanted:
        return [f"{count} GPUs, and {counted:.0f} for Ray; trainer.n_gpus_per_node={wanted}"]
    gpu_gb = min(gb for _, gb in answer["gpus"])
    return gpus.too_small(shape, config, gpu_gb, answer["memory_gb"], answer["shared_gb"])


def _row(node: str, answer: Any) -> list[str]:
    if isinstance(answer, Exception):
        return [node, "no answer", *[""] * (len(HEADER) - 2)]
    names = sorted({name for name, _ in answer["gpus"]})
    return [
        *(node, " ".join([str(len(answer["gpus"])), *names])),
        *(" ".join(answer["drivers"]), " ".join(answer["capabilities"])),
        " ".join(sorted({f"{gb:.0f}" for _, gb in answer["gpus"]})),
        *(f"{answer['memory_gb']:.0f}", f"{answer['shared_gb']:.1f}"),
        *("yes" if answer["model"] else "no", answer["files"]),
    ]
