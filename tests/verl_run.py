"""Starts verl's own `main_ppo` on the no-GPU engine, and reads what it left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TIME_LIMIT_SECONDS = 480
MARK = "VERL_GDPO_TEST_RUN"  # in the environment of every process that a run starts

# what verl needs to run on a CPU; see verl_gdpo/cpu
CPU_OVERRIDES = """
trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.name=hf
actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.agent.num_workers=1
reward.num_workers=1
data.dataloader_num_workers=0
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=10000
ray_kwargs.ray_init.num_cpus=16
+ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.object_store_memory=500000000
""".split()


@dataclass(frozen=True)
class Run:
    folder: Path
    returncode: int
    output: str

    def steps(self):
        """{step: metrics}, from verl's file logger."""
        files = list(self.folder.glob("**/log.jsonl")) or list(self.folder.glob("logs/**/*.jsonl"))
        assert len(files) == 1, files
        lines = map(json.loads, files[0].read_text().splitlines())
        return {line["step"]: line["data"] for line in lines}

    def dump(self, step):
        """The rows of one step's rollout dump."""
        text = (self.folder / "rollouts" / f"{step}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def last_lines(self, count=40):
        return "\n".join(self.output.splitlines()[-count:])


def run_verl(folder, overrides, **env):
    """Run `main_ppo` in `folder` to its end, and end every process that it started."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    ray_dir = tempfile.mkdtemp(prefix="vg", dir="/tmp")  # Ray's sockets need short paths
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *CPU_OVERRIDES,
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        "trainer.logger=[console,file]",
        "trainer.project_name=test",
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        *overrides,
    ]
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_ROOT": f"{folder}/logs",
        MARK: mark,
        **env,
    }
    with open(folder / "output.txt", "w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            process.wait(TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            end_processes(mark)
            shutil.rmtree(ray_dir, ignore_errors=True)
    output = (folder / "output.txt").read_text(errors="replace")
    return Run(folder, process.returncode, re.sub(r"\x1b\[[0-9;]*m", "", output))


def end_processes(mark):
    """Ray's processes outlive the driver; end those that carry this run's mark."""
    deadline = time.monotonic() + 15
    while (alive := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.2)
    assert not alive, f"processes outlived SIGKILL: {alive}"


def marked_processes(mark):
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found
