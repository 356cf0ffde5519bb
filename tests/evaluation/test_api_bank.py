import json
from argparse import Namespace

import pytest

from verl_gdpo.evaluation.api_bank import ALL, ANY, BENCHMARK
from verl_gdpo.evaluation.dialogues import start_all
from verl_gdpo.evaluation.numbers import numbers
from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.evaluation.records import Record
from verl_gdpo.evaluation.results import problems_of

GOLD = {"name": "Look", "parameters": {"id": "7", "n": 1}}
LINE = json.dumps(GOLD)
OTHER = json.dumps({"name": "Look", "parameters": {"id": "8", "n": 1}})


def write(folder, level, *answers):
    items = [{"system": "s", "user": "u", "answer": answer, "other": {}} for answer in answers]
    (folder / f"level-{level}-api_processed.json").write_text(json.dumps(items))


def questions(folder):
    return BENCHMARK.questions(Namespace(data=[folder]))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, 1, [GOLD], [GOLD])
    write(tmp_path, 2, GOLD)
    write(tmp_path, 3, [GOLD])
    return tmp_path


def calls(*lines):
    return "<think> t </think>\n<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "any_call", "all_calls"),
    [
        (calls(LINE), 1, 1),
        (calls(OTHER), 0, 0),
        (calls(LINE, OTHER), 1, 0),
        (calls(OTHER, LINE), 1, 0),
        (calls(LINE, LINE), 1, 0),
        (calls("no json", LINE), 1, 1),  # bad lines are skipped
        (calls(LINE.replace('"7"', "7")), 0, 0),  # "7" is no 7
        (calls(json.dumps(GOLD["parameters"])), 1, 0),  # parameters without a name
        (calls("3", LINE), 0, 0),  # ToolRL's search ends with a number,
        (calls("[3]", LINE), 1, 0),  # and not with a list
        (calls(json.dumps(LINE)), 1, 0),  # it reads a text again
        (calls('"no json"', LINE), 0, 0),
        (calls(OTHER) + calls(LINE), 1, 1),  # the last block counts
        (calls(LINE) + calls(OTHER), 0, 0),
        (LINE, 1, 1),  # no tag is needed
        ("<tool_call>" + LINE, 1, 1),
        ("", 0, 0),
        ("I cannot.", 0, 0),
        (calls("[" * 100_000), 0, 0),
        (calls("9" * 5000), 0, 0),
        (calls('{"name": ["Look"], "parameters": 1e999}'), 0, 0),
    ],
)
def test_an_answer_scores_as_toolrl_says_and_as_we_do(folder, text, any_call, all_calls):
    episode = questions(folder)[0].start()
    assert episode.prompt() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    ]
    episode.take(Answer(text, 5))
    assert episode.prompt() is None
    assert episode.scores() == {ANY: any_call, ALL: all_calls}


def test_a_question_that_is_too_long_is_wrong(folder):
    episode = questions(folder)[0].start()
    episode.abandon()
    assert episode.prompt() is None and episode.scores() == {ANY: 0, ALL: 0}


def test_the_whole_is_by_questions_and_the_levels_stand_beside(folder):
    dialogues = start_all(questions(folder), 1)
    assert [one.question.key for one in dialogues] == [
        *("level_1_0", "level_1_1", "level_2_0", "level_3_0")
    ]
    for one, text in zip(dialogues, [calls(LINE), "", calls(LINE), calls(LINE)], strict=True):
        one.go_on(Record("", Answer(text, 1)))
    found = numbers(BENCHMARK.columns([]), [*problems_of(dialogues).values()])
    assert [number.value for number in found] == [0.75, 0.75]
    assert [part.value for part in found[0].parts] == [0.5, 1, 1]


def test_a_level_that_is_not_there_gives_no_whole(tmp_path):
    write(tmp_path, 1, [GOLD])
    dialogues = start_all(questions(tmp_path), 1)
    dialogues[0].go_on(Record("", Answer(LINE, 1)))
    found = numbers(BENCHMARK.columns([]), [*problems_of(dialogues).values()])
    assert [number.value for number in found] == [None, None]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "got a JSON dict"),
        ("[", "no readable JSON"),
        ('[{"user": "u", "answer": {}}]', "item 0.*system"),
        ('[{"system": 1, "user": "u", "answer": {}}]', "item 0.*system: got int"),
        ('[{"system": "s", "user": "u", "answer": {"name": "f"}}]', "item 0.*parameters"),
        ('[{"system": "s", "user": "u", "answer": []}]', "item 0.*expected one call"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, said):
    (tmp_path / "level-2-api_processed.json").write_text(content)
    with pytest.raises(ValueError, match=f"level-2-api_processed.json.*{said}"):
        questions(tmp_path)


def test_the_folder_is_asked_for(tmp_path):
    for data in ([], [tmp_path / "nothing"], [tmp_path]):
        with pytest.raises(ValueError, match="--data"):
            BENCHMARK.questions(Namespace(data=data))
