"""Which checkpoint a run goes on from, and which start trained up to it."""

import re
import shutil
import subprocess
import zipfile

import pytest
import torch
from processes import completed
from saved_checkpoint import save_checkpoint, write_archive

from verl_gdpo.tools.run import checkpoints
from verl_gdpo.tools.run.checkpoints import (
    TRACKER,
    ZIP_ENTRY,
    archive_fault,
    fault_of,
    is_whole,
    maker_of,
    newest_checkpoint,
    whole_checkpoint,
)
from verl_gdpo.tools.run.starts import StartManifest, write


def start(time="2026-01-01T00:00:00+00:00", **more):
    return StartManifest(time, **more)


MODELS = ["actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt"]
OPTIMIZERS = [name.replace("model", "optim") for name in MODELS]
EXTRAS = [name.replace("model", "extra_state") for name in MODELS]


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["data.pt"], "data.pt"),
        (["actor"], "actor"),
        (MODELS[1:], MODELS[1]),
        (OPTIMIZERS[:1], OPTIMIZERS[0]),
        (MODELS, MODELS[0]),
    ],
)
def test_a_checkpoint_without_a_part_is_not_whole(tmp_path, missing, named):
    checkpoint = save_checkpoint(tmp_path, 3, ranks=2)
    assert is_whole(checkpoint) and whole_checkpoint(tmp_path) == checkpoint
    for path in (checkpoint / name for name in missing):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert fault_of(checkpoint) == f"{checkpoint}/{named} is missing"
    with pytest.raises(ValueError, match=r"says '3', but .* No checkpoint there is whole"):
        whole_checkpoint(tmp_path)


def test_a_checkpoint_without_shards_is_not_whole(tmp_path):
    """As `trainer.del_local_ckpt_after_load` leaves it."""
    checkpoint = save_checkpoint(tmp_path, 3, ranks=2)
    for name in [*MODELS, *OPTIMIZERS, *EXTRAS]:
        (checkpoint / name).unlink()
    assert "actor has no file model_world_size_N_rank_K.pt" in fault_of(checkpoint)


def emptied(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def without_its_directory(path):
    """As long as it was: what a file system can leave of the last blocks."""
    written = path.read_bytes()
    begin = written.index(ZIP_ENTRY)
    path.write_bytes(written[:begin] + bytes(30) + written[begin + 30 :])


@pytest.mark.parametrize("damage", [emptied, cut, without_its_directory])
@pytest.mark.parametrize("name", ["data.pt", MODELS[1], OPTIMIZERS[0], EXTRAS[1]])
def test_a_file_that_a_power_loss_left_empty_or_cut(tmp_path, name, damage):
    """The message names it, and its line goes on from the newest whole checkpoint."""
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, ranks=2)
    path = tmp_path / "global_step_6" / name
    damage(path)
    with pytest.raises(ValueError, match=r"says '6', but .* steps \[2, 4\]") as error:
        whole_checkpoint(tmp_path)
    message = str(error.value)
    assert f"but {path} is {'empty' if damage is emptied else 'cut or damaged'}" in message
    assert "\n" not in message
    (line,) = re.findall(r"echo .*(?=, and give the same command again)", message)
    subprocess.run(["bash", "-c", line], check=True)
    assert whole_checkpoint(tmp_path) == tmp_path / "global_step_4"


def test_every_cut_of_an_archive_of_torch_is_seen(tmp_path):
    """Also one in the middle; what the tensors hold is not read."""
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(3)}, path)
    whole = path.read_bytes()
    assert archive_fault(path) == ""
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert archive_fault(path), f"the first {place} bytes"
        path.write_bytes(whole[:place] + whole[place + 1 :])
        assert archive_fault(path), f"without byte {place}"
    ones = torch.ones(3).numpy().tobytes()
    path.write_bytes(whole.replace(ones, bytes(len(ones))))
    assert archive_fault(path) == ""


def test_an_archive_with_more_entries_than_a_small_one_can_count(tmp_path):
    path = tmp_path / "optim.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(2**16):
            archive.writestr(str(number), "")
    assert archive_fault(path) == ""
    cut(path)
    assert "cut or damaged" in archive_fault(path)


def test_the_critic_and_the_rows_in_flight_are_looked_at_where_they_are(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    shutil.copytree(checkpoint / "actor", checkpoint / "critic")
    state = checkpoint / "transfer_queue" / "storage_units" / "su_0_x.pkl"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"x")
    assert is_whole(checkpoint)
    emptied(state)
    assert fault_of(checkpoint) == f"{state} is empty"
    optimizer = checkpoint / "critic" / "optim_world_size_1_rank_0.pt"
    cut(optimizer)
    assert fault_of(checkpoint).startswith(f"{optimizer} is cut or damaged")


def test_a_checkpoint_that_was_saved_without_the_optimizer_is_whole(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "actor" / "optim_world_size_1_rank_0.pt").unlink()
    assert is_whole(checkpoint)


