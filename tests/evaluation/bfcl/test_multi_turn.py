"""The dialogues: what a policy reads, when a turn ends, and what is right."""

import json

import pytest

from verl_gdpo.evaluation.bfcl import form, multi_turn, simulators
from verl_gdpo.evaluation.bfcl.simulators import LimitError
from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.sandbox.limited_process import LimitedPool
from verl_gdpo.tasks.tool_rl.form import render_answer


def document(name, hint=""):
    described = {"name": name, "description": f"Does {name}.{hint}"}
    return {**described, "parameters": {"type": "dict", "properties": {}}}


NAMES = ("ls", "mkdir", "power")
CLASSES = {"GorillaFileSystem": ("ls", "mkdir"), "MathAPI": ("power",)}
DOCUMENTS = {name: [document(one) for one in names] for name, names in CLASSES.items()}
HINTED = {name: [document(one, " In Python.") for one in names] for name, names in CLASSES.items()}
ENTRY = {
    "id": "multi_turn_miss_func_7",
    "question": [
        [{"role": "user", "content": "Make a folder x."}],
        [],
        [{"role": "user", "content": "What is there?"}],
    ],
    "initial_config": {},
    "involved_classes": list(CLASSES),
    "missed_function": {"1": ["mkdir"]},
}
GOLD = [[], ["mkdir(dir_name='x')"], ["ls()"]]


def start(entry=ENTRY, gold=GOLD):
    return multi_turn.question(entry, gold, DOCUMENTS, HINTED).start()


def calling(*calls):
    made = [{"name": name, "parameters": parameters} for name, parameters in calls]
    return render_answer("Hm.", made)


MKDIR, LS = calling(("mkdir", {"dir_name": "x"})), calling(("ls", {}))
TWO = calling(("ls", {"a": "y"}), ("lsx", {}))
DONE = render_answer("Hm.", response_text="Done.")
RIGHT = (DONE, MKDIR, DONE, LS, DONE)


def play(*texts, episode=None):
    episode = episode or start()
    for text in texts:
        assert episode.prompt() is not None
        episode.take(Answer(text, 1))
    return episode


def test_a_question():
    question = multi_turn.question(ENTRY, GOLD, DOCUMENTS, HINTED)
    assert (question.key, question.category) == ("multi_turn_miss_func_7", "multi_turn_miss_func")
    assert question.ground_truth == "\nmkdir(dir_name='x')\nls()"


def test_turns_without_gold_raise():
    with pytest.raises(ValueError, match=r"_7: got 3 turns and the gold calls of 2; expected as"):
        multi_turn.question(ENTRY, GOLD[1:], DOCUMENTS, HINTED)


def test_a_policy_reads_the_dialogue_and_the_results_of_its_calls():
    system, user = play(DONE, TWO, DONE).prompt()
    tools = system["content"].split("tools:\n")[1].split("\n\n**Steps")[0]
    assert [line for line in tools.split("\n") if line[0].isdigit() or line[0] == "D"] == [
        "1. Name: ls",
        "Description: Does ls. In Python.",
        "2. Name: power",  # mkdir is missing
        "Description: Does power. In Python.",
    ]
    revealed = str([document("mkdir")])
    expected = form.prompt(
        [*HINTED["GorillaFileSystem"][:1], *HINTED["MathAPI"]],
        [
            {"role": "user", "content": "Make a folder x."},
            {"role": "assistant", "content": DONE},
            {
                "role": "user",
                "content": f"{revealed}\nI have updated some more functions you can choose from. "
                "What about now?",
            },
            {"role": "assistant", "content": TWO},
            {"role": "tool", "name": "ls(a='y')", "content": '{"current_directory_content": []}'},
            {
                "role": "tool",
                "name": "lsx()",
                "content": "Error during execution: name 'lsx' is not defined",
            },
            {"role": "assistant", "content": DONE},
            {"role": "user", "content": "What is there?"},
        ],
        multi_turn=True,
    )
    assert [system, user] == expected


def test_after_results_a_policy_goes_on_in_the_same_turn():
    texts = [play(DONE, *[MKDIR] * steps).prompt()[1]["content"] for steps in (1, 2)]
    assert all(text.endswith("from now on. </user>") for text in texts)
    assert [text.count("What is there?") for text in texts] == [0, 0]
    assert [text.count("File exists") for text in texts] == [0, 1]  # of one file system


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (RIGHT, 1),
        ((MKDIR, DONE, MKDIR, DONE, LS, DONE), 1),  # it knew the function before
        ((DONE, LS, MKDIR, DONE, LS, DONE), 1),  # looked first
        ((DONE, DONE, DONE), 0),
        ((DONE, MKDIR, DONE, DONE), 0),
        ((DONE, DONE, MKDIR, LS, DONE), 0),  # late
        ((DONE, "no calls", LS, DONE), 0),
    ],
)
def test_the_accuracy_of_a_dialogue(texts, expected):
    episode = play(*texts)
    assert episode.prompt() is None
    assert episode.scores() == {"accuracy": expected}


