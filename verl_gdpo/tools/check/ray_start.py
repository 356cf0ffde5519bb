"""What Ray needs of this machine, and which cluster a run would join."""

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

LONGEST_SOCKET = 107  # bytes of a path, of Linux
# what Ray 2.60 puts after its folder
SESSION = "/session_2026-01-01_00-00-00_000000_{}/sockets/plasma_store"
SIGNS = re.compile(r"""[\s\\'"`$&;|<>(){}*?\[\]]""")  # of a shell; those of setup_env.sh
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "object_store_memory")


def what_ray_refuses(config: Any) -> list[str]:
    """A sentence for each reason for which Ray would not start here, or only log why.

    Relies on Ray 2.60: `RayParams` ("temp_dir must not be child directory of virtualenv root"),
    `validate_socket_filepath`, `get_default_ray_temp_dir`, and `ray.init` with an address.
    """
    options = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    key, address = named_cluster(config)
    fixed = {
        f"ray_kwargs.ray_init.{name}": options[name]
        for name in OF_A_NEW_CLUSTER
        if options.get(name) is not None
    }
    limits = " ".join(f"{name}={value}" for name, value in fixed.items())
    unset = " ".join(f"{name}=null" for name in fixed)
    folder = ray_folder(config)
    inside = folder.resolve().is_relative_to(Path(sys.prefix).resolve())
    longest = f"{folder}{SESSION.format(os.getpid())}"
    table = [
        (
            limits and address,
            f"{key}={address} with {limits}: the run would join that cluster, for which Ray does "
            f"not let it set this. Unset {key}, or set {unset}",
        ),
        (
            sys.prefix != sys.base_prefix and inside,
            f"TMPDIR={folder.parent} is inside the virtual environment {sys.prefix}, where Ray "
            "starts no worker. Set TMPDIR=/tmp",
        ),
        (
            SIGNS.search(sys.executable),
            f"Ray starts no worker with {sys.executable}: a shell gets this path without quotes. "
            "Take a Python whose path has no space, quote or such sign, as ./setup_env.sh does",
        ),
        (
            len(longest.encode()) > LONGEST_SOCKET,
            f"{folder}: this folder of Ray is too long by "
            f"{len(longest.encode()) - LONGEST_SOCKET} bytes, because the path of a socket in it "
            f"may have {LONGEST_SOCKET}. Set TMPDIR=/tmp, or RAY_TMPDIR to a short folder",
        ),
        (
            not _has_loopback(),
            "127.0.0.1 cannot be used on this machine, and Ray's processes talk over it. In a "
            "network namespace: ip link set lo up",
        ),
    ]
    return [text for is_refused, text in table if is_refused]


def named_cluster(config: Any) -> tuple[str, str]:
    """The cluster that a run would join, behind the key or variable that names it; "" for none."""
    key = "ray_kwargs.ray_init.address"
    address = OmegaConf.select(config, key)
    if address in (None, "auto"):
        key, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS")
    return key, "" if address in (None, "local") else str(address)


def other_nodes(config: Any) -> str:
    """The address of the cluster that a run on several nodes would join; "" for none."""
    return named_cluster(config)[1] if config.trainer.nnodes > 1 else ""


def ray_folder(config: Any) -> Path:
    folder = OmegaConf.select(config, "ray_kwargs.ray_init._temp_dir")
    around = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder or f"{around}/ray")


def _has_loopback() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:  # in a network namespace whose `lo` is down, only connecting fails
        return False
    return True
