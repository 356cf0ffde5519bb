"""Runs code as a new process of Python that imports verl in half the time.

It is forked from a process that has imported what verl imports, but not verl, which reads the
environment while it is imported.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys

LIMIT_SECONDS = 300
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("datasets", "hydra", "peft", "tensordict", "torch.distributed.fsdp"),
        *("torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2"),
    ]
)


def run_code(code, environment, folder):
    """The completed process. Its script and its output are in `folder`."""
    (folder / "script.py").write_text(code)
    process = FORKED.Process(target=become, args=(folder, environment))
    process.start()
    process.join(LIMIT_SECONDS)
    process.kill()
    process.join()
    output = [(folder / stream).read_text() for stream in ("stdout", "stderr")]
    return subprocess.CompletedProcess(code, process.exitcode, *output)


def become(folder, environment):
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = str(folder)
    sys.argv = [str(folder / "script.py")]
    runpy.run_path(sys.argv[0], run_name="__main__")
