"""BFCL-v3 as a whole, with the package's questions and scripted answers: `nox -s bfcl`."""

from argparse import Namespace

import bfcl_gold
import pytest

from verl_gdpo.evaluation.bfcl import BENCHMARK, SINGLE_TURN, data
from verl_gdpo.evaluation.bfcl.checker import LANGUAGES
from verl_gdpo.evaluation.bfcl.single_turn import question
from verl_gdpo.evaluation.numbers import Problem, numbers
from verl_gdpo.evaluation.questions import Answer

WITH_GROUND_TRUTH = [one for one in SINGLE_TURN if one not in data.WITHOUT_GROUND_TRUTH]
CALL = bfcl_gold.answer([("f", {})])
IN_THOUGHT = f"<think> {CALL} </think>\n<response> No. </response>"


def play(asked, text):
    """The problem that a policy leaves which always says the same."""
    episode, formats = asked.start(), []
    while episode.prompt() is not None:
        formats.append(episode.take(Answer(text, 1))["format"])
    answers = {"format": (sum(formats), len(formats))}
    return Problem(asked.category, episode.scores(), answers)


def table(text, groups):
    asked = BENCHMARK.questions(Namespace(bfcl_v3_categories=groups))
    found = numbers(BENCHMARK.columns(asked), [play(one, text) for one in asked])
    return {
        number.name: None if number.value is None else round(100 * number.value, 2)
        for number in found
    }


def test_silence():
    """Non-live has one category of five where it is right; live 882 questions of 2,251."""
    assert table("", None) == {
        **{"live": 39.18, "multi-turn": 0.0, "non-live": 20.0, "overall": 19.73},
        **{"format": 0.0, "format of steps": 0.0},
        **{"live, after <think>": 39.18, "non-live, after <think>": 20.0},
    }


@pytest.mark.parametrize(("text", "after_thought"), [(CALL, (0.8, 0)), (IN_THOUGHT, (39.18, 20))])
def test_always_a_call_of_nothing(text, after_thought):
    """Only the 18 questions of live_relevance ask for no call in particular."""
    live, non_live = after_thought
    found = table(text, ["live", "non_live"])
    assert found == {
        **{"live": 0.8, "multi-turn": None, "non-live": 0, "overall": None},
        **{"format": 100, "format of steps": None},
        **{"live, after <think>": live, "non-live, after <think>": non_live},
    }


# what no answer of ours can be: elements of lists that have another type than the document says,
# "" as the only value
@pytest.mark.parametrize("category", WITH_GROUND_TRUTH)
def test_the_ground_truth_is_right(category):
    rows, first, right = data.rows(category), 0, 0
    for row in rows:
        for number, calls in enumerate(bfcl_gold.right_calls(row, category)):
            if is_right(row, category, bfcl_gold.answer(calls)):
                first += number == 0
                right += 1
                break
    print(f"{category}: {right} of {len(rows)}, {first} with the first alternatives")
    assert right >= (0.98 if category == "java" else 0.99) * len(rows)


@pytest.mark.parametrize("category", WITH_GROUND_TRUTH)
def test_wrong_answers_score_as_the_packages_checker_says(category):
    check, language = data.ast_checker(), LANGUAGES.get(category, "Python")
    compared, right = 0, {}
    # an answer in Java or JavaScript takes a process
    for row in data.rows(category)[:: 10 if category in LANGUAGES else 1]:
        calls_of_gold = next(bfcl_gold.right_calls(row, category), [("none there", {})])
        for kind, (answer, calls) in bfcl_gold.wrong_answers(calls_of_gold).items():
            output = [{name: given} for name, given in calls]
            arguments = (row["function"], output, row["ground_truth"], language, category, "")
            # the package has no calls to look at where the JSON is broken
            said = bool(output) and check(*arguments)["valid"]
            assert is_right(row, category, answer) is said, (row["id"], kind, answer)
            compared, right[kind] = compared + 1, right.get(kind, 0) + said
    print(f"{category}: {compared} answers; right: {right}")


def is_right(row, category, text):
    episode = question(row, category).start()
    episode.take(Answer(text, 1))
    return episode.scores()["accuracy"] == 1
