"""All questions of BFCL-v3, in the package's own environment, with scripted answers.

The dialogues, and what hostile calls cannot do, are in bfcl_dialogues.py.
"""

from argparse import Namespace

import bfcl_gold
import pytest

from verl_gdpo.tools.evaluate.benchmark import Answer
from verl_gdpo.tools.evaluate.bfcl import BENCHMARK, CATEGORIES, GROUPS, package, question
from verl_gdpo.tools.evaluate.dialogues import Dialogue, Record
from verl_gdpo.tools.evaluate.numbers import numbers
from verl_gdpo.tools.evaluate.results import problems_of

WITH_GROUND_TRUTH = [
    one for one in (*GROUPS["non_live"], *GROUPS["live"]) if "relevance" not in one
]
CALL = bfcl_gold.answer([("f", {})])
BLOCK = CALL.partition("</think>")[2].strip()
IN_THOUGHT = f"<think> {BLOCK} </think>\n<response> No. </response>"
# the kinds of wrong answers that can be right all the same
CAN_BE_RIGHT = {"missing", "optional", "order", "prose around"}


def asked(*names):
    return BENCHMARK.questions(Namespace(bfcl_v3_categories=names or None))


def play(question, text):
    """The dialogue with a policy that always says the same."""
    dialogue = Dialogue(question, 0)
    while dialogue.asks is not None:
        dialogue.go_on(Record("", Answer(text, 1)))
    return dialogue


def table(text, *names):
    problems = problems_of([play(one, text) for one in asked(*names)])
    made = numbers(BENCHMARK.columns, [*problems.values()])
    shown = [one for one in made if not one.name.startswith(" ")]
    return {one.name: None if one.value is None else round(100 * one.value, 2) for one in shown}


def test_silence():
    """Non-live has one category of five where it is right; live 882 questions of 2,251."""
    assert table("") == {
        **{"live": 39.18, "multi-turn": 0.0, "non-live": 20.0, "overall": 19.73},
        **{"format": 0.0, "format of steps": 0.0},
        **{"live, after <think>": 39.18, "non-live, after <think>": 20.0},
    }


@pytest.mark.parametrize(("text", "after_thought"), [(CALL, (0.8, 0)), (IN_THOUGHT, (39.18, 20))])
def test_always_a_call_of_nothing(text, after_thought):
    """Only the 18 questions of live_relevance ask for no call in particular."""
    live, non_live = after_thought
    assert table(text, "live", "non_live") == {
        **{"live": 0.8, "multi-turn": None, "non-live": 0, "overall": None},
        **{"format": 100, "format of steps": None},
        **{"live, after <think>": live, "non-live, after <think>": non_live},
    }


def test_the_questions_have_different_names():
    keys = [one.key for one in asked()]
    assert len(keys) == len({*keys}) == 4441
    # the package has two of this name
    assert {"live_relevance_3-3-0", "live_relevance_3-3-0.2"} < {*keys}
    assert [*dict.fromkeys(one.category for one in asked())] == [*CATEGORIES]


def test_hints_about_the_language_are_for_the_prompt_alone():
    row, *_ = package.ask("java", "questions", "java")[0]
    (tool,) = row["tools"]
    assert "in Java 8 SDK syntax." in tool["description"]
    assert {one["type"] for one in tool["parameters"]["properties"].values()} == {"string"}
    assert package.ask("java", "questions", "java")[0][0] == row


# what no answer of ours can be: elements of lists that have another type than the document says,
# "" as the only value
@pytest.mark.parametrize("category", WITH_GROUND_TRUTH)
def test_the_ground_truth_is_right_and_what_is_changed_is_wrong(category):
    right, total, wrong = 0, 0, {}
    functions = bfcl_gold.functions(category, package.environment())
    for row in package.ask(category, "questions", category)[0]:
        total += 1
        gold = {"function": functions[row["key"]], "ground_truth": row["gold"]}
        made = [*bfcl_gold.right_calls(gold, category)]
        right += any(is_right(row, bfcl_gold.answer(calls)) for calls in made)
        first = next(iter(made), [("none there", {})])
        for kind, (text, _) in bfcl_gold.wrong_answers(first).items():
            wrong[kind] = wrong.get(kind, 0) + is_right(row, text)
    print(f"{category}: {right} of {total}; of the wrong ones: {wrong}")
    assert right >= (0.98 if category == "java" else 0.99) * total
    assert all(count == 0 or kind in CAN_BE_RIGHT for kind, count in wrong.items())


def is_right(row, text):
    return play(question(row), text).outcome.scores["accuracy"] == 1


@pytest.mark.parametrize("category", GROUPS["non_live"][:2])
@pytest.mark.parametrize(
    "value",
    [{"x": 1}, float("nan"), "9" * 5000, "__import__('os').abort()", "new Array([]" + ",[]" * 60],
)
def test_a_hostile_answer_is_wrong(category, value):
    row, *_ = package.ask(category, "questions", category)[0]
    (gold,) = row["gold"]
    ((name, parameters),) = gold.items()
    calls = [(name, dict.fromkeys(parameters, value))]
    assert not is_right(row, bfcl_gold.answer(calls))