def test_a_call_without_parameters_is_made():
    texts = (text.replace(', "parameters": {}', "") for text in RIGHT)
    assert play(*texts).scores() == {"accuracy": 1}


def test_each_answer_has_a_format():
    episode = start()
    formats = [episode.take(Answer(text, 1)) for text in (MKDIR, f"Sure. {MKDIR}", DONE)]
    assert formats == [{"format": 1.0}, {"format": 0.0}, {"format": 1.0}]


def test_a_turn_has_twenty_steps_with_calls():
    steps = form.MAX_STEPS
    episode = play(DONE, *[MKDIR] * steps, DONE, LS, DONE)
    assert episode.scores() == {"accuracy": 1.0}
    episode = play(DONE, *[MKDIR] * (steps + 1))
    assert episode.prompt() is None
    assert episode.scores() == {"accuracy": 0.0}


def test_of_a_last_turn_that_is_too_long_the_checker_decides():
    right = play(DONE, MKDIR, DONE, *[LS] * (form.MAX_STEPS + 1))
    wrong = play(DONE, MKDIR, DONE, *[MKDIR] * (form.MAX_STEPS + 1))
    assert right.prompt() is wrong.prompt() is None
    assert (right.scores(), wrong.scores()) == ({"accuracy": 1.0}, {"accuracy": 0.0})


def test_an_abandoned_dialogue_is_wrong():
    for texts in ((), RIGHT):
        episode = play(*texts)
        episode.abandon()
        assert episode.prompt() is None
        assert episode.scores() == {"accuracy": 0.0}


def test_a_new_episode_with_the_answers_so_far_asks_the_same():
    for number in range(len(RIGHT)):
        asked = play(*RIGHT[:number]).prompt()
        again = start()
        for text in RIGHT[:number]:
            again.take(Answer(text, 1))  # as a resume does: it does not look at the prompts
        assert again.prompt() == asked


def test_episodes_of_a_question_share_nothing():
    question = multi_turn.question(ENTRY, GOLD, DOCUMENTS, HINTED)
    one, other = question.start(), question.start()
    for text in RIGHT:  # side by side
        play(text, episode=one)
        play(text.replace("mkdir", "ls").replace("dir_name", "b"), episode=other)
    assert (one.scores(), other.scores()) == ({"accuracy": 1.0}, {"accuracy": 0.0})
    assert play(*RIGHT, episode=question.start()).scores() == {"accuracy": 1.0}
    assert ENTRY["question"][1] == []


def test_calls_that_need_too_much_end_the_dialogue_as_wrong(monkeypatch):
    pool = LimitedPool(simulators.simulators_inside.__file__, 0.3, simulators.LIMIT_BYTES)
    monkeypatch.setattr(simulators, "_pool", pool)
    entry = {**ENTRY, "question": [[{"role": "user", "content": "Compute."}]]}
    del entry["missed_function"]
    question = multi_turn.question(entry, [["ls()"]], DOCUMENTS, HINTED)
    power = calling(("ls", {}), ("power", {"base": 9, "exponent": 999999999}))
    episode = play(power, episode=question.start())
    assert episode.prompt() is None
    assert episode.scores() == {"accuracy": 0.0}
    unasked = question.start()  # as a resume does
    for text in (power, DONE):
        unasked.take(Answer(text, 1))
    assert unasked.scores() == {"accuracy": 0.0}


def test_a_dialogue_that_once_needed_too_much_stays_wrong(monkeypatch):
    episode = play(*RIGHT[:-1])

    def late(*_):
        raise LimitError

    with monkeypatch.context() as patch:
        patch.setattr(simulators, "results", late)
        assert episode.prompt() is None
    assert episode.prompt() is None  # whatever the clock says the next time
    assert episode.scores() == {"accuracy": 0.0}


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "ls(a=1) or ls", "parameters": {}}',
        '{"name": "ls", "parameters": {"a=__import__(\'os\').abort(), b": 1}}',
        '{"name": "ls", "parameters": {"a": NaN}}',
        '{"name": "\\ud800", "parameters": {"\\udfff": "\\ud800"}}',
        '{"name": "ls", "parameters": {"a": ' + "[" * 900 + "]" * 900 + "}}",
        json.dumps({"name": "ls" * 50_000, "parameters": {}}),
    ],
)
def test_hostile_calls_are_answered_with_an_error(line):
    prompt = play(DONE, f"<tool_call>\n{line}\n</tool_call>").prompt()
    prompt[1]["content"].encode()  # a tokenizer can read it
    assert "Execution returns: Error during execution: " in prompt[1]["content"]
