"""What a policy reads and when a question ends, with a scripted package."""

import json

import bfcl_gold
import pytest

from verl_gdpo.evaluation.bfcl import episodes, form
from verl_gdpo.evaluation.bfcl.episodes import question
from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.tasks.tool_rl.form import render_answer


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

    monkeypatch.setattr(episodes.package, "ask", ask)
    return next_reply


def play(*texts, row=FOLDERS, episode=None):
    episode = episode or question(row).start()
    for text in texts:
        assert episode.prompt() is not None
        episode.take(Answer(text, 1))
    return episode


CALL = bfcl_gold.answer([("double", {"of": 2})])
IN_THOUGHT = f"<think> {CALL} </think>\n<response> 4. </response>"


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
    episode = asked.start()
    system, user = episode.prompt()
    assert "Description: Does double.\n" in system["content"]
    assert "<user> Double 2.\nIf there's no appropriate tools" in user["content"]
    expected = {"format": form, "accuracy": accuracy, "accuracy_after_thought": after_thought}
    assert episode.take(Answer(answer, 1)) == expected
    assert episode.prompt() is None
    assert episode.scores() == expected


@pytest.mark.parametrize(("category", "is_wanted"), [("irrelevance", 0), ("live_relevance", 1)])
def test_without_a_ground_truth_it_counts_whether_there_is_a_call(category, is_wanted):
    row = {**DOUBLE, "category": category, "gold": ""}
    for answer, right, later in (
        (CALL, is_wanted, is_wanted),
        ("", 1 - is_wanted, 1 - is_wanted),
        (IN_THOUGHT, is_wanted, 1 - is_wanted),
    ):
        scores = play(answer, row=row).scores()
        assert (scores["accuracy"], scores["accuracy_after_thought"]) == (right, later)


@pytest.mark.parametrize("category", ["simple", "irrelevance"])
def test_a_prompt_that_is_too_long_is_a_wrong_answer(category):
    episode = question({**DOUBLE, "category": category}).start()
    episode.abandon()
    assert episode.prompt() is None
    assert {*episode.scores().values()} == {0}


def test_an_answer_that_needs_too_much_is_wrong(package):
    package.append([])
    assert play(CALL, row=DOUBLE).scores()["accuracy"] == 0


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
    assert play(DONE, TWO).prompt() == form.prompt(FOLDERS["tools"], dialogue, multi_turn=True)
    dialogue += [{"role": "assistant", "content": DONE}, *asks("What is there?")]
    episode = play(DONE, TWO, DONE)
    assert episode.prompt() == form.prompt(FOLDERS["tools"], dialogue, multi_turn=True)


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
    episode = play(*texts)
    assert episode.prompt() is None
    assert episode.scores() == {"accuracy": expected}


def test_each_answer_has_a_format():
    episode = question(FOLDERS).start()
    formats = [episode.take(Answer(text, 1)) for text in (MKDIR, f"Sure. {MKDIR}", DONE)]
    assert formats == [{"format": 1.0}, {"format": 0.0}, {"format": 1.0}]


def test_an_abandoned_dialogue_is_wrong():
    for texts in ((), RIGHT):
        episode = play(*texts)
        episode.abandon()
        assert episode.prompt() is None
        assert episode.scores() == {"accuracy": 0.0}


def test_a_new_episode_with_the_answers_so_far_asks_the_same():
    for number in range(len(RIGHT)):
        asked = play(*RIGHT[:number]).prompt()
        again = question(FOLDERS).start()
        for text in RIGHT[:number]:
            again.take(Answer(text, 1))  # as a resume does: it does not look at the prompts
        assert again.prompt() == asked


def test_a_dialogue_that_once_needed_too_much_stays_wrong(package):
    episode = play(*RIGHT[:-1])
    package.append([])
    assert episode.prompt() is None
    assert episode.prompt() is None  # whatever the clock says the next time
    assert episode.scores() == {"accuracy": 0.0}
    unasked = play(*RIGHT)
    package.append([])
    assert unasked.scores() == {"accuracy": 0.0}
