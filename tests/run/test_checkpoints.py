"""Which checkpoint a run goes on from, and which start trained up to it."""

import shutil

import pytest
from processes import completed
from saved_checkpoint import save_checkpoint

from verl_gdpo.run import checkpoints
from verl_gdpo.run.checkpoints import (
    TRACKER,
    is_whole,
    maker_of,
    newest_checkpoint,
    whole_checkpoint,
)
from verl_gdpo.run.starts import StartManifest, write


def start(time="2026-01-01T00:00:00+00:00", **more):
    return StartManifest(time, **more)


MODELS = ["actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt"]
OPTIMIZERS = [name.replace("model", "optim") for name in MODELS]


@pytest.mark.parametrize(
    "missing",
    [
        ["data.pt"],
        ["actor"],
        MODELS[1:],
        OPTIMIZERS[:1],
        MODELS,
        # as `trainer.del_local_ckpt_after_load` does it
        [*MODELS, *OPTIMIZERS, *(name.replace("model", "extra_state") for name in MODELS)],
    ],
)
def test_a_checkpoint_without_a_part_is_not_whole(tmp_path, missing):
    checkpoint = save_checkpoint(tmp_path, 3, ranks=2)
    assert is_whole(checkpoint) and whole_checkpoint(tmp_path) == checkpoint
    for path in (checkpoint / name for name in missing):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not is_whole(checkpoint)
    with pytest.raises(ValueError, match=r"says '3', but .* has no whole checkpoints"):
        whole_checkpoint(tmp_path)


def test_a_checkpoint_that_was_saved_without_the_optimizer_is_whole(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "actor" / "optim_world_size_1_rank_0.pt").unlink()
    assert is_whole(checkpoint)


def test_a_checkpoint_of_another_engine_is_whole(tmp_path):
    (tmp_path / "actor" / "model" / "dist_ckpt").mkdir(parents=True)
    (tmp_path / "data.pt").touch()
    assert is_whole(tmp_path)


def test_the_newest_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is whole_checkpoint(tmp_path) is None
    for step in (9, 10, 3):
        save_checkpoint(tmp_path, step)
    assert newest_checkpoint(tmp_path).name == "global_step_3"
    shutil.rmtree(tmp_path / "global_step_10" / "actor")  # as verl does with an old one
    (tmp_path / TRACKER).write_text("")
    assert newest_checkpoint(tmp_path) == whole_checkpoint(tmp_path) == tmp_path / "global_step_9"


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
