"""An answer to a question of a single turn, from the prompt to its scores."""

import bfcl_gold
import pytest

from verl_gdpo.evaluation.bfcl.single_turn import question
from verl_gdpo.evaluation.questions import Answer

ROW = {
    "id": "simple_7",
    "question": [[{"role": "user", "content": "Double 2."}]],
    "function": [
        {
            "name": "double",
            "description": "Doubles.",
            "parameters": {
                "type": "dict",
                "properties": {"of": {"type": "integer", "description": "?"}},
                "required": ["of"],
            },
        }
    ],
    "ground_truth": [{"double": {"of": [2]}}],
}
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
def test_an_answer(answer, accuracy, after_thought, form):
    asked = question(ROW, "simple")
    assert (asked.key, asked.category) == ("simple_7", "simple")
    episode = asked.start()
    system, user = episode.prompt()
    assert (
        "Description: Doubles. Note that the provided function is in Python 3" in system["content"]
    )
    assert "<user> Double 2.\nIf there's no appropriate tools" in user["content"]
    expected = {"format": form, "accuracy": accuracy, "accuracy_after_thought": after_thought}
    assert episode.take(Answer(answer, 1)) == expected
    assert episode.prompt() is None
    assert episode.scores() == expected


def test_where_no_function_fits_a_call_in_the_thought_counts_by_one_rule_only():
    episode = question({**ROW, "ground_truth": ""}, "irrelevance").start()
    episode.take(Answer(IN_THOUGHT, 1))
    assert episode.scores() == {"format": 1, "accuracy": 0, "accuracy_after_thought": 1}


def test_a_prompt_that_is_too_long_is_a_wrong_answer():
    for category in ("simple", "irrelevance"):
        episode = question(ROW, category).start()
        episode.abandon()
        assert episode.prompt() is None
        assert {*episode.scores().values()} == {0}
