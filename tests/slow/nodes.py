"""Trainings on several nodes of Ray, which are addresses of this machine.

A cluster is started as by somebody else, and our launcher joins it. A node dies by SIGKILL of all
its processes.
"""

import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack, contextmanager

from broken_training import LAST, SAVED, Training, check_resumed
from ray_nodes import FOURTH, HEAD, OTHER, THIRD, ray_nodes
from rollout_check import check_rollouts
from small_trainings import check_error, overrides
from start_verl import ENVIRONMENT, run_verl
from varied_reward import asked_at_once

import verl_gdpo
from verl_gdpo.tools.run.resume import quoted

ENDED_SECONDS = 180
STEPS = 12
BYSTANDER = """
import os, ray
ray.init(os.environ["CLUSTER"], log_to_driver=False)

@ray.remote(num_cpus=0)
class Bystander:
    def process(self):
        return os.getpid()

ray.get(Bystander.options(name="bystander", lifetime="detached").remote().process.remote())
"""


def on(nodes):
    """Overrides that join the cluster and use two of its nodes."""
    return [
        f"+ray_kwargs.ray_init.address={nodes.address}",
        # those of our recipe belong to a cluster that verl starts
        *(f"ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus")),
        "ray_kwargs.ray_init.object_store_memory=null",
        "ray_kwargs.ray_init._temp_dir=null",  # by which Ray would look for a node
        *("trainer.nnodes=2", "reward.num_workers=2"),
        "actor_rollout_ref.rollout.agent.num_workers=2",
    ]


def lasting(nodes):
    """All processes of the nodes, without those that wait for work, which come and go."""
    return {
        process
        for node in nodes.started
        for process, title in nodes.processes(node).items()
        if not any(word in title for word in ("ray::IDLE", "default_worker.py"))
    }


def test_two_nodes_train_and_stay(assets, tmp_path):
    """Ray ends what the run has started, and nothing else ends: neither a node nor another job.

    The reward workers of both nodes share one limit of requests.
    """
    log = tmp_path / "service.log"
    limited = [
        f"+reward.custom_reward_function.reward_kwargs.log={quoted(str(log))}",
        "+reward.max_concurrent=2",
    ]
    with ray_nodes(ENVIRONMENT) as nodes:
        nodes.start(HEAD)
        nodes.start(OTHER)
        environment = {**nodes.environment, "CLUSTER": nodes.address}
        bystander = [sys.executable, "-c", BYSTANDER]
        subprocess.run(bystander, env=environment, cwd=nodes.folder, check=True, timeout=120)
        assert nodes.actors("Bystander")
        before = lasting(nodes)
        run = run_verl(
            tmp_path,
            overrides(
                *(assets, *on(nodes), *limited, f"trainer.total_training_steps={STEPS}"),
                scorer="compute_score_after_service",
            ),
            **nodes.token,
        )
        assert run.exit_code == 0, run.last_lines()
        deadline = time.monotonic() + ENDED_SECONDS
        while (now := lasting(nodes)) != before:
            assert time.monotonic() < deadline, (before - now, now - before)
            time.sleep(0.5)
    rows = [run.dump(step) for step in range(1, STEPS + 1)]
    weights = dict.fromkeys(["correctness", "format", "letters", "brevity"], 1.0)
    difference = max(check_rollouts(one, weights) for one in rows)
    print(f"{sum(map(len, rows))} rows, largest difference {difference:.1e}")
    at_once, asking = asked_at_once(log)
    assert max(at_once) == 2 and at_once[-1] == 0
    assert len(asking) == 2
    differences = {
        step: run.steps()[step]["training/rollout_probs_diff_max"] for step in (1, STEPS)
    }
    assert max(differences.values()) < 1e-5, differences


# --- what is left of the cluster -----------------------------------------------------------------


def end_of(training, launcher, *said):
    """The run ends in time, and says why."""
    exit_code, output = training.end_of(launcher, ENDED_SECONDS)
    assert exit_code == 1 and any(one in output for one in said), output


