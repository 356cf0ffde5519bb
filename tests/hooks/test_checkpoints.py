"""The checkpoint from which a run continues, tested with verl's own method that reads it."""

import shutil

import pytest
from saved_checkpoint import save_checkpoint
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from verl_gdpo.hooks.resume import mend_tracker
from verl_gdpo.run.checkpoints import TRACKER


def test_what_a_full_disk_left_empty_is_the_newest_whole_checkpoint(tmp_path):
    for step in (3, 9, 10, 11):
        save_checkpoint(tmp_path, step)
    (tmp_path / "global_step_11" / "data.pt").unlink()  # the disk was full before it
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ValueError, match="invalid literal for int"):
        find_latest_ckpt_path(tmp_path)  # verl by itself
    mend_tracker(tmp_path)
    assert find_latest_ckpt_path(tmp_path) == f"{tmp_path}/global_step_10"


def test_a_tracker_is_left_as_it_is(tmp_path):
    mend_tracker(tmp_path)  # nothing was saved
    assert not (tmp_path / TRACKER).exists()
    for step in (6, 3):
        save_checkpoint(tmp_path, step)
    mend_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "3"


@pytest.mark.parametrize(
    ("said", "there", "has"),
    [("6", [3], r"\[3\] whole"), ("six", [3], r"\[3\] whole"), ("", [], "no whole")],
)
def test_a_checkpoint_that_is_not_there_is_no_start_from_scratch(tmp_path, said, there, has):
    for step in there:
        save_checkpoint(tmp_path, step)
    save_checkpoint(tmp_path, 9)
    shutil.rmtree(tmp_path / "global_step_9" / "actor")  # as verl does with an old one
    (tmp_path / TRACKER).write_text(said)
    with pytest.raises(ValueError, match=f"says '{said}', but .* has {has}.* delete it"):
        mend_tracker(tmp_path)
