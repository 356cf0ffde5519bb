"""What a policy reads and when a question ends, with a scripted package."""

import json

import bfcl_gold
import pytest

from verl_gdpo.scoring.response import Response, Turn
from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.tools.evaluate import bfcl
from verl_gdpo.tools.evaluate.benchmark import Answer
from verl_gdpo.tools.evaluate.bfcl import form, question
from verl_gdpo.tools.evaluate.dialogues import Dialogue, Record


def document(name):
    described = {"name": name, "description": f"Does {name}."}
    return {**described, "parameters": {"type": "dict", "properties": {}}}


def asks(text):
    return [{"role": "user", "content": text}]


DOUBLE = {
    **{"key": "simple_7", "category": "simple", "tools": [document("double")]},
    **{"turns": [asks("Double 2.")], "gold": [{"double": {"of": [2]}}]},
}
FOLDERS = {
    **{"key": "multi_turn_base_7", "category": "multi_turn_base"},
    "tools": [document("ls"), document("mkdir")],
    "turns": [asks("Make a folder x."), asks("mkdir"), asks("What is there?")],
    "gold": [[], ["mkdir(dir_name='x')"], ["ls()"]],
}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """Replies as the package would; returns what the next reply is, if a test says so."""
    next_reply = []

    def ask(_category, task, _key, asked):
        if next_reply:
            return next_reply.pop()
        if task == "is_right":
            return [asked == [{"double": {"of": 2}}]]
        if task == "results":
            return [[[f"made {call}" for call in calls] for calls in asked]]
        made = [[call for calls in turn for call in calls] for turn in asked]
        return [all({*gold} <= {*calls} for gold, calls in zip(FOLDERS["gold"], made, strict=True))]

    monkeypatch.setattr(bfcl.package, "ask", ask)
    return next_reply


def play(*texts, row=FOLDERS):
    """The dialogue after these answers; None is a prompt that was too long."""
    dialogue = Dialogue(question(row), 0)
    for text in texts:
        assert dialogue.asks is not None
        dialogue.go_on(Record("", None if text is None else Answer(text, 1)))
    return dialogue


CALL = bfcl_gold.answer([("double", {"of": 2})])
BLOCK = CALL.partition("</think>")[2].strip()
IN_THOUGHT = f"<think> {BLOCK} </think>\n<response> 4. </response>"


OPENED = "<think>\n"
CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "given", "accuracy", "after_thought", "form"),
    [
        # The call stands in a thought that the prompt opens, and that ends behind it.
        (IN_THOUGHT.removeprefix("<think> "), OPENED, 1, 0, 1),
        (CALL.removeprefix("<think> "), OPENED, 1, 1, 1),
        # The thought never ends, so what follows it is nothing.
        (CALL.rpartition("</think>")[2], OPENED, 1, 0, 0),
        (CALL.rpartition("</think>")[2].lstrip(), CLOSED, 1, 1, 1),
        # The first closing tag ends the thought, as in training.
        (f"<think> x </think>\n{CALL}", "", 1, 1, 1),
    ],
)
def test_an_answer_behind_a_template_that_thinks(text, given, accuracy, after_thought, form):
    dialogue = Dialogue(question(DOUBLE), 0)
    answer = Answer(text, 1, read=Response((Turn(text, given),), 1))
    dialogue.go_on(Record("", answer))
    assert dialogue.outcome.scores == {
        "format": form,
        "accuracy": accuracy,
        "accuracy_after_thought": after_thought,
    }


@pytest.mark.parametrize(
    ("answer", "accuracy", "after_thought", "form"),
    [
        (CALL, 1, 1, 1),
        (CALL.replace("2", "3"), 0, 0, 1),
        (CALL.replace("think", "thought"), 1, 1, 0),  # accuracy does not ask for the form
        ("<think> x </think>\n<response> 4. </response>", 0, 0, 1),
        (IN_THOUGHT, 1, 0, 1),
        ("", 0, 0, 0),
    ],
)
def test_an_answer_in_a_single_turn(answer, accuracy, after_thought, form):
    asked = question(DOUBLE)
    assert (asked.key, asked.category) == ("simple_7", "simple")
    assert json.loads(asked.ground_truth) == DOUBLE["gold"]
    system, user = play(row=DOUBLE).asks
    assert "Description: Does double.\n" in system["content"]
    assert "<user> Double 2.\nIf there's no appropriate tools" in user["content"]
    expected = {"format": form, "accuracy": accuracy, "accuracy_after_thought": after_thought}
    ended = play(answer, row=DOUBLE)
    assert ended.asks is None
    assert ended.outcome == (expected, [expected])


