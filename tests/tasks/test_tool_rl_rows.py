"""Synthetic rows: what must hold for every row and every seed."""

import json

import pytest

from verl_gdpo.tasks.tool_rl import form as contract
from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.call_formats import CALL_FORMATS
from verl_gdpo.tasks.tool_rl.rows import in_call_format, make_rows

COUNT = 1500


@pytest.fixture(scope="module")
def splits():
    return {split: [*make_rows(COUNT, split=split, seed=7)] for split in ("train", "test")}


def answer(row):
    return row["reward_model"]["ground_truth"]


def gold_calls(row):
    if contract.TOOL_CALL_OPEN not in answer(row):
        return []
    block = answer(row).split(contract.TOOL_CALL_OPEN)[1].split(contract.TOOL_CALL_CLOSE)[0]
    return [json.loads(line) for line in block.strip().splitlines()]


def test_each_row_can_be_answered(splits):
    """Gold answers have full marks, and their values are copied from the request."""
    for row in splits["train"] + splits["test"]:
        calls, (system, user) = gold_calls(row), (one["content"] for one in row["prompt"])
        full = {"format": 1.0, "correctness": 3.0 if calls else 0.0}
        assert tool_rl.score(answer(row), answer(row)) == full
        assert ("no tool" in user) == (not calls)
        for call in calls:
            assert call["name"] in system
            assert all(str(value) in user for value in call["parameters"].values())


def test_kinds_and_numbers_of_calls(splits):
    for rows in splits.values():
        calls = [len(gold_calls(row)) for row in rows]
        # of 1,500 rows a tenth (standard deviation 12) wants no call; of the other 1,350 half,
        # three and two tenths (standard deviations below 19) want one, two and three calls
        shares = {0: 150, 1: 675, 2: 405, 3: 270}
        for number, expected in shares.items():
            assert abs(calls.count(number) - expected) < 95
        assert set(calls) == set(shares)


def test_the_test_split_is_new(splits):
    seen = {}
    for split, rows in splits.items():
        calls = [call for row in rows for call in gold_calls(row)]
        values = {v for call in calls for v in call["parameters"].values()}
        seen[split] = (
            {call["name"] for call in calls},
            {frozenset(call["parameters"]) for call in calls},
            values,
        )
    for in_train, in_test in zip(seen["train"], seen["test"], strict=True):
        assert len(in_test) >= 10
        assert not in_train & in_test


# --- the format ----------------------------------------------------------------------------------

CALL = {"name": "f", "parameters": {"a": "ä", "b": 1.5, "c": True, "d": None}}


def test_render_answer():
    line = '{"name": "f", "parameters": {"a": "ä", "b": 1.5, "c": true, "d": null}}'
    calls = f"<tool_call>\n{line}\n{line}\n</tool_call>"
    assert contract.render_answer("x", [CALL, CALL]) == f"<think> x </think>\n{calls}"
    both = contract.render_answer("x", [CALL], "Done.")
    assert both.endswith("\n</tool_call>\n<response> Done. </response>")
    for gold in (both, contract.render_answer("x"), contract.render_answer("x", [CALL])):
        assert tool_rl.score(gold, gold)["format"] == 1.0


def test_the_prompt_names_tools_and_types():
    types = {"city": "string", "nights": "integer"}
    prompt = contract.compact_system_prompt({"book_hotel": types})
    assert prompt == 'Tools:\nbook_hotel {"city": "string", "nights": "integer"}'


@pytest.mark.parametrize("call_format", ["hermes", "qwen3_coder", "llama3_json"])
def test_calls_of_earlier_turns_are_written_in_the_format_that_is_taught(call_format):
    """As of ToolRL's dialogues, which stand in the message of the user."""
    (row,) = make_rows(1, split="train", seed=0)
    calls = [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": "two"}}]
    before = CALL_FORMATS["toolrl"].write(calls)
    unread = "<tool_call>\nno call\n</tool_call>"
    row["prompt"][1]["content"] += f"<think> x </think>\n{before}\n{unread}\nGo on."
    asked = in_call_format(row, call_format)["prompt"][1]
    assert before not in asked["content"] and unread in asked["content"]
    assert f"</think>\n{CALL_FORMATS[call_format].write(calls)}\n" in asked["content"]
    assert in_call_format(row, "toolrl")["prompt"][1] == row["prompt"][1]
