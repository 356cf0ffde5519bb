"""Synthetic rows: what must hold for every row and every seed."""

import json
import os
import subprocess
import sys

import pytest
from repository import REPO

from verl_gdpo.data_prep.tool_rl import KINDS, TOOLS, make_rows
from verl_gdpo.rewards import tool_rl
from verl_gdpo.rewards import tool_rl_format as contract

SIZES = ("tiny", "full")
COUNT = 1500


@pytest.fixture(scope="module", params=SIZES)
def splits(request):
    return {
        split: make_rows(COUNT, split=split, seed=7, size=request.param)
        for split in ("train", "test")
    }


def answer(row):
    return row["reward_model"]["ground_truth"]


def gold_calls(row):
    if row["extra_info"]["kind"] == "response":
        return []
    block = answer(row).split(contract.TOOL_CALL_OPEN)[1].split(contract.TOOL_CALL_CLOSE)[0]
    return [json.loads(line) for line in block.strip().splitlines()]


def text(row):
    return "\n".join(message["content"] for message in row["prompt"])


def test_gold_answers_get_full_marks(splits):
    for row in splits["train"] + splits["test"]:
        full = {"format": 1.0, "correctness": 3.0 if row["extra_info"]["calls"] else 0.0}
        assert tool_rl.score(answer(row), answer(row)) == full


def test_schema(splits):
    for split, rows in splits.items():
        for index, row in enumerate(rows):
            assert set(row) == {
                "data_source", "prompt", "ability", "reward_model", "extra_info",
            }  # fmt: skip
            assert (row["data_source"], row["ability"]) == ("rlla", "tool_calling")
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert row["reward_model"] == {"style": "rule", "ground_truth": answer(row)}
            info = row["extra_info"]
            assert (info["index"], info["split"]) == (index, split)
            assert len(gold_calls(row)) == info["calls"]


def test_kinds_and_numbers_of_calls(splits):
    for rows in splits.values():
        calls = [row["extra_info"]["calls"] for row in rows]
        # of 1,500 rows a tenth (standard deviation 12) wants no call; of the other 1,350 half,
        # three and two tenths (standard deviations below 19) want one, two and three calls
        shares = {0: 150, 1: 675, 2: 405, 3: 270}
        for number, expected in shares.items():
            assert abs(calls.count(number) - expected) < 95
        assert set(calls) == set(shares)


def test_values_are_copied_from_the_request(splits):
    for row in splits["train"] + splits["test"]:
        for call in gold_calls(row):
            assert call["name"] in row["prompt"][0]["content"]
            for value in call["parameters"].values():
                assert isinstance(value, bool) or str(value) in row["prompt"][1]["content"]


def test_rows_without_a_call_say_so(splits):
    cues = ("no tool", "not call a tool", "nothing to run")
    for row in splits["train"] + splits["test"]:
        request = row["prompt"][1]["content"].lower()
        assert any(cue in request for cue in cues) == (row["extra_info"]["kind"] == "response")


def test_the_test_split_is_new(splits):
    seen = {}
    for split, rows in splits.items():
        calls = [call for row in rows for call in gold_calls(row)]
        values = {
            v for call in calls for v in call["parameters"].values() if not isinstance(v, bool)
        }
        seen[split] = (
            {call["name"] for call in calls},
            {frozenset(call["parameters"]) for call in calls},
            values,
        )
    for in_train, in_test in zip(seen["train"], seen["test"], strict=True):
        assert len(in_test) >= 10
        assert not in_train & in_test


def test_the_pool_of_tools():
    assert len(TOOLS["train"]) >= 30
    assert len(TOOLS["test"]) >= 10
    tools = [tool for split in TOOLS.values() for tool, _ in split]
    assert len({tool["name"] for tool in tools}) == len(tools)
    schemas = [schema for tool in tools for schema in tool["parameters"].values()]
    assert {schema["type"] for schema in schemas} == {"string", "integer", "number", "boolean"}
    assert any("enum" in schema for schema in schemas)
    for values in KINDS.values():
        assert {*map(type, values)} in ({str}, {int}, {float})


def test_full_rows_offer_several_tools_with_types():
    for row in make_rows(200, split="train", seed=0):
        lines = row["prompt"][0]["content"].splitlines()
        tools = [json.loads(line) for line in lines if line.startswith('{"name": "')]
        tools = [tool for tool in tools if "description" in tool]
        assert 3 <= len(tools) <= 6
        signatures = {tool["name"]: tool["parameters"] for tool in tools}
        for call in gold_calls(row):
            signature = signatures[call["name"]]
            assert list(call["parameters"]) == list(signature)
            for key, value in call["parameters"].items():
                expected = {"string": str, "integer": int, "number": float, "boolean": bool}
                assert type(value) is expected[signature[key]["type"]]
                assert value in signature[key].get("enum", [value])


def test_sizes():
    # characters; the tests of the warm start count tokens
    for size, prompt_limit, answer_limit in (("tiny", 330, 330), ("full", 4000, 800)):
        rows = make_rows(COUNT, split="train", seed=3, size=size)
        assert max(len(text(row)) for row in rows) < prompt_limit
        assert max(len(answer(row)) for row in rows) < answer_limit


def test_more_rows_continue_fewer_and_the_seed_matters():
    rows = make_rows(30, split="test", seed=1, size="tiny")
    assert make_rows(10, split="test", seed=1, size="tiny") == rows[:10]
    assert make_rows(30, split="test", seed=2, size="tiny") != rows


@pytest.mark.parametrize("size", SIZES)
def test_the_same_rows_in_another_process(size):
    code = (
        "import json; from verl_gdpo.data_prep.tool_rl import make_rows; "
        f"print(json.dumps(make_rows(50, split='train', seed=5, size={size!r})))"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPO,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert json.loads(done.stdout) == make_rows(50, split="train", seed=5, size=size)


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


@pytest.mark.parametrize(
    "bad",
    [
        {"thought": "a </think> b"},
        {"thought": "x", "response_text": "<tool_call>"},
        {"thought": "x", "calls": [{"name": "f", "parameters": {"a": "<response>"}}]},
        {"thought": "x", "calls": [{"name": "f"}]},
        {"thought": "x", "calls": [{"name": 1, "parameters": {}}]},
        {"thought": "x", "calls": [{"name": "f", "parameters": {"a": float("nan")}}]},
    ],
)
def test_render_answer_refuses(bad):
    with pytest.raises(ValueError):
        contract.render_answer(**bad)


def test_system_prompts():
    tools = [tool for tool, _ in TOOLS["train"][:2]]
    full = contract.system_prompt(tools)
    assert all(json.dumps(tool) in full for tool in tools)
    assert all(tag in full for tag in contract.TAGS)
    compact = contract.compact_system_prompt(tools)
    assert compact.splitlines()[1].startswith('book_hotel {"city": "string"')
    for make in (contract.system_prompt, contract.compact_system_prompt):
        with pytest.raises(ValueError, match="no tools"):
            make([])


def test_the_prompts_own_example_scores():
    """The answer that the system prompt shows has the format that the scorer wants."""
    prompt = contract.system_prompt([tool for tool, _ in TOOLS["train"][:1]])
    start = prompt.index(f"{contract.THINK_OPEN} your reasoning")
    example = prompt[start : prompt.index(contract.TOOL_CALL_CLOSE, start)]
    example += contract.TOOL_CALL_CLOSE
    assert tool_rl.score(example, example) == {"format": 1.0, "correctness": 3.0}
