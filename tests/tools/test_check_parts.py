"""The parts of `verl-gdpo check`: the configuration, the machine, made-up responses, silence."""

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet
from repository import REPO

from verl_gdpo import REQUIRED_VERL
from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tools.check import dry_run, machine, on_gpus, ray_start
from verl_gdpo.tools.check.output import others_kept_away
from verl_gdpo.tools.check.sample_responses import WORDS, long_responses
from verl_gdpo.tools.compose import PLAIN, compose_config


def composed(*overrides):
    return compose_config(None, PLAIN, overrides)


# --- the configuration ---------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_the_configuration_of_the_training_command(tmp_path):
    """With a folder of one's own, where verl's file of the same name wins, and Hydra's folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "legacy_data.yaml").write_text("shuffle: mine\n")
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "fast.yaml").write_text(
        "# @package actor_rollout_ref.actor.optim\nlr: 1e-4\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, speed: fast, _self_]\n"
        "trainer: {default_local_dir: '${hydra:runtime.output_dir}/here'}\n"
    )
    given = ["data.train_batch_size=8", "hydra.run.dir=out", "+algorithm.gdpo.rewards.a=1"]
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", "-cd", str(tmp_path)),
            *("-cn", "mine", "--cfg", "job", *given),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        config = compose_config(tmp_path, "mine", given)
        assert config.trainer.default_local_dir == f"{tmp_path}/out/here"
    finally:
        os.chdir(before)
    ours = OmegaConf.to_yaml(config)
    assert yaml.safe_load(ours) == yaml.safe_load(done.stdout)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4 and config.data.shuffle is True


def test_a_config_path_takes_the_place_of_verls(tmp_path):
    (tmp_path / "whole.yaml").write_text("a: 1\n")
    assert compose_config(None, "whole", [], str(tmp_path)) == {"a": 1}


# --- the machine ---------------------------------------------------------------------------------


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


@pytest.mark.parametrize(
    ("version", "is_said"), [("0.10.0.dev", True), ("0.11.0", True), ("0.9.1", False)]
)
def test_a_checkout_of_verl_that_an_install_would_replace(monkeypatch, version, is_said):
    monkeypatch.setattr("verl_gdpo.tools.check.machine.VERSION", version)
    said = " ".join(machine.what_may_replace_verl())
    assert said.startswith(f"verl {version} is a development version, or newer") == is_said
    # the extra `verl` alone keeps it
    assert SpecifierSet(REQUIRED_VERL).contains(version)


def test_a_tracker_without_its_key(no_key, monkeypatch):
    def lacks(*overrides):
        return machine.missing_trackers(composed(*overrides))

    (problem,) = lacks()  # verl's default is [console, wandb]
    assert problem.startswith("trainer.logger=wandb: no API key is here")
    assert lacks("trainer.logger=console") == lacks("trainer.logger=null") == []
    key = "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=abc"
    assert lacks(key) == []
    no_key.write_text("machine api.wandb.ai login user password abc\n")
    assert lacks() == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert lacks() == [problem]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert lacks() == []


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "swanlab" else name)
    (problem,) = machine.missing_trackers(composed("trainer.logger=[console,swanlab]"))
    assert problem.startswith("trainer.logger=swanlab: the package swanlab is not installed here")


def test_files_for_workers(tmp_path):
    here = tmp_path / "tools.yaml"
    turns = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    given = (f"{turns}={here}", f"{loops}={tmp_path}/none.yaml")
    assert machine.missing_files(composed(*given)) == [
        f"{turns}={here}: there is no such file",
        f"{loops}={tmp_path}/none.yaml: there is no such file",
    ]
    here.touch()
    assert machine.missing_files(composed(given[0])) == []
    assert machine.missing_files(composed(f"{turns}=pkg://of/verl.yaml")) == []


def test_folders_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given = ("trainer.rollout_data_dir=file/dumps", "trainer.default_local_dir=file")
    rollouts = f"trainer.rollout_data_dir=file/dumps: {tmp_path}/file is no folder"
    assert machine.unusable_folders(composed(*given)) == [rollouts]
    saved = machine.unusable_folders(composed(*given, "trainer.save_freq=1"))
    assert saved == [rollouts, f"trainer.default_local_dir=file: {tmp_path}/file is no folder"]
    assert machine.unusable_folders(composed("trainer.rollout_data_dir=new/dumps")) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (problem,) = machine.unusable_folders(composed("trainer.rollout_data_dir=new/dumps"))
    assert problem == f"trainer.rollout_data_dir=new/dumps: {tmp_path} cannot be written"


def test_what_ray_fails_on(monkeypatch):
    config, any_number = composed("ray_kwargs.ray_init.num_cpus=16"), composed()
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert ray_start.what_ray_refuses(config) == []
    with monkeypatch.context() as changed:
        changed.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        (problem,) = ray_start.what_ray_refuses(config)
        assert problem.startswith(
            "RAY_ADDRESS=10.0.0.1:6379 with ray_kwargs.ray_init.num_cpus=16: the run would join"
        )
        assert problem.endswith("or set ray_kwargs.ray_init.num_cpus=null")
        assert ray_start.what_ray_refuses(any_number) == []  # which is verl's default
        started = "+ray_kwargs.ray_init.address=local"
        assert (
            ray_start.what_ray_refuses(composed("ray_kwargs.ray_init.num_cpus=16", started)) == []
        )
        changed.setenv("RAY_ADDRESS", "local")
        assert ray_start.what_ray_refuses(config) == []
        place = "+ray_kwargs.ray_init.address=10.0.0.1:6379"
        (problem,) = ray_start.what_ray_refuses(
            compose_config(REPO / "recipes", "train", ["hardware=cpu", place])
        )
        assert problem.startswith("ray_kwargs.ray_init.address=10.0.0.1:6379 with ray_kwargs.ray_")
        for name in ("num_cpus", "num_gpus", "object_store_memory"):
            assert f" ray_kwargs.ray_init.{name}=null" in problem
    with monkeypatch.context() as changed:
        changed.setenv("TMPDIR", f"{sys.prefix}/tmp")
        assert "is inside the virtual environment" in ray_start.what_ray_refuses(config)[0]
        changed.setenv("RAY_TMPDIR", "/tmp")  # which Ray prefers
        assert ray_start.what_ray_refuses(config) == []
    with monkeypatch.context() as changed:
        changed.setattr(sys, "executable", "/home/jürgen/my env/bin/python")
        (problem,) = ray_start.what_ray_refuses(config)
        assert problem.startswith("Ray starts no worker with /home/jürgen/my env/bin/python: a s")
        changed.setattr(sys, "executable", "/home/jürgen/my_env-3.11+x@y/bin/python3.11")
        assert ray_start.what_ray_refuses(config) == []
    with monkeypatch.context() as changed:
        changed.setattr("socket.create_connection", unreachable)
        (problem,) = ray_start.what_ray_refuses(config)
        assert problem.startswith("127.0.0.1 cannot be used on this machine")


def unreachable(*_, **__):
    """As in a network namespace whose `lo` is down."""
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def test_a_temporary_folder_that_is_too_long_is_the_one_that_ray_refuses(monkeypatch):
    """Ray's own rule, on the longest path that it makes of the folder."""
    from ray._private.utils import validate_socket_filepath

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    refused, config = [], composed()
    for length in range(30, 50):
        folder = f"/tmp/{'x' * (length - 5)}"
        monkeypatch.setenv("TMPDIR", folder)
        try:
            validate_socket_filepath(f"{folder}/ray{ray_start.SESSION.format(os.getpid())}")
        except OSError:
            refused.append(length)
        problems = ray_start.what_ray_refuses(config)
        assert any("folder of Ray is too long" in text for text in problems) == (length in refused)
    assert 0 < len(refused) < 20
    config = composed(f"+ray_kwargs.ray_init._temp_dir=/tmp/{'x' * 45}")
    assert "is too long by" in ray_start.what_ray_refuses(config)[0]