@pytest.mark.parametrize(("category", "is_wanted"), [("irrelevance", 0), ("live_relevance", 1)])
def test_without_a_ground_truth_it_counts_whether_there_is_a_call(category, is_wanted):
    row = {**DOUBLE, "category": category, "gold": ""}
    for answer, right, later in (
        (CALL, is_wanted, is_wanted),
        ("", 1 - is_wanted, 1 - is_wanted),
        (IN_THOUGHT, is_wanted, 1 - is_wanted),
    ):
        scores = play(answer, row=row).outcome.scores
        assert (scores["accuracy"], scores["accuracy_after_thought"]) == (right, later)


@pytest.mark.parametrize("category", ["simple", "irrelevance"])
def test_a_prompt_that_is_too_long_is_a_wrong_answer(category):
    ended = play(None, row={**DOUBLE, "category": category, "gold": ""})
    assert ended.asks is None
    assert {*ended.outcome.scores.values()} == {0} and not ended.outcome.of_answers


def test_an_answer_that_needs_too_much_is_wrong(package):
    package.append([])
    assert play(CALL, row=DOUBLE).outcome.scores["accuracy"] == 0


def calling(*calls):
    made = [{"name": name, "parameters": parameters} for name, parameters in calls]
    return render_answer("Hm.", made)


MKDIR, LS = calling(("mkdir", {"dir_name": "x"})), calling(("ls", {}))
TWO = calling(("ls", {"a": "y"}), ("lsx", {}))
DONE = render_answer("Hm.", response_text="Done.")
RIGHT = (DONE, MKDIR, DONE, LS, DONE)


def test_a_policy_reads_the_dialogue_and_the_results_of_its_calls():
    asked = question(FOLDERS)
    assert asked.ground_truth == "\nmkdir(dir_name='x')\nls()"
    dialogue = [
        *asks("Make a folder x."),
        {"role": "assistant", "content": DONE},
        *asks("mkdir"),
        {"role": "assistant", "content": TWO},
        {"role": "tool", "name": "ls(a='y')", "content": "made ls(a='y')"},
        {"role": "tool", "name": "lsx()", "content": "made lsx()"},
    ]
    assert play(DONE, TWO).asks == form.prompt(FOLDERS["tools"], dialogue, multi_turn=True)
    dialogue += [{"role": "assistant", "content": DONE}, *asks("What is there?")]
    assert play(DONE, TWO, DONE).asks == form.prompt(FOLDERS["tools"], dialogue, multi_turn=True)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (RIGHT, 1),
        ((text.replace(', "parameters": {}', "") for text in RIGHT), 1),
        ((DONE, DONE, DONE), 0),
        ((DONE, DONE, MKDIR, LS, DONE), 0),  # late
        ((DONE, "no calls", LS, DONE), 0),
        # a turn has twenty steps with calls
        ((DONE, *[MKDIR] * form.MAX_STEPS, DONE, LS, DONE), 1),
        ((DONE, *[MKDIR] * (form.MAX_STEPS + 1)), 0),
        # of a last turn that is too long, the checker decides
        ((DONE, MKDIR, DONE, *[LS] * (form.MAX_STEPS + 1)), 1),
        ((DONE, MKDIR, DONE, *[MKDIR] * (form.MAX_STEPS + 1)), 0),
    ],
)
def test_the_accuracy_of_a_dialogue(texts, expected):
    ended = play(*texts)
    assert ended.asks is None
    assert ended.outcome.scores == {"accuracy": expected}


def test_each_answer_has_a_format():
    ended = play(MKDIR, f"Sure. {MKDIR}", DONE, None)
    assert ended.outcome.of_answers == [{"format": 1.0}, {"format": 0.0}, {"format": 1.0}]


def test_an_abandoned_dialogue_is_wrong():
    for texts in ((), RIGHT[:-1]):
        ended = play(*texts, None)
        assert ended.asks is None
        assert ended.outcome.scores == {"accuracy": 0.0}


def test_a_dialogue_that_once_needed_too_much_stays_wrong(package):
    for number in (1, 4):  # the results of a call, and what the checker says
        dialogue = play(*RIGHT[:number])
        package.append([])
        dialogue.go_on(Record("", Answer(RIGHT[number], 1)))
        assert dialogue.asks is None
        assert dialogue.outcome.scores == {"accuracy": 0.0}