def test_what_an_adapter_and_a_merge_add_does_not_count(tmp_path):
    """LoRA's description, and a model that a killed merge has left."""
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "actor" / "lora_train_meta.json").write_text("{}")
    (checkpoint / "actor" / ".merged.tmp").mkdir()
    (checkpoint / "actor" / ".merged.tmp" / "model.safetensors").touch()
    assert is_whole(checkpoint)


def test_a_checkpoint_of_another_engine_is_whole(tmp_path):
    """Megatron's; a rank that holds no tensor writes an empty file."""
    write_archive(tmp_path / "data.pt")
    actor = tmp_path / "actor"
    for part in ("model", "optimizer", "extra"):
        saved = actor / part / "dist_ckpt"
        saved.mkdir(parents=True)
        write_archive(saved / "common.pt")
        (saved / "__0_0.distcp").write_bytes(b"tensors")
        (saved / "__1_0.distcp").touch()
        (saved / ".metadata").write_bytes(b"where they are")
        (saved / "metadata.json").write_text("{}")
    (actor / "model" / "huggingface").mkdir()
    (actor / "model" / "huggingface" / "config.json").write_text("{}")
    (actor / "ckpt_contents.json").write_text("{}")
    assert is_whole(tmp_path)
    last = actor / "optimizer" / "dist_ckpt"
    cut(last / "common.pt")
    assert fault_of(tmp_path).startswith(f"{last}/common.pt is cut or damaged")
    emptied(last / ".metadata")
    assert fault_of(tmp_path) == f"{last}/.metadata is empty"
    shutil.rmtree(actor)
    actor.mkdir()
    assert fault_of(tmp_path) == f"{actor} is empty"


def test_the_newest_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is whole_checkpoint(tmp_path) is None
    for step in (9, 10, 3):
        save_checkpoint(tmp_path, step)
    assert newest_checkpoint(tmp_path).name == "global_step_3"
    shutil.rmtree(tmp_path / "global_step_10" / "actor")  # as verl does with an old one
    emptied(save_checkpoint(tmp_path, 11) / "data.pt")
    (tmp_path / TRACKER).write_text("")
    assert newest_checkpoint(tmp_path) == whole_checkpoint(tmp_path) == tmp_path / "global_step_9"


def test_a_tracker_that_a_power_loss_left_with_other_bytes(tmp_path):
    save_checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_bytes(b"\xff\0\0")
    with pytest.raises(ValueError, match=r"is missing\. Whole are the checkpoints") as error:
        whole_checkpoint(tmp_path)
    assert f"{tmp_path / TRACKER} says " in str(error.value)


def test_the_start_that_trained_up_to_a_checkpoint(tmp_path):
    """Not one that was stopped before it saved anything, with whatever settings."""
    folder = tmp_path / "checkpoints"
    third = save_checkpoint(folder, 3, written_at=1_800_000_000)  # 2027
    assert maker_of(third) is None

    def number():
        return int(maker_of(third).parent.name)

    write(tmp_path, start("2026-01-01T00:00:00+00:00"), "")
    write(tmp_path, start("2028-01-01T00:00:00+00:00"), "")  # began anew after it
    assert number() == 1
    write(tmp_path, start("2028-01-02T00:00:00+00:00", checkpoint=str(third)), "")
    assert number() == 1
    shutil.copy(third / "data.pt", third / "copied")  # all times are those of the copy
    (third / "copied").rename(third / "data.pt")
    for later in ("2026-01-02", "2026-01-03"):
        write(tmp_path, start(f"{later}T00:00:00+00:00", checkpoint=str(third)), "")
    assert number() == 1
    sixth = save_checkpoint(folder, 6)
    assert maker_of(sixth).parent.name == "5"
    assert number() == 1


def test_a_start_that_went_on_from_a_folder_with_a_long_name(tmp_path):
    """YAML would break its name into lines."""
    long = tmp_path / " ".join(["a folder"] * 20)
    third = save_checkpoint(long / "checkpoints", 3)
    write(long, start(), "")
    write(long, start(checkpoint=str(third)), "")
    assert maker_of(third).parent.name == "1"


def test_a_cut_manifest_says_so(tmp_path):
    third = save_checkpoint(tmp_path / "checkpoints", 3)
    manifest = write(tmp_path, start(), "") / "start.yaml"
    manifest.write_text(manifest.read_text()[:9])
    with pytest.raises(
        ValueError, match=r"start.yaml: cannot be read: no time of its start\. Put back"
    ):
        maker_of(third)


def test_run_sh_asks_with_the_standard_library_alone(tmp_path):
    """tests/repository/test_run_sh.py has what it is told."""
    done = completed("-I", "-S", checkpoints.__file__, tmp_path)
    said = f"run.sh: nothing to resume in '{tmp_path}': no checkpoint\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
