"""One training of Qwen2.5-1.5B on GPUs, with the paper's recipe; nobody has run this."""

import subprocess
import time
from pathlib import Path

from workshop.experiments.trainer import results
from workshop.experiments.trainer.results import Failure, Result
from workshop.experiments.trainer.settings import REPO, Run, overrides, weights

TIME_LIMIT_SECONDS = 86_400


def train(run: Run, work: Path) -> Result | Failure:
    """Train once; the script prints its progress.

    Raises:
        Interrupted: by a signal.
    """
    folder = results.new_folder(run, work)
    start = time.monotonic()
    code = subprocess.call(command(run, folder))
    seconds = round(time.monotonic() - start, 1)
    return results.of_ended(run, folder, code, lambda: f"; see {folder}/train.log", seconds)


def command(run: Run, folder: Path) -> list[str]:
    """The script that installs what is missing, downloads data and model, and trains."""
    return [
        *(str(REPO / "run_tool_rl.sh"), "--time-limit", str(TIME_LIMIT_SECONDS)),
        *overrides(run),
        *weights(run, []),
        f"seed={run.seed}",
        f"run_dir={folder}",
    ]
