"""ToolRL's form: which calls an answer makes, and what a policy reads."""

import json

import pytest

from verl_gdpo.scoring.response import Response, Turn
from verl_gdpo.tools.evaluate.bfcl.form import (
    Call,
    calls,
    is_correct_format,
    prompt,
)

F, G = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {}}'
TOOL = {
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def block(*lines):
    return "\n".join(["<tool_call>", *lines, "</tool_call>"])


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (block(F, G), "fg"),
        (f"Sure. {block(F)} Done.", "f"),  # no <think>, and words around
        (block(F) + block(G), "g"),  # the last block
        (f"<tool_call>{F}", "f"),  # never closed
        (block(F, "junk", "[1]", "null", "5", '{"parameters": {}}', G), "fg"),
        (block('{"name": " NONE ", "parameters": 3}', F), "f"),
        (block(F, '{"name": "g", "parameters": [1]}'), ""),  # undoes all
        (f"[{F}]", ""),
        (f"{F}</tool_call>", ""),
        (block(f"{F} {G}"), ""),  # two in one line
        (block(json.dumps(json.loads(F), indent=1)), ""),  # one in several lines
        (f"<think> maybe {block(F)} or not </think>\n<response> No. </response>", "f"),
        ("", ""),
    ],
)
def test_the_calls_of_an_answer(answer, names):
    for multi_turn in (False, True):
        assert "".join(call.name for call in calls(answer, multi_turn=multi_turn)) == names


def test_a_call_may_lack_parameters_in_a_dialogue_only():
    answer = block('{"name": "g"}', F)
    assert calls(answer, multi_turn=False) == [Call("f", {"a": 1})]
    assert calls(answer, multi_turn=True) == [Call("g", {}), Call("f", {"a": 1})]


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "f", "parameters": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "f", "parameters": {"a": ' + "9" * 1_000_000 + "}}",
        '{"name": "f", "parameters": {"a": ' * 50_000,
        "\\" * 1_000_000,
    ],
    ids=["deep", "digits", "open", "backslashes"],
)
def test_a_hostile_line_is_no_call(line):
    assert calls(block(line, G), multi_turn=False) == [Call("g", {})]
    assert not is_correct_format(of(line))


def test_half_a_character_can_be_written():
    (call,) = calls(block(r'{"name": "\ud800", "parameters": {"\ud801": 1}}'), multi_turn=True)
    assert str(call) == r"\ud800(\ud801=1)"


def of(text, given=""):
    """An answer as the policy wrote it; `given` is what its prompt has of the thought."""
    return Response((Turn(text, given),), 9)


@pytest.mark.parametrize(
    ("text", "given", "right"),
    [
        (f"x </think>\n{block(F)}", "", False),
        (f"x </think>\n{block(F)}", "<think>\n", True),
        (block(F), "<think>\n\n</think>\n\n", True),
        (block(F), "<think>\n", False),
    ],
)
def test_the_format_where_the_prompt_has_a_part_of_the_thought(text, given, right):
    assert is_correct_format(of(text, given)) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"<think> x </think>\n{block(F)}", True),
        ("<think> x </think>\n<response> y </response>", True),
        (f"<think> x </think>\n{block(F)}\n<response> y </response>\n", True),
        (f"<think> x </think>\n{block('junk')}", True),  # whatever the calls are
        ("<think> x </think>", False),
        (block(F), False),
        (f"<think> x </think>\n{block(F)}\n{block(F)}", False),
    ],
)
def test_the_correct_format_is_one_of_three(answer, right):
    assert is_correct_format(of(answer)) is right


def test_a_prompt_holds_the_tools_and_the_whole_dialogue():
    dialogue = [
        {"role": "system", "content": "Left out."},
        {"role": "user", "content": " Please. "},
        {"role": "assistant", "content": "<think> a </think>\n"},
        {"role": "tool", "name": "f(a=1)", "content": "2"},
    ]
    system, user = prompt([TOOL, {**TOOL, "name": "g"}], dialogue, multi_turn=True)
    described = 'Description: Does it.\nParameters: {"a": {"type": "integer"}}\n'
    assert f"tools:\n1. Name: f\n{described}2. Name: g\n{described}\n**Steps" in system["content"]
    assert system["content"].endswith("noted as `<obs>` (if exists).\n")
    begin, middle, end = user["content"].partition(
        "\n<think> a </think>\n"
        "<obs> You have made the tool call f(a=1). Execution returns: 2 </obs>\n\n"
    )
    assert begin.startswith("**Dialogue Records History**\n<user> Please.\nUse the one or more ")
    assert middle and end.startswith("<user> If you think you have completed")
    assert end.endswith("from now on. </user>")
    # the results are no longer the last word
    dialogue += [{"role": "user", "content": "More."}]
    said = prompt([TOOL], dialogue, multi_turn=False)[1]["content"]
    assert "If you think" not in said and said.endswith("in this turn. </user>")
    assert prompt([], [], multi_turn=False)[1]["content"] == "**Dialogue Records History**"
