"""All dialogues of BFCL-v3 with scripted answers, and against the package: `nox -s bfcl`.

The package keeps the state of its simulators, so each dialogue has a process of its own there. It
also writes the name of an object into texts such as "cd(": none of these is in the answers here.
"""

import ast
import json
import random
import subprocess
import sys

import pytest

from verl_gdpo.evaluation.bfcl import data, multi_turn, simulators
from verl_gdpo.evaluation.bfcl.form import MAX_STEPS, Call
from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.tasks.tool_rl.form import render_answer

CATEGORIES = data.GROUPS["multi_turn"]
DONE = render_answer("x", response_text="Done.")
# in the place of a parameter's value
VALUES = (
    *(None, -1, 0, 1.5, True, "x", "1", "(a (b c(", "\ud800\x00é", [], ["a", {"b": 1}], {}),
    *({"a": 1}, 10**400, 1e400, float("nan")),
)


@pytest.fixture(scope="module")
def documents():
    return data.documents()


def call(text, documents):
    """The call of a text of the ground truth."""
    parsed = ast.parse(text, mode="eval").body
    name = parsed.func.id
    (tool,) = [one for tools in documents.values() for one in tools if one["name"] == name]
    given = zip(tool["parameters"]["properties"], parsed.args, strict=False)
    named = [(one.arg, one.value) for one in parsed.keywords]
    return Call(name, {key: ast.literal_eval(value) for key, value in (*given, *named)})


def wrong_calls(right, rng):
    """Three wrong calls of a function, of some forty."""
    name, given = right.name, right.parameters
    found = [(other, given) for other in (f"{name}s", name.upper(), f"a.{name}", "a b", f"{name} ")]
    found += [("os.system", {"command": "true"}), ("kill", {}), ("", given | {"x": 1}), (name, {})]
    found += [(name, given | {key: 1}) for key in ("extra", "a b", "from", "x-y", "")]
    if given:
        key = rng.choice(sorted(given))
        found += [(name, given | {key: value}) for value in VALUES]
        found.append((name, {other: value for other, value in given.items() if other != key}))
    return [Call(*one) for one in rng.sample(found, 3)]


# what the package says of each line of [row, calls] and [row, turns of steps of calls]
PROGRAM = """if 1:
    import importlib, json, os, sys
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    [*map(importlib.import_module, multi_turn_utils.CLASS_FILE_PATH_MAPPING.values())]
    def said(row, given):
        if row["is_checked"]:
            check = multi_turn_checker.multi_turn_checker
            return check(given, row["ground_truth"], row, "", "a_test")["valid"]
        rest = row["initial_config"], row["involved_classes"], "a_test", row["id"]
        run = multi_turn_utils.execute_multi_turn_func_call
        return run(given, *rest, "long_context" in row["id"])[0]
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            print(json.dumps(said(*json.loads(line))), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
"""


def package_says(rows, given, *, is_checked):
    lines = [
        json.dumps([{**row, "is_checked": is_checked}, one])
        for row, one in zip(rows, given, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(lines), stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def play(asked, texts):
    episode = asked.start()
    for text in texts:
        assert episode.prompt() is not None
        episode.take(Answer(text, 1))
    return episode.scores()["accuracy"]


def answers(calls_of_turns):
    for calls in calls_of_turns:
        if calls:
            made = [{"name": one.name, "parameters": one.parameters} for one in calls]
            yield render_answer("x", made)
        yield DONE


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_ground_truth_is_right_also_after_wrong_answers(category, documents):
    right = wrong = 0
    rows = data.rows(category)
    for row in rows:
        gold = row["ground_truth"]
        asked = multi_turn.question(row, gold, documents, documents)
        calls = [[call(text, documents) for text in turn] for turn in gold]
        first = next(turn for turn in calls if turn)
        # each first turn with its last call twice over, then nothing
        wrong += play(asked, [*answers([[*first, first[-1]]]), *[DONE] * (len(gold) - 1)])
        right += play(asked, answers(calls))
    print(f"{category}: {right:g} of {len(rows)} right, {wrong:g} of the wrong ones")
    assert right == len(rows)
    assert wrong < 0.1 * len(rows)


@pytest.mark.parametrize("category", CATEGORIES)
def test_one_call_a_step_is_right_unless_a_turn_has_too_many(category, documents):
    for row in data.rows(category):
        gold = row["ground_truth"]
        asked = multi_turn.question(row, gold, documents, documents)
        texts = []
        for turn in gold:
            texts += [next(answers([[call(text, documents)]])) for text in turn[: MAX_STEPS + 1]]
            if len(turn) > MAX_STEPS:
                break
            texts.append(DONE)
        assert play(asked, texts) == all(len(turn) <= MAX_STEPS for turn in gold), row["id"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_results_are_those_of_the_package(category, documents):
    rng, rows = random.Random(0), data.rows(category)
    gold = [[text for turn in row["ground_truth"] for text in turn] for row in rows]
    made = [
        [
            one
            for text in texts
            for one in (text, *map(str, wrong_calls(call(text, documents), rng)))
        ]
        for texts in gold
    ]
    expected = package_says(rows, made, is_checked=False)
    for row, calls, theirs in zip(rows, made, expected, strict=True):
        (ours,) = simulators.results(row, [calls])
        assert [*zip(calls, ours, strict=True)] == [*zip(calls, theirs, strict=True)], row["id"]
    right, every = (sum(map(len, some)) for some in (gold, made))
    print(f"{category}: {right} calls of the ground truth and {every - right} wrong ones")


def wrong_dialogues(gold, documents, rng):
    """Calls of the steps of each turn, which may be right or wrong."""

    def changed(change):
        turns = [[list(turn)] if turn else [] for turn in gold]
        turn, index = rng.choice([(i, j) for i, turn in enumerate(gold) for j in range(len(turn))])
        wrong = str(wrong_calls(call(gold[turn][index], documents), rng)[0])
        change(turns[turn], turns[turn][0], index, wrong)
        return [[step for step in turn if step] for turn in turns]

    yield [[[text] for text in turn] for turn in gold]  # one call a step
    yield [[] for _ in gold]
    yield changed(lambda turn, step, index, wrong: step.pop(index))
    yield changed(lambda turn, step, index, wrong: step.insert(index, step[index]))
    yield changed(lambda turn, step, index, wrong: rng.shuffle(step))
    yield changed(lambda turn, step, index, wrong: turn.clear())
    yield changed(lambda turn, step, index, wrong: step.__setitem__(index, wrong))
    yield changed(lambda turn, step, index, wrong: turn.insert(0, [wrong]))


@pytest.mark.parametrize("category", CATEGORIES)
def test_dialogues_are_right_where_the_packages_checker_says_so(category, documents):
    rng, right = random.Random(1), 0
    asked = [
        (row, turns)
        for row in data.rows(category)
        for turns in wrong_dialogues(row["ground_truth"], documents, rng)
    ]
    expected = package_says(*zip(*asked, strict=True), is_checked=True)
    for (row, turns), theirs in zip(asked, expected, strict=True):
        assert simulators.is_right(row, turns, row["ground_truth"]) is theirs, (row["id"], turns)
        right += theirs
    print(f"{category}: {len(asked)} dialogues, {right} of them right")
