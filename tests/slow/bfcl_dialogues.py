"""All dialogues of BFCL-v3 with scripted answers, and hostile calls in them."""

import ast
import json
import os
import signal
import subprocess

import pytest

from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.tools.evaluate.benchmark import Answer
from verl_gdpo.tools.evaluate.bfcl import GROUPS, package, question
from verl_gdpo.tools.evaluate.bfcl.form import MAX_STEPS, Call
from verl_gdpo.tools.evaluate.dialogues import Dialogue, Record

CATEGORIES = GROUPS["multi_turn"]
DONE = render_answer("x", response_text="Done.")


def rows(category):
    return package.ask(category, "questions", category)[0]


def results(row, *calls):
    return package.ask(row["category"], "results", row["key"], [calls])


def calls_of(text, row):
    """The call of a text of the ground truth."""
    parsed = ast.parse(text, mode="eval").body
    tools = {tool["name"]: tool for tool in [*row["tools"], *revealed(row)]}
    given = zip(tools[parsed.func.id]["parameters"]["properties"], parsed.args, strict=False)
    named = [(one.arg, one.value) for one in parsed.keywords]
    return Call(parsed.func.id, {key: ast.literal_eval(value) for key, value in (*given, *named)})


def revealed(row):
    """The functions that the user reveals in a later turn."""
    texts = [message["content"] for turn in row["turns"][1:] for message in turn]
    lists = [text.split("\n")[0] for text in texts if text.startswith("[{")]
    return [tool for text in lists for tool in ast.literal_eval(text)]


def play(row, texts):
    dialogue = Dialogue(question(row), 0)
    for text in texts:
        assert dialogue.asks is not None
        dialogue.go_on(Record("", Answer(text, 1)))
    return dialogue.outcome.scores["accuracy"]


def answers(calls_of_turns):
    for calls in calls_of_turns:
        if calls:
            made = [{"name": one.name, "parameters": one.parameters} for one in calls]
            yield render_answer("x", made)
        yield DONE


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_ground_truth_is_right_also_after_wrong_answers(category):
    right = wrong = 0
    for row in rows(category):
        calls = [[calls_of(text, row) for text in turn] for turn in row["gold"]]
        first = next(turn for turn in calls if turn)
        # each first turn with its last call twice over, then nothing
        rest = [DONE] * (len(calls) - 1)
        wrong += play(row, [*answers([[*first, first[-1]]]), *rest])
        right += play(row, answers(calls))
    print(f"{category}: {right:g} right, {wrong:g} of the wrong ones")
    assert right == 200
    assert wrong < 0.1 * 200


def test_one_call_a_step_is_right_unless_a_turn_has_too_many():
    for row in rows(CATEGORIES[0]):
        texts = []
        for turn in row["gold"]:
            texts += [next(answers([[calls_of(text, row)]])) for text in turn[: MAX_STEPS + 1]]
            if len(turn) > MAX_STEPS:
                break
            texts.append(DONE)
        expected = all(len(turn) <= MAX_STEPS for turn in row["gold"])
        assert play(row, texts) == expected, row["key"]


@pytest.fixture(scope="module")
def folders():
    """A dialogue about files."""
    return next(row for row in rows(CATEGORIES[0]) if "'cat'" in str(row["tools"]))


@pytest.mark.parametrize(
    "call",
    [
        "__import__('os').system('touch FILE')",
        "cd(folder=open('FILE', 'w'))",
        "open(file='FILE', mode='w')",
        "open(file='/etc/passwd').read()",
        "__import__('subprocess').run(['touch', 'FILE'])",
        "__import__('socket').create_connection(('127.0.0.1', PORT))",
        "__import__('os').kill(PID, 9)",
        "setattr(__import__('bfcl_eval'), 'changed', 1)",
        "cat(file_name='/etc/passwd')",
    ],
)
def test_an_attack_does_nothing(folders, call, tmp_path):
    file = tmp_path / "file"
    before = results(folders, "pwd()", "ls()")
    with subprocess.Popen(["sleep", "60"]) as other:
        text = call.replace("FILE", str(file)).replace("PID", str(other.pid)).replace("PORT", "9")
        reply = json.dumps(results(folders, text))
        assert other.poll() is None
        other.kill()
    assert "root:" not in reply
    assert not file.exists()
    assert results(folders, "pwd()", "ls()") == before
    assert "no attribute" in json.dumps(results(folders, "__import__('bfcl_eval').changed"))


@pytest.mark.parametrize(
    "call",
    [
        "9**9**9",
        "'x' * 3_000_000_000",
        "'x' * (1 << 25)",
        "__import__('os')._exit(0)",
        "__import__('os').abort()",
        "__import__('sys').exit(0)",
        "__import__('ctypes').string_at(0)",
    ],
)
def test_what_needs_too_much_or_ends_its_process_ends_its_dialogue_alone(folders, call):
    answer = results(folders, "ls()", call)
    assert answer == [] or "Error" in answer[0][0][1]
    assert len(results(folders, "pwd()")) == 1
    calls = [[[call]], *[[]] * (len(folders["gold"]) - 1)]
    asked = (folders["category"], "is_right_dialogue", folders["key"], calls)
    assert package.ask(*asked) in ([], [False])


def test_a_module_that_is_imported_when_it_is_needed_is_there():
    row = next(row for row in rows(CATEGORIES[0]) if "update_market_status" in str(row["gold"]))
    reply = results(row, "update_market_status(current_time_str='10:30 AM')")
    assert reply == [[['{"status": "Open"}']]]


def test_a_default_argument_is_new_in_the_next_request(folders):
    first = results(folders, "ls()", "mkdir(dir_name='new')", "ls()")
    assert results(folders, "ls()", "mkdir(dir_name='new')", "ls()") == first


def test_a_killed_process_stops_the_evaluation_and_says_so(folders):
    os.kill(package._process(True).pid, signal.SIGKILL)
    with pytest.raises(OSError, match="has ended with -9"):
        results(folders, "ls()")
    package._process.cache_clear()
    assert len(rows(CATEGORIES[0])) == 200
