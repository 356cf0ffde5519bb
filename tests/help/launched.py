"""Starts the launcher on drivers that are made up, for tests/tools/run/."""

import json
import subprocess
import sys

from processes import is_alive, wait_for

# a driver that starts a child in a session of its own, one whose environment cannot be read, as
# that of Ray's agents, who write their title over it, and one with neither; then it does `{body}`
DRIVER = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [
    subprocess.Popen(sleep, start_new_session=True),
    subprocess.Popen(sleep, env={{}}),
    subprocess.Popen(["env", "-i", "setsid", *sleep]),
]
open("{folder}/new", "w").write(" ".join(str(child.pid) for child in children))
os.rename("{folder}/new", "{folder}/children")
{body}
"""


def driver(folder, body):
    return [sys.executable, "-c", DRIVER.format(folder=folder, body=body)]


def children_of(folder):
    """Those of the driver that are alive."""
    pids = [int(pid) for pid in (folder / "children").read_text().split()]
    return [pid for pid in pids if is_alive(pid)]


LAUNCHER = ["-m", "verl_gdpo", "run"]
# the launcher, whose limits are as good as none
IMPATIENT = """
import sys
from verl_gdpo.tools.run import stop_conditions
from verl_gdpo.tools.run import launch
stop_conditions.FIRST_SECONDS = 0.5
sys.exit(launch.main(sys.argv[1:]))
"""


def launcher(folder, *arguments):
    """The command of the launcher; the arguments end with the driver's command."""
    return [sys.executable, *LAUNCHER, "--run-dir", str(folder), *arguments]


def start(folder, body="time.sleep(600)", before=(), command=None, **streams):
    """The launcher as a process, with the driver's children started."""
    folder.mkdir(exist_ok=True)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
    words = [*before, *launcher(folder, "--", *(command or driver(folder, body)))]
    process = subprocess.Popen(words, **streams)
    wait_for(lambda: (folder / "children").exists())
    return process


def errors_of(folder, body, **options):
    """(exit code, stderr) of a launcher whose driver ends by itself."""
    process = start(folder, body, stderr=subprocess.PIPE, **options)
    errors = process.communicate(timeout=60)[1].decode()
    return process.returncode, errors


def step_line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def logging_driver(folder, *lines):
    """A driver that logs these lines and ends well."""
    text = "".join(lines)
    return driver(
        folder,
        f"open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({text!r}); time.sleep(.5); "
        f"open('{folder}/ended', 'w'); sys.exit(0)",
    )


def with_steps(folder, *steps, saved):
    (folder / "metrics").mkdir()
    (folder / "metrics" / "1.jsonl").write_text("".join(map(step_line, steps)))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(saved))
