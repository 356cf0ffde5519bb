import json

import pytest

from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.evaluation.records import ANSWERS, Answers, Place, Record, start

FIRST = (Place("q_1", 0, 0), Record("user: 1?", Answer("one\n\u2028 \ud7ff", 3, True)))
LONG = (Place("q_2", 1, 0), Record("user: ...", None))


def written(folder, *pairs):
    answers = Answers(folder)
    for place, record in pairs:
        answers.add(place, record)
    answers.close()


def read(folder):
    answers = Answers(folder)
    answers.close()
    return answers.known


def test_what_was_written_is_read(tmp_path):
    written(tmp_path, FIRST)
    written(tmp_path, LONG)
    assert read(tmp_path) == dict([FIRST, LONG])


def test_an_answer_is_in_the_file_before_the_next_one(tmp_path):
    answers = Answers(tmp_path)
    answers.add(*FIRST)
    assert (tmp_path / ANSWERS).read_bytes().endswith(b"\n")
    answers.close()


def test_a_line_that_a_kill_has_cut_is_dropped_at_every_byte(tmp_path):
    written(tmp_path, FIRST, LONG)
    whole = (tmp_path / ANSWERS).read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        (tmp_path / ANSWERS).write_bytes(whole[:size])
        assert read(tmp_path) == dict([FIRST])
        written(tmp_path, LONG)
        assert (tmp_path / ANSWERS).read_bytes() == whole


@pytest.mark.parametrize("line", ['{"key": "a"}', "[]", "no json", '{"key": "a", "sample": "x"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / ANSWERS).write_text(line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1"):
        Answers(tmp_path)


def test_a_second_process_is_refused(tmp_path):
    first = Answers(tmp_path)
    with pytest.raises(ValueError, match="another process"):
        Answers(tmp_path)
    first.close()
    read(tmp_path)


def test_an_evaluation_with_other_settings_is_refused_by_name(tmp_path):
    start(tmp_path, {"model": "a", "seed": 0, "options": ()})
    start(tmp_path, {"model": "a", "seed": 0, "options": ()})
    with pytest.raises(ValueError, match="model: 'a' before, 'b' now; new: None before, 1 now"):
        start(tmp_path, {"model": "b", "seed": 0, "options": (), "new": 1})
    assert json.loads((tmp_path / "evaluation.json").read_text())["model"] == "a"


def test_answers_of_nobody_are_refused(tmp_path):
    written(tmp_path, FIRST)
    with pytest.raises(ValueError, match="nobody knows whose"):
        start(tmp_path, {"model": "a"})
