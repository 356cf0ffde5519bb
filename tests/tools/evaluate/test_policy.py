import errno
import json
import os
import shutil
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from saved_checkpoint import write_archive

from verl_gdpo.tools.evaluate import policy as policies
from verl_gdpo.tools.evaluate.policy import choose_dtype, find_policy

SHARD = "model_world_size_1_rank_0.pt"


@pytest.fixture
def merger(monkeypatch):
    """Stands in for verl's: copies the shard, and counts."""
    done = []

    def run(command, **_):
        actor, target, *more = command[3:]
        done.append([actor, *more])
        shutil.copytree(f"{actor}/huggingface", target)
        shutil.copy(f"{actor}/{SHARD}", f"{target}/model.safetensors")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(policies.subprocess, "run", run)
    return done


def checkpoint(folder, weights="old"):
    actor = folder / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text('{"dtype": "float32"}')
    (actor / "fsdp_config.json").write_text("{}")
    write_archive(actor / SHARD, weights)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of the steps 5 and 10."""
    for step in (5, 10):
        checkpoint(tmp_path / "run" / "checkpoints" / f"global_step_{step}", f"of {step}")
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    config = tmp_path / "run" / ".hydra"
    config.mkdir()
    block = {"data": {"max_response_length": 56}, "algorithm": {}, "trainer": {}}
    OmegaConf.save(block, config / "config.yaml")
    return tmp_path / "run"


def weights(policy):
    with zipfile.ZipFile(policy.model / "model.safetensors") as archive:
        return archive.read("archive/data.pkl").decode()


def test_a_run_is_its_newest_checkpoint_or_the_one_asked_for(run, merger):
    newest, earlier = find_policy(run), find_policy(run, 5)
    assert (newest.step, weights(newest)) == (10, "of 10")
    assert (earlier.step, weights(earlier)) == (5, "of 5")
    assert newest.run == run and newest.of_config("data.max_response_length", 1) == 56
    with pytest.raises(ValueError, match=r"no checkpoint of step 7 .* the steps \[5, 10\]"):
        find_policy(run, 7)


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/global_step_10"])
def test_a_checkpoint_knows_its_run_wherever_it_is_named(run, merger, place):
    found = find_policy(run / place)
    assert (found.step, found.run, weights(found)) == (10, run, "of 10")
    assert find_policy(run / "checkpoints/global_step_10/actor").step == 10


def test_a_run_may_have_its_checkpoints_elsewhere(run, merger, tmp_path):
    (run / "checkpoints").rename(tmp_path / "far")
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    config.trainer.default_local_dir = str(tmp_path / "far")
    OmegaConf.save(config, run / ".hydra" / "config.yaml")
    assert weights(find_policy(run)) == "of 10"


def test_shards_are_merged_once_and_again_when_they_change(run, merger):
    assert find_policy(run) == find_policy(run) and len(merger) == 1
    shard = run / "checkpoints/global_step_10/actor" / SHARD
    write_archive(shard, "new 10")
    os.utime(shard, ns=(1, 1))
    assert weights(find_policy(run)) == "new 10" and len(merger) == 2
    assert [*shard.parent.glob(".*")] == []


def test_a_checkpoint_that_is_cut_is_named_with_those_that_are_whole(run, merger):
    actor = run / "checkpoints" / "global_step_10" / "actor"
    for path in (actor / SHARD, actor / "fsdp_config.json", actor / "huggingface" / "config.json"):
        written = path.read_bytes()
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=rf"{path} is empty\. .* steps \[5\] .*: --step 5$"):
            find_policy(run)
        path.write_bytes(written)
    (actor / "optim_world_size_1_rank_0.pt").touch()  # nobody reads it
    assert find_policy(run).step == 10 and find_policy(run, 5).step == 5


def test_a_checkpoint_whose_model_verl_has_removed_is_named_with_those_that_have_one(run, merger):
    """verl leaves data.pt of the checkpoints that it does not keep."""
    folder = run / "checkpoints"
    shutil.rmtree(folder / "global_step_5" / "actor")
    (folder / "global_step_5" / "data.pt").touch()
    removed = (
        r"global_step_5/actor is missing: verl removes it from older checkpoints than the last "
        r"trainer\.max_actor_ckpt_to_keep\. .* steps \[10\] have a whole model: --step 10$"
    )
    for place, step in ((run, 5), (folder / "global_step_5", None)):
        with pytest.raises(ValueError, match=removed):
            find_policy(place, step)
    with pytest.raises(ValueError, match=r"no checkpoint of step 7 .* the steps \[10\]"):
        find_policy(run, 7)


def test_the_shards_may_be_in_a_folder_of_any_name(run, merger, tmp_path):
    shutil.copytree(run / "checkpoints" / "global_step_5" / "actor", tmp_path / "best")
    assert weights(find_policy(tmp_path / "best")) == "of 5"


def test_only_who_trusts_a_checkpoint_has_its_code_run(run, merger):
    find_policy(run, 5)
    find_policy(run, 10, trust=True)
    assert [more for _, *more in merger] == [[], ["--trust"]]


def test_what_a_killed_merge_has_left_goes_away(run, merger):
    actor = run / "checkpoints/global_step_10/actor"
    (actor / ".merged.tmp").mkdir()
    assert weights(find_policy(run)) == "of 10"
    assert [*actor.glob(".*")] == []


def test_two_evaluations_merge_a_checkpoint_once(run, monkeypatch, merger):
    actor = run / "checkpoints/global_step_10/actor"
    started, go_on = threading.Event(), threading.Event()
    merge = policies.subprocess.run

    def slow(command, **options):
        started.set()
        assert go_on.wait(60)
        return merge(command, **options)

    monkeypatch.setattr(policies.subprocess, "run", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(find_policy, run)
        assert started.wait(60)
        second = threads.submit(find_policy, run)
        started.clear()
        assert not started.wait(0.3)  # it waits for the first one
        go_on.set()
        assert weights(first.result()) == weights(second.result()) == "of 10"
    assert len(merger) == 1 and [*actor.glob(".*")] == []


def test_a_file_system_without_locks_merges_with_a_warning(run, merger, monkeypatch, capfd):
    flock = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(policies.fcntl, "flock", flock)
    assert weights(find_policy(run)) == "of 10"
    assert "actor cannot be locked: No locks available. Merge" in capfd.readouterr().err


def test_a_merge_that_fails_leaves_nothing_and_says_why(run, monkeypatch):
    def fail(command, **_):
        os.mkdir(command[-1])
        return subprocess.CompletedProcess(command, 1, stderr="Traceback\nValueError: bad shard\n")

    monkeypatch.setattr(policies.subprocess, "run", fail)
    with pytest.raises(ValueError, match=r"cannot be merged: ValueError: bad shard$"):
        find_policy(run)
    actor = run / "checkpoints" / "global_step_10" / "actor"
    assert len([*actor.iterdir()]) == 3  # as before


def test_a_model_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = find_policy(tmp_path)
    assert (found.model, found.step, found.run, found.of_config("a.b", 3)) == (tmp_path, 0, None, 3)
    with pytest.raises(ValueError, match="is one policy, and no run"):
        find_policy(tmp_path, 5)


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder; expected a run's folder"):
        find_policy(tmp_path / "Qwen")
    with pytest.raises(ValueError, match=r"no checkpoint in .*checkpoints, .*save_freq"):
        find_policy(tmp_path)
    (tmp_path / "global_step_1" / "actor" / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(ValueError, match="--backend megatron"):
        find_policy(tmp_path / "global_step_1")


def test_the_precision_is_float32_or_that_of_training_on_a_gpu(run, merger, monkeypatch):
    found = find_policy(run)
    assert choose_dtype(found) == "float32"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = found.model / "config.json"
    config.write_text(json.dumps({"torch_dtype": "float16"}))
    assert choose_dtype(found) == "float16"
    key = "actor_rollout_ref.rollout.dtype"
    OmegaConf.update(found.config, key, "bfloat16")
    assert choose_dtype(found) == "bfloat16"
    # vLLM has more names, and "auto" is that of the model; a recipe without a GPU has it too.
    for name, expected in (("auto", "float16"), ("half", "float16"), ("float", "float32")):
        OmegaConf.update(found.config, key, name)
        assert choose_dtype(found) == expected
    OmegaConf.update(found.config, key, "fp8")
    with pytest.raises(ValueError, match=rf"{key}=fp8: expected .* --dtype"):
        choose_dtype(found)
