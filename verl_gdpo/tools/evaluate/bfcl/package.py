"""The package `bfcl-eval`: an environment of its own, and the process there that asks it.

The package asks for numpy 1.26 and for the clients of many providers, so it stands apart from verl.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from shutil import rmtree
from typing import Any

from verl_gdpo.tasks.sandbox import lock
from verl_gdpo.terminal import note
from verl_gdpo.tools.run.processes import locked

PINS = Path(__file__).with_name("requirements.txt")
WORKER = Path(__file__).with_name("worker.py")
# This file in an environment is written last.
WHOLE = "is_whole"

_turn = threading.Lock()


def ask(category: str, task: str, *arguments: Any) -> list[Any]:
    """Return [what a function of worker.py returns], or [] if that needs too much.

    Args:
        category: of the question; dialogues have a process of their own, which is small.
        task: name of the function.

    Raises:
        ValueError, OSError: there is no environment, or no process in it.
    """
    try:
        request = json.dumps([task, *arguments])
    except RecursionError:
        # What a policy wrote is nested too deep.
        return []
    with _turn:
        process = _process(category.startswith("multi_turn"))
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request + "\n")
            process.stdin.flush()
        reply = process.stdout.readline()
    if not reply:
        raise OSError(
            f"bfcl_v3: the process of bfcl-eval has ended with {process.wait()}; expected a reply. "
            "The lines above say why"
        )
    return list(json.loads(reply))


@functools.cache
def _process(of_dialogues: bool) -> "subprocess.Popen[str]":
    """Return the process that has imported the package; it ends with this one.

    Raises:
        ValueError, OSError: there is no environment, or no process in it.
    """
    process = subprocess.Popen(
        [environment() / "bin" / "python", "-I", "-W", "ignore", WORKER, lock.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="ascii",
        env={},  # none of the user's keys
        start_new_session=True,  # Ctrl-C is for this process
    )
    atexit.register(process.communicate)
    assert process.stdout is not None
    trouble = process.stdout.readline()
    if trouble != '""\n':
        raise OSError(f"bfcl_v3: bfcl-eval cannot be asked: {trouble.strip() or 'see above'}")
    return process


def environment() -> Path:
    """Return the folder of the package's environment, made where it is missing.

    Raises:
        ValueError: it cannot be made.
    """
    content = PINS.read_bytes() + sys.version.encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-gdpo"
    folder = cache / f"bfcl-{hashlib.sha256(content).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{folder}.lock"), str(folder), wait=True):
        if not (folder / WHOLE).exists():
            note(f"making {folder} for bfcl-eval: 600 MB, minutes, once")
            rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", folder)
            install = ("-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps")
            _run(folder / "bin" / "python", *install, "--requirement", PINS)
            (folder / WHOLE).touch()
    return folder


def _run(*command: str | Path) -> None:
    """Run a command; raise ValueError if it fails."""
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        raise ValueError(
            f"bfcl_v3: {' '.join(map(str, command))} failed, for the reason above. pip needs a "
            "package index: set PIP_INDEX_URL or HTTPS_PROXY, and start again"
        )