def test_disks_that_are_full_also_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert machine.full_disks(composed("trainer.device=cpu")) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2e8))
    local = f"trainer.default_local_dir={tmp_path.parent}/a/b"
    assert machine.full_disks(composed("trainer.device=cpu", local)) == [
        f"{folder}: 0.20 GB free; expected at least 1. Make room, or name other folders in "
        "trainer.default_local_dir and TMPDIR"
        for folder in (tmp_path, tmp_path.parent)
    ]
    assert len(machine.full_disks(composed(local))) == 1  # of a GPU run, `check_gpus` says more


def test_a_run_of_megatron_is_not_computed(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    size = SimpleNamespace(name="H100", major=9, minor=0, total_memory=9 * 10**10)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: size)
    monkeypatch.setattr(on_gpus, "missing", lambda *found, **settings: [])
    config = compose_config(None, "ppo_megatron_trainer", [])
    assert on_gpus.check_gpus(config) == ["8 GPUs of 90 GB"]


# --- responses -----------------------------------------------------------------------------------


def test_long_responses_fill_the_room():
    both = long_responses("<think> so </think>\n72", limit=400, share=0.25)
    counts = {kind: len(WORDS.encode(text)) for kind, text in both.items()}
    room = 400 - len(WORDS.encode("<think> so </think>\n72"))
    assert counts == {"longer": 400 - room + room // 4, "as long as allowed": 400}
    assert all(text.startswith("<think> let us look") for text in both.values())
    assert long_responses("seventy two", limit=2, share=0.5) == {}


def test_tokens_make_the_text_again():
    import torch

    for text in ("", " a  b\n\n<think>ünïcode 日本語</think>", "x" * 50, "\t?!  \n"):
        assert WORDS.decode(torch.tensor(WORDS.encode(text))) == text


@pytest.mark.parametrize(
    ("source", "truth"),
    [("rlla", "<think> a </think>\n<response> Hello </response>"), ("verl_gdpo/gsm8k", "72")],
)
def test_a_long_answer_is_as_right_as_a_short_one(source, truth):
    task = TASK_BY_SOURCE[source]
    good = task.good_response(truth)
    expected = task.score(good, truth, response_tokens=500)
    assert set(expected.values()) != {0.0}
    for text in long_responses(good, limit=500, share=0.5).values():
        assert task.score(text, truth, response_tokens=500) == expected


def test_the_clock_starts_again_with_each_answer(monkeypatch):
    waits = []

    class Waiting(Queue):
        def get(self, timeout):
            waits.append(timeout)
            return super().get(timeout=60)

    monkeypatch.setattr(dry_run, "SimpleQueue", Waiting)
    with dry_run._event_loop() as loop:
        answers = dry_run._answers(loop, [answer(k) for k in range(10)], 45)
    assert (answers, waits) == ([*range(10)], [45] * 10)


async def answer(value):
    return value


def test_no_more_than_so_many_at_once():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    threads = dry_run.DaemonThreads(2)
    wait([threads.submit(work) for _ in range(8)])
    assert most == 2


# --- silence -------------------------------------------------------------------------------------


def test_what_was_kept_is_shown_when_something_breaks(capfd):
    with pytest.raises(RuntimeError), others_kept_away(verbose=False) as quiet:
        print("ours", file=quiet.out)
        print("theirs", file=sys.__stdout__, flush=True)  # past pytest
        os.system("echo of a program")
        raise RuntimeError
    printed = capfd.readouterr()
    assert printed.out == "ours\n" and printed.err == "theirs\nof a program\n"
    assert quiet.has_kept
    with others_kept_away(verbose=False) as quiet:
        pass
    assert not quiet.has_kept
    print("again")
    assert capfd.readouterr().out == "again\n"
