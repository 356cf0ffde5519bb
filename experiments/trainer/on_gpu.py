"""One training of Qwen2.5-1.5B on GPUs, with the paper's recipe; nobody has run this."""

import subprocess
import time
from pathlib import Path

from experiments.trainer import results
from experiments.trainer.on_cpu import Interrupted
from experiments.trainer.results import Failure, Result
from experiments.trainer.settings import REPO, Run, fingerprint, overrides, weights
from verl_gdpo.run.folder import read_versions

TIME_LIMIT_SECONDS = 86_400


def train(run: Run, work: Path) -> Result | Failure:
    """Train once; the script prints its progress.

    Raises:
        Interrupted: by a signal.
    """
    folder = work / "runs" / f"{run}_{len([*work.glob(f'runs/{run}_*')]) + 1}"
    start = time.monotonic()
    code = subprocess.call(command(run, folder))
    seconds = round(time.monotonic() - start, 1)
    if code > 128:
        raise Interrupted(f"{run}: a signal ended it (exit code {code}), so it has no result")
    if code:
        return Failure(fingerprint(run), f"exit code {code}; see {folder}/train.log", seconds)
    try:
        small, large = results.curves(folder)
    except ValueError as error:
        return Failure(fingerprint(run), str(error), seconds)
    return Result(fingerprint(run), tuple(small), tuple(large), {}, seconds, read_versions(folder))


def command(run: Run, folder: Path) -> list[str]:
    """The script that installs what is missing, downloads data and model, and trains."""
    return [
        *(str(REPO / "run_tool_rl.sh"), "--time-limit", str(TIME_LIMIT_SECONDS)),
        *overrides(run),
        *weights(run, []),
        f"seed={run.seed}",
        f"run_dir={folder}",
    ]