@contextmanager
def trainer_on(node, nodes, launching):
    """The launcher of a run whose trainer's process is on this node."""
    (other,) = {HEAD, OTHER} - {node}
    with ExitStack() as stack:
        with nodes.filled(other):
            launcher = stack.enter_context(launching)
            while not (found := nodes.actors("TaskRunner")):
                assert launcher.poll() is None, launcher.communicate()[0]
                time.sleep(0.5)
        assert [*found] == [node]
        yield launcher


def test_a_reward_worker_and_nodes_die(tmp_path):
    """After each, `--resume` goes on."""
    with ray_nodes(ENVIRONMENT) as nodes:
        nodes.start(HEAD)
        nodes.start(OTHER)
        determinism = "actor_rollout_ref.rollout.full_determinism=True"
        training = Training(tmp_path, *on(nodes), determinism, joins=True, **nodes.token)
        with trainer_on(HEAD, nodes, training.started()) as launcher:
            training.wait_for(launcher, LAST)
            expected = training.rollouts(range(SAVED + 1, LAST + 1))
            workers = nodes.actors("RewardLoopWorker")
            assert {*workers} == {HEAD, OTHER}
            workers[OTHER].kill()
            end_of(training, launcher, "RolloutError: reward worker ")
        with trainer_on(HEAD, nodes, training.resumed()) as launcher:
            check_resumed(training, launcher, expected)
            nodes.kill(OTHER)
            end_of(training, launcher, "RolloutError: ")
        nodes.start(OTHER)
        with trainer_on(OTHER, nodes, training.resumed()) as launcher:
            training.wait_for(launcher)
            nodes.kill(OTHER)
            end_of(training, launcher, "RolloutError: the trainer's process or its node died. ")
        nodes.start(OTHER)
        with trainer_on(OTHER, nodes, training.resumed()) as launcher:
            training.wait_for(launcher)
            nodes.kill(HEAD)  # and with it what knows of all nodes
            # what comes first: an answer of Ray to the driver, or the end that Ray gives it
            end_of(training, launcher, "ActorUnavailableError: ", "Failed to connect to GCS")
        training.check_readable()


# --- nodes that have something else installed ----------------------------------------------------


def python_without_us(folder):
    """A virtual environment with all our packages, except for this one, which is editable here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # the files of this folder that end in .pth are not read
    (packages / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def package_with_a_change(folder, name):
    """A folder that has our package, in which one file has another line."""
    hidden = shutil.ignore_patterns("__pycache__", "recipes", "tool_rl_policy")
    shutil.copytree(verl_gdpo.__path__[0], folder / "verl_gdpo", ignore=hidden)
    with (folder / "verl_gdpo" / name).open("a") as file:
        file.write("# changed\n")
    return str(folder)


def test_nodes_with_another_package_are_named(assets, tmp_path, monkeypatch):
    """Another chart is no reason."""
    scores = package_with_a_change(tmp_path / "scores", "tasks/gsm8k/score.py")
    draws = package_with_a_change(tmp_path / "draws", "tools/report/charts.py")
    monkeypatch.chdir(tmp_path)  # Ray's processes import from the driver's folder too
    with ray_nodes(ENVIRONMENT) as nodes:
        nodes.start(HEAD)
        nodes.start(OTHER, python_without_us(tmp_path / "without"), PYTHONPATH="")
        nodes.start(THIRD, PYTHONPATH=scores)
        nodes.start(FOURTH, PYTHONPATH=draws)
        run = run_verl(tmp_path / "run", overrides(assets, *on(nodes)), **nodes.token)
    check_error(run, f"RuntimeError: verl-gdpo is not the same .* {OTHER}: ModuleNotFoundError: ")
    check_error(run, f"No module named 'verl_gdpo'; {THIRD}: [0-9a-f]{{12}}. Install")
    assert "Loading weights" not in run.output
