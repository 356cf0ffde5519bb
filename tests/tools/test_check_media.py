"""Pictures, videos and sound of the rows, against what verl's own dataset does with such a row."""

from copy import deepcopy
from types import SimpleNamespace

import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from verl_gdpo.tools.check.data_files import DataFile
from verl_gdpo.tools.check.media import look_at_media

ROWS = {
    # name: (the text, or parts, of the message; the columns; whether verl takes the row)
    "none": ("What is it?", {}, True),
    "no file": ("What is <image>?", {"images": []}, True),
    "one": ("<image>What is it?", {"images": ["a.png"]}, True),
    "two": ("<image> or <image>?", {"images": ["a.png", "b.png"]}, True),
    "both": ("<image> or <video>?", {"images": ["a.png"], "videos": ["b.mp4"]}, True),
    "no place": ("What is it?", {"images": ["a.png"]}, False),
    "place too many": ("<image><image>What is it?", {"images": ["a.png"]}, False),
    "file too many": ("<image>What is it?", {"images": ["a.png", "b.png"]}, False),
    "other kind": ("<video>What is it?", {"images": ["a.png"]}, False),
    "text like a place": ("<image>Is it <audio>?", {"images": ["a.png"]}, False),
    "parts": ([{"type": "image"}], {"images": ["a.png"]}, False),
    "no list": ("<image>What is it?", {"images": "a.png"}, False),
}


def config_with(**data):
    # It is no folder, so nobody knows whether the model has a processor.
    model = {"path": "org/model"}
    data = {"prompt_key": "prompt", **data}
    return OmegaConf.create({"data": data, "actor_rollout_ref": {"model": model}})


def row_of(name):
    content, columns, _ = ROWS[name]
    return {"prompt": [{"role": "user", "content": content}], "data_source": "s", **columns}


def said_of(*names, **data):
    file = DataFile("a", pa.Table.from_pylist([row_of(name) for name in names]))
    return look_at_media(config_with(**data), "x", [file])


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_that_verl_does_not_take_are_refused(name):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    dataset = object.__new__(RLHFDataset)
    dataset.processor = SimpleNamespace()
    dataset.image_key, dataset.video_key, dataset.audio_key = "images", "videos", "audios"
    is_taken = ROWS[name][2]
    try:
        dataset._build_messages(deepcopy(row_of(name)), key="prompt")
        assert is_taken
    except AssertionError:
        assert not is_taken
    problems, _ = said_of(name)
    assert (problems == []) == is_taken


def test_what_is_said():
    problems, warnings = said_of("one", "no place")
    (text,) = problems
    assert "1 of 2 rows in a have another number" in text and warnings == []
    assert "such as row 1 (files in images: 1, <image>: 0)" in text
    assert text.endswith("verl ends at the first such row")
    # verl's filter takes an exception for a prompt that is too long.
    problems, (text,) = said_of("one", "no place", filter_overlong_prompts=True)
    assert problems == [] and text.endswith("verl leaves such rows out without a word")
    (text,), _ = said_of("no place", filter_overlong_prompts=True)
    assert text.endswith("none of the file is left")
    assert said_of("no place", image_key="pictures") == ([], [])
    problems, (text,) = said_of("one", "no file")
    assert problems == [] and "1 of 2 rows in a have <image> in their messages and no file" in text


def test_a_file_without_pictures_may_have_the_column():
    rows = [{**row_of("none"), "images": None, "videos": []}]
    file = DataFile("a", pa.Table.from_pylist(rows))
    assert look_at_media(config_with(), "x", [file]) == ([], [])
