"""The parts of `verl-gdpo check`: the configuration, the machine, made-up responses, silence."""

import asyncio
import os
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import yaml
from omegaconf import OmegaConf
from processes import completed

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tools.check import data_files, dry_run, machine, made_up_responses, others_kept_away
from verl_gdpo.tools.check.made_up_responses import WORDS
from verl_gdpo.tools.check.reward_tables import NEVER_APPLIES, RewardLine, RewardTables
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
    command = ("-m", "verl.trainer.main_ppo", "-cd", tmp_path, "-cn", "mine", "--cfg", "job")
    done = completed("-W", "ignore", *command, *given, cwd=tmp_path)
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
    assert problem.startswith("trainer.logger=swanlab: its package is not installed here")


def test_a_python_that_a_shell_would_cut(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(sys, "executable", "/home/jürgen/my env/bin/python")
    (problem,) = machine.what_ray_refuses(composed())
    assert problem.startswith("Ray starts no worker with /home/jürgen/my env/bin/python: a s")
    monkeypatch.setattr(sys, "executable", "/home/jürgen/my_env-3.11+x@y/bin/python3.11")
    assert machine.what_ray_refuses(composed()) == []


def test_a_temporary_folder_that_is_too_long_is_the_one_that_ray_refuses(monkeypatch):
    """Ray's own rule, on the longest path that it makes of the folder."""
    from ray._private.utils import validate_socket_filepath

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    refused, config = [], composed()
    for length in range(30, 50):
        folder = f"/tmp/{'x' * (length - 5)}"
        monkeypatch.setenv("TMPDIR", folder)
        try:
            validate_socket_filepath(f"{folder}/ray{machine.SESSION.format(os.getpid())}")
        except OSError:
            refused.append(length)
        problems = machine.what_ray_refuses(config)
        assert any("folder of Ray is too long" in text for text in problems) == (length in refused)
    assert 0 < len(refused) < 20
    config = composed(f"+ray_kwargs.ray_init._temp_dir=/tmp/{'x' * 45}")
    assert "is too long by" in machine.what_ray_refuses(config)[0]


def test_folders_that_ray_cannot_write(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for variable in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(file))
    monkeypatch.setenv("RAY_TMPDIR", str(file))
    session, token = machine.what_ray_refuses(composed())[-2:]
    assert session.startswith(f"{file}/ray: Ray keeps its sessions in this folder")
    assert token.startswith(f"{file}/.ray: Ray writes a token into this folder of HOME")
    folder = "+ray_kwargs.ray_init._temp_dir=/tmp"
    assert machine.what_ray_refuses(composed(folder))[-1:] == [token]
    address = "+ray_kwargs.ray_init.address"
    assert machine.what_ray_refuses(composed(folder, f"{address}=local")) == [token]
    assert machine.what_ray_refuses(composed(folder, f"{address}=auto")) == []


# --- responses -----------------------------------------------------------------------------------


def test_tokens_make_the_text_again():
    import torch

    for text in ("", " a  b\n\n<think>ünïcode 日本語</think>", "x" * 50, "\t?!  \n"):
        assert WORDS.decode(torch.tensor(WORDS.encode(text))) == text


def test_the_range_of_a_small_reward_is_not_shown_as_0():
    line = RewardLine("each_token", 1.0, -0.0000271, -0.0, "")
    assert line.cells == ("each_token", "1", "-2.71e-05", "0.000", "")


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


@pytest.mark.parametrize(
    ("source", "truth"),
    [("rlla", "<think> a </think>\n<response> Hello </response>"), ("verl_gdpo/gsm8k", "72")],
)
def test_a_long_answer_fills_the_room_and_is_as_right_as_a_short_one(source, truth):
    task = TASK_BY_SOURCE[source]
    good = task.good_response(truth)
    expected = task.score(good, truth, response_tokens=500)
    assert set(expected.values()) != {0.0}
    text = made_up_responses.make_responses(good, good, 500)["as long as allowed"]
    assert len(WORDS.encode(text)) == 500
    assert task.score(text, truth, response_tokens=500) == expected
    assert "as long as allowed" not in made_up_responses.make_responses(
        "seventy two", "seventy two", 2
    )


@pytest.mark.parametrize(
    "options",
    [
        ["+reward.reward_kwargs.call_format=hermes"],
        [
            "+reward.reward_functions.form.task=tool_rl",
            "+reward.reward_functions.form.call_format=hermes",
        ],
    ],
)
def test_the_right_response_is_written_as_the_run_reads_it(options):
    truth = '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"b": 1}}\n</tool_call>'
    row = data_files.DataRow("row 0", "rlla", {"reward_model": {"ground_truth": truth}})
    kinds = {}
    for name, given in (("hermes", options), ("toolrl", [])):
        samples = made_up_responses.make_samples(composed(*given), [row], [])
        kinds[name] = {sample.kind: sample.response for sample in samples}
    assert kinds["toolrl"][made_up_responses.RIGHT] == truth
    assert kinds["hermes"][made_up_responses.RIGHT] == truth.replace("parameters", "arguments")
    assert kinds["hermes"].keys() == kinds["toolrl"].keys()


def managers_that_fail():
    async def stops_the_loop(_rollout):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(1000)

    async def ends_the_loop(_rollout):
        asyncio.get_running_loop().call_soon(sys.exit, "I leave")
        await asyncio.sleep(1000)

    async def returns_none(_rollout):
        return None

    return {
        "stops": (stops_the_loop, "RuntimeError: Event loop stopped before Future completed."),
        "ends": (ends_the_loop, "SystemExit: I leave"),
        "none": (returns_none, "run_single returned None; expected {reward_score: ...}"),
        "no rollout": (returns_none, "dictionary update sequence"),
    }


@pytest.mark.parametrize("kind", ["stops", "ends", "none", "no rollout"])
def test_a_failure_is_not_told_as_a_slow_reward_function(monkeypatch, kind):
    """Whatever ends the thread that scores, and not the reward function alone."""
    run_single, said = managers_that_fail()[kind]
    manager = SimpleNamespace(run_single=run_single)
    monkeypatch.setattr(dry_run, "_load_manager", lambda config: manager)
    fields = {"reward_model": {"ground_truth": "72"}, "prompt": []}
    if kind == "no rollout":
        fields["extra_info"] = '{"index": 0}'
    row = data_files.DataRow("row 0", "mine", fields)
    run = dry_run.score_rows(composed(), [row], 5, [])
    (problem,) = run.problems
    assert said in problem and "gave no answer" not in problem


# --- silence -------------------------------------------------------------------------------------


def test_what_was_kept_is_shown_when_something_breaks(capfd):
    with pytest.raises(RuntimeError), others_kept_away(verbose=False) as out:
        print("ours", file=out)
        print("theirs", file=sys.__stdout__, flush=True)  # past pytest
        os.system("echo of a program")
        raise RuntimeError
    printed = capfd.readouterr()
    assert printed.out == "ours\n" and printed.err == "theirs\nof a program\n"
    print("again")
    assert capfd.readouterr().out == "again\n"


# --- disks and large rows -------------------------------------------------------------------------


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(b"x" * (3 << 20))
    run = f"trainer.default_local_dir={tmp_path}/run/checkpoints"
    free = {}
    usage = namedtuple("usage", "free")

    def of_disk(folder):
        assert folder == tmp_path  # the nearest one that exists
        return usage(free["bytes"])

    monkeypatch.setattr("shutil.disk_usage", of_disk)

    def problems(mebibytes, *overrides):
        free["bytes"] = int(mebibytes * (1 << 20))
        path = f"actor_rollout_ref.model.path={model}"
        return machine.little_space(composed(run, path, "trainer.save_freq=5", *overrides))

    (problem,) = problems(1 / 16)  # 64 KB
    assert problem.startswith(run) and "has 0.1 MB free; expected at least 19 MB" in problem
    assert len(problems(18.9)) == 1 and problems(19) == []
    # adapters are small, and without checkpoints nothing is written there
    assert problems(18.9, "actor_rollout_ref.model.lora_rank=8") == []
    assert problems(1, "trainer.save_freq=-1") == []
    (problem,) = problems(1, "trainer.save_freq=-1", f"trainer.rollout_data_dir={tmp_path}/dumps")
    assert problem.startswith("trainer.rollout_data_dir=") and "for dumps" in problem


def test_a_large_row_is_named():
    texts = ["a"] * 1500
    texts[1200] = "b" * ((17 << 20) + 1)
    file = data_files.DataFile("train.parquet", pa.table({"data_source": ["s"] * 1500, "t": texts}))
    (remark,) = data_files.large_rows("train_files", [file])
    assert remark.startswith(
        "data.train_files: 1 of 1500 rows have more than 16 MB, such as row 1200"
    )
    small = data_files.DataFile("train.parquet", file.table.slice(0, 1200))
    assert data_files.large_rows("train_files", [small]) == []


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        (GdpoSettings(), NEVER_APPLIES),
        (GdpoSettings(rewards={"words": 1.0}), "not in the sum"),
    ],
)
def test_a_reward_that_none_of_the_rows_asks_for_is_not_said_to_be_left_out(settings, remark):
    sample = {"source": "s", "row": 0, "uid": "a", "kind": ""}
    samples = [SimpleNamespace(**sample, label=str(number)) for number in range(2)]
    infos = [{"words": 0.0, "bullets": None}, {"words": 1.0, "bullets": None}]
    run = dry_run.DryRun(samples, infos, [0.0, 1.0], [])
    (lines,) = RewardTables(run, settings).lines.values()
    assert {line.reward: line.remark for line in lines} == {"words": "", "bullets": remark}
