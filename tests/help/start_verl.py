"""Starts verl's own `main_ppo` with our recipe without a GPU, and reads the files of the run."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ray_session import ray_folder
from repository import REPO

from verl_gdpo.tools.run.launch import launch
from verl_gdpo.tools.run.resume import quoted
from verl_gdpo.tools.run_folder.folder import read_metrics

TIME_LIMIT_SECONDS = 480
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Run:
    folder: Path
    exit_code: int
    output: str

    def steps(self):
        return read_metrics(self.folder)

    def dump(self, step):
        """The rows of one step's dump."""
        text = (self.folder / "rollouts" / f"{step}.jsonl").read_text()
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def samples(self, step):
        """The rows of one step's dump that are no padding."""
        return [row for row in self.dump(step) if not row["is_padding"]]

    def last_lines(self, count=40):
        return "\n".join(self.output.splitlines()[-count:])


def run_verl(folder, overrides, main="verl.trainer.main_ppo", **env):
    """Run a main module of verl to its end; what it prints in this start is the `output`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    seen = log.stat().st_size if log.exists() else 0
    with ray_folder() as ray_dir:
        end = launch(
            verl_command(folder, ray_dir, overrides, main),
            folder,
            env={**ENVIRONMENT, **env},
            time_limit=TIME_LIMIT_SECONDS,
            quiet=True,
        )
    output = log.read_bytes()[seen:].decode(errors="replace")
    return Run(folder, end.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", output))


def verl_command(folder, ray_dir, overrides, main="verl.trainer.main_ppo"):
    return [
        *(sys.executable, "-m", main),
        *("--config-dir", str(REPO / "recipes"), "--config-name", "train", "hardware=cpu"),
        f"run_dir={quoted(str(folder))}",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        "algorithm.rollout_correction.bypass_mode=false",  # as on GPUs, not as in tool_rl-cpu
        *overrides,
    ]
