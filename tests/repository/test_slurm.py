"""The file for Slurm, with stand-ins for Slurm and Python; docs/cluster.md says where it ran."""

import os
import re
import subprocess

from composed_recipes import composed
from executable import program
from pages import PAGES
from repository import REPO
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

FILE = REPO / "examples" / "slurm" / "train.slurm"
STAND_INS = {
    # the options of srun come before the command
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo n1; echo n2",
    "ip": 'echo "2: $6    inet 10.0.0.7/24 scope global $6"',
    # one write a call, since the nodes start side by side; who waits for a node waits for its call
    "python": """
printf '%s\\n' "$(echo "$*" | tr '\\n' ' ')" >>"$CALLS"
case "$*" in
  *"ray.nodes"*)
    nodes=$*; nodes=${nodes##*< }; nodes=${nodes%%:*}
    until [ "$(grep -c ' start --block ' "$CALLS")" -ge "$nodes" ]; do sleep .02; done ;;
  *token_hex*) echo 0123 ;;
  *recipes) echo /recipes ;;
  *"verl_gdpo run "*)
    if [[ $* == *task=endless* ]]; then
      trap 'echo signalled >>"$CALLS"; exit 143' TERM
      kill -TERM "$JOB"
      while :; do sleep .05; done
    fi
    exit 7 ;;
esac
""",
}


def run(tmp_path, *arguments):
    folder = tmp_path / "bin"
    for name, text in STAND_INS.items():
        program(folder / name, f"#!/bin/bash\n{text}\n")
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_PER_NODE": "h100:8",
        "NETWORK_INTERFACE": "ib0",
    }
    done = subprocess.run(
        ["bash", "-c", 'JOB=$$ exec bash "$0" "$@"', FILE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    return done, calls


def test_a_job_starts_ray_everywhere_and_the_launcher_once(tmp_path):
    done, calls = run(tmp_path, "task=gsm8k", "run_dir=/shared/first")
    assert done.returncode == 7, done.stderr  # the launcher's
    starts = [call for call in calls if " start --block " in call]
    assert all("--num-cpus=64 --num-gpus=8 " in call for call in starts)
    assert "--head --port=6379 --node-ip-address=10.0.0.7 " in starts[0]
    assert "--address=10.0.0.7:6379 --node-ip-address=10.0.0.7" in starts[1]
    config = "--config-dir /recipes --config-name train task=gsm8k run_dir=/shared/first"
    (launched,) = [call for call in calls if "verl_gdpo run " in call]
    assert launched.startswith("-m verl_gdpo run --check --run-dir /shared/first -- ")
    joined = "trainer.nnodes=2 +ray_kwargs.ray_init.address=10.0.0.7:6379"
    assert launched.endswith(f"-m verl.trainer.main_ppo {config} {joined} ")
    composes(config.split()[4:] + joined.split())


def test_the_launcher_gets_the_signal_of_the_job(tmp_path):
    done, calls = run(tmp_path, "task=endless", "run_dir=/shared/first")
    assert calls[-1] == "signalled"
    assert done.returncode == 143


def composes(overrides):
    config = composed(*(one for one in overrides if not one.startswith("run_dir=")))
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.trainer.nnodes == 2
    assert config.ray_kwargs.ray_init.address == "10.0.0.7:6379"


def test_the_command_of_the_page_composes():
    (command,) = re.findall(r"main_ppo (--config-dir .*?)```", CLUSTER, re.S)
    given = command.replace("\\\n", " ").replace("HEAD", "10.0.0.7").split()
    composes(given[4:])


def test_without_a_folder_that_all_nodes_share(tmp_path):
    done, _ = run(tmp_path, "task=gsm8k")
    assert (done.returncode, done.stderr) == (
        2,
        "train.slurm: expected run_dir=FOLDER, which all nodes share\n",
    )


def test_the_page_has_its_variables():
    table = {*re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\| `.*? \|", CLUSTER, re.M)))}
    theirs = {"SLURM_GPUS_PER_NODE", "SLURM_CPUS_PER_TASK", "USER"}
    assert table == {*re.findall(r"\$\{([A-Z_]+):-", FILE.read_text())} - theirs


CLUSTER = PAGES["docs/cluster.md"]
