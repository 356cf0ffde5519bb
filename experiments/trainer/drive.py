"""Runs what is missing, one training after the other."""

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from experiments.trainer import results
from experiments.trainer.policy import make_policy, start_rates
from experiments.trainer.results import Failure, Result
from experiments.trainer.settings import (
    OWN_RECIPES,
    REPO,
    SETTINGS,
    Run,
    fingerprint,
    overrides,
    weights,
)
from experiments.trainer.task import Row, make_rows
from verl_gdpo.run.folder import read_versions
from verl_gdpo.run.launch import failure_report, launch
from verl_gdpo.run.lock import BusyError, locked

TIME_LIMIT_SECONDS = 600.0
MAX_TRIES = 2
GUESS_SECONDS = 150.0  # of a run, before one has finished
STOP = "stop"  # a file of this name in the work folder ends the driver between two runs
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would let other work of the machine slow the run
}


class Interrupted(Exception):
    """A signal ended the training; the run has no result and did not fail."""


def drive(runs: Sequence[Run], work: Path, data: Path) -> None:
    """Train what has no result yet, in this order, until all have one or the file `stop` appears.

    A second process with the same folders takes the runs that the first one does not have.

    Raises:
        ValueError: `data` has results of another configuration.
        Interrupted: by a signal.
    """
    results.check_fingerprints(runs, data)
    work.mkdir(parents=True, exist_ok=True)
    took: list[float] = []
    for run in runs:
        if (work / STOP).exists():
            _say(f"{work / STOP} is there; {_missing(runs, data)} runs are left")
            return
        if not is_due(run, data):
            continue
        left = _missing(runs, data)
        minutes = left * (fmean(took) if took else GUESS_SECONDS) / 60
        _say(f"{run}: started; {left} runs left, about {minutes:.0f} min")
        start = time.monotonic()
        try:
            with locked(_made(work / "runs") / f"{run}.lock", str(run)):
                if is_due(run, data):
                    results.write(run, found := train(run, work), data)
                    _say(f"{run}: {_summary(found)}")
        except BusyError:
            _say(f"{run}: another process has it")
            continue
        took.append(time.monotonic() - start)


def is_due(run: Run, data: Path) -> bool:
    return results.read(run, data) is None and len(results.failures(run, data)) < MAX_TRIES


def _missing(runs: Iterable[Run], data: Path) -> int:
    return sum(is_due(run, data) for run in runs)


def _summary(found: Result | Failure) -> str:
    if isinstance(found, Failure):
        return f"failed after {found.seconds:.0f} s: {found.reason}"
    small, large = fmean(found.small), fmean(found.large)
    return f"small {small:.3f}, large {large:.3f}, {found.seconds:.0f} s"


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def train(run: Run, work: Path) -> Result | Failure:
    """Train once, in a folder of its own."""
    inputs, rows = prepare(run, work)
    tries = len([*work.glob(f"runs/{run}_*")])
    folder = work / "runs" / f"{run}_{tries + 1}"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vg", dir="/tmp") as ray_folder:  # sockets, short paths
        code = launch(
            command(run, rows, inputs, folder, ray_folder),
            folder,
            env=ENVIRONMENT,
            time_limit=TIME_LIMIT_SECONDS,
            quiet=True,
        )
    seconds = round(time.monotonic() - start, 1)
    if code > 128:
        raise Interrupted(f"{run}: a signal ended it (exit code {code}); it has no result")
    if code:
        reason = f"exit code {code}: {failure_report(folder).splitlines()[0]}"
        return Failure(fingerprint(run), reason, seconds)
    try:
        small, large = results.curves(folder)
    except ValueError as error:
        return Failure(fingerprint(run), str(error), seconds)
    start_of = start_rates(inputs / "policy", rows) if rows else {}
    return Result(
        fingerprint(run), tuple(small), tuple(large), start_of, seconds, read_versions(folder)
    )


def command(
    run: Run, rows: Sequence[Row], inputs: Path, folder: Path, ray_folder: str
) -> list[str]:
    """The command line of verl's own trainer."""
    own = (
        []
        if SETTINGS[run.setting].recipe == "tool_rl"
        else [f"reward.custom_reward_function.path={Path(__file__).with_name('task.py')}"]
    )
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(REPO / "recipes"), "--config-name", "train"),
        f"hydra.searchpath=[file://{OWN_RECIPES}]",
        *overrides(run),
        *weights(run, rows),
        *own,
        f"seed={run.seed}",
        f"run_dir={folder}",
        f"data_dir={inputs}",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]


def prepare(run: Run, work: Path) -> tuple[Path, list[Row]]:
    """Make rows and policy, which all arms of a seed share, or find them; ToolRL's have no rows."""
    setting = SETTINGS[run.setting]
    if setting.recipe == "tool_rl":
        return _prepare_tool_rl(work), []
    rows = make_rows(run.seed, own_format=setting.own_format)
    folder = work / "inputs" / f"{'own' if setting.own_format else 'shared'}_format-{run.seed}"
    with locked(_made(folder) / "lock", str(folder), wait=True):
        # the rows are written last, so that they say that the policy is complete
        if not (folder / "train.parquet").exists():
            import pyarrow as pa
            import pyarrow.parquet as pq

            from verl_gdpo.data_prep.schema import SCHEMA

            make_policy(folder / "policy", rows, run.seed)
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "train.parquet")
    return folder, rows


def _prepare_tool_rl(work: Path) -> Path:
    """Write the rows and copy the policy of the run without a GPU that the README shows."""
    from verl_gdpo.cpu.warm_start import make_policy as copy_policy
    from verl_gdpo.tools import data

    folder = _made(work / "inputs")
    with locked(folder / "tool_rl.lock", "ToolRL's rows", wait=True):
        rows = str(folder / "tool_rl_tiny")
        options = ["--synthetic", "--size", "tiny", "--if-needed"]
        if data.main(["tool_rl", *options, "--out", rows]):
            raise OSError(f"{rows}: the rows could not be made; the reason is above")
        copy_policy(folder / "tool_rl_policy")
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
