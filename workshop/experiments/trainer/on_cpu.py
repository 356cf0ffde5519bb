"""One training with verl's own trainer, without a GPU."""

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from verl_gdpo.run.console import failure_report
from verl_gdpo.run.launch import launch
from verl_gdpo.run.processes import locked
from verl_gdpo.run.resume_command import quoted
from workshop.experiments.trainer import results
from workshop.experiments.trainer.inputs import make_inputs, write_rows
from workshop.experiments.trainer.policy import make_policy, start_rates
from workshop.experiments.trainer.results import Failure, Result
from workshop.experiments.trainer.settings import (
    OWN_RECIPES,
    REPO,
    SETTINGS,
    Run,
    overrides,
    weights,
)
from workshop.experiments.trainer.task import Row, make_rows
from workshop.tiny_policy.train import SHIPPED

TIME_LIMIT_SECONDS = 1200.0  # of 30 steps
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would let other work of the machine slow the run
}


def train(run: Run, work: Path) -> Result | Failure:
    """Train once, in a new folder inside of `work`.

    Raises:
        Interrupted: by a signal.
    """
    inputs, rows = prepare(run, work)
    folder = results.new_folder(run, work)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vg", dir="/tmp") as ray_folder:  # sockets, short paths
        end = launch(
            command(run, rows, inputs, folder, ray_folder),
            folder,
            env=ENVIRONMENT,
            time_limit=TIME_LIMIT_SECONDS * SETTINGS[run.setting].steps / 30,
            quiet=True,
        )
    seconds = round(time.monotonic() - start, 1)

    def why() -> str:
        return f": {failure_report(folder).splitlines()[0]}"

    found = results.of_ended(run, folder, end.exit_code, why, seconds)
    if isinstance(found, Failure):
        return found
    found = replace(found, inputs=hash_of(inputs))
    return replace(found, start=start_rates(inputs / "policy", rows)) if rows else found


def command(
    run: Run, rows: Sequence[Row], inputs: Path, folder: Path, ray_folder: str
) -> list[str]:
    """The command line of verl's own trainer."""
    scorer = Path(__file__).with_name("task.py")
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(REPO / "recipes"), "--config-name", "train"),
        f"hydra.searchpath=[{quoted(f'file://{OWN_RECIPES}')}]",
        *overrides(run),
        *weights(run, rows),
        *([f"reward.custom_reward_function.path={quoted(str(scorer))}"] if rows else []),
        f"seed={run.seed}",
        f"run_dir={quoted(str(folder))}",
        f"data_dir={quoted(str(inputs))}",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]


def prepare(run: Run, work: Path) -> tuple[Path, list[Row]]:
    """Make rows and policy, or find them: all arms of a seed have the same.

    Returns:
        Their folder, and the rows of the experiment's own task; none for a task of recipes/.
    """
    setting = SETTINGS[run.setting]
    if setting.recipe == "tool_rl" and setting.edition == 1:
        return _prepare_tool_rl(work), []
    is_own = setting.recipe == "facts"
    rows = make_rows(run.seed, own_format=setting.own_format) if is_own else []
    name = f"{'own' if setting.own_format else 'shared'}_format" if is_own else setting.recipe
    folder = work / "inputs" / f"{name}-{run.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock", str(folder), wait=True):
        if not (folder / "complete").exists():
            if is_own:
                make_policy(folder / "policy", rows, run.seed)
                write_rows(rows, folder)
            else:
                make_inputs(setting.recipe, folder, run.seed)
            (folder / "complete").touch()
    return folder, rows


def hash_of(inputs: Path) -> str:
    """Of the rows that are trained on, and of the starting policy."""
    digest = sha256()
    for file in (*inputs.rglob("train.parquet"), *inputs.rglob("model.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _prepare_tool_rl(work: Path) -> Path:
    """Write the rows and copy the policy of the run without a GPU that the README shows."""
    from verl_gdpo.tools import data

    folder = work / "inputs" / "tool_rl"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock", "ToolRL's rows", wait=True):
        rows = str(folder / "tool_rl_tiny")
        options = ["--synthetic", "--if-needed"]
        if data.main(["tool_rl", *options, "--out", rows]):
            raise OSError(f"{rows}: the rows could not be made; the reason is above")
        shutil.copytree(SHIPPED, folder / "tool_rl_policy", dirs_exist_ok=True)
    return folder
