"""Calls in a model's own format: the readers against verl's parsers and vLLM's rule, and scores."""

import asyncio
import json
import random
import time
import warnings
from functools import cache

import pytest
from ground_truths import GROUND_TRUTHS

from verl_gdpo.tasks import declared_bounds
from verl_gdpo.tasks.tool_rl.call_formats import (
    CALL_FORMATS,
    INCOMPLETE,
    MALFORMED,
    NO_CALL,
    NOT_CLOSED,
    REASONS,
)
from verl_gdpo.tasks.tool_rl.form import parse_ground_truth, render_answer
from verl_gdpo.tasks.tool_rl.score import TASK, CallNotes, score

OWN = ["hermes", "qwen3_coder", "llama3_json"]
TAGGED = ["hermes", "qwen3_coder"]
F = {"name": "f", "parameters": {"a": 1, "b": "two words"}}
G = {"name": "g.h/1", "parameters": {"on": True, "at": [1, {"x": None}], "q": 0.5}}
GOLD = render_answer("I call.", [F])


def call(name, **parameters):
    return {"name": name, "parameters": parameters}


def written(call_format, *calls):
    return CALL_FORMATS[call_format].write(calls)


def rights(calls):
    return {call["name"]: call["parameters"] for call in calls}


def read(call_format, text, *gold):
    right_values = {
        name: {key: [value] for key, value in parameters.items()}
        for name, parameters in rights(gold).items()
    }
    return CALL_FORMATS[call_format].read(text, right_values)


# --- what is written and read ---------------------------------------------------------------------

TEXTS = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "two words"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g.h/1", "arguments": '
        '{"on": true, "at": [1, {"x": null}], "q": 0.5}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo words\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g.h/1>\n<parameter=on>\n"
        'true\n</parameter>\n<parameter=at>\n[1, {"x": null}]\n</parameter>\n<parameter=q>\n0.5\n'
        "</parameter>\n</function>\n</tool_call>"
    ),
    "llama3_json": (
        '{"name": "f", "parameters": {"a": 1, "b": "two words"}}; '
        '{"name": "g.h/1", "parameters": {"on": true, "at": [1, {"x": null}], "q": 0.5}}'
    ),
    "toolrl": (
        '<tool_call>\n{"name": "f", "parameters": {"a": 1, "b": "two words"}}\n'
        '{"name": "g.h/1", "parameters": {"on": true, "at": [1, {"x": null}], "q": 0.5}}\n'
        "</tool_call>"
    ),
}


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_two_calls(call_format):
    text = written(call_format, F, G)
    assert text == TEXTS[call_format]
    found = read(call_format, f"<think> x </think>\n{text}", F, G)
    assert (found.calls, found.unread) == ([F, G], [])


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_the_good_response_of_a_ground_truth_has_full_marks(call_format):
    both = render_answer("x", [F, G], "Done.")
    for truth in [*GROUND_TRUTHS["tool_rl"], both]:
        response = TASK.good_response_of(truth, {"call_format": call_format, "max_correctness": 1})
        rewards = score(response, truth, call_format=call_format, max_correctness=1)
        assert rewards == {"format": 1.0, "correctness": 1.0 if parse_ground_truth(truth) else 0.0}
        # ToolRL's own text is worth nothing to a model that writes another format, where it differs
        is_other = response != truth
        if (
            is_other and call_format != "llama3_json"
        ):  # whose objects are ToolRL's, without the tags
            assert score(truth, truth, call_format=call_format)["correctness"] == -3.0


def test_a_run_without_the_option_has_toolrls_good_response():
    assert TASK.good_response_of(GOLD, {}) == TASK.good_response(GOLD) == GOLD


# --- correctness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call_format", OWN)
@pytest.mark.parametrize(
    "predicted", [[F], [call("f", a=2, b="two words")], [F, F], [call("g")], [call("f", b="x"), G]]
)
def test_the_correctness_is_toolrls(call_format, predicted):
    """Of the calls that were read, whatever they are written in."""
    truth = render_answer("x", [F, call("f", a=2)])
    expected = score(render_answer("x", predicted), truth)["correctness"]
    response = f"<think> x </think>\n{written(call_format, *predicted)}"
    assert score(response, truth, call_format=call_format)["correctness"] == expected


UNREAD = {
    "toolrl": {
        "": NO_CALL,
        "<tool_call>\n{}": NOT_CLOSED,
        "<tool_call>\n{\n</tool_call>": MALFORMED,
        "<tool_call>\n{}\n</tool_call>": INCOMPLETE,
    },
    "hermes": {
        "": NO_CALL,
        "<tool_call></tool_call>": MALFORMED,
        '<tool_call>{"name": "f", "arguments": {}}': NOT_CLOSED,
        '<tool_call>{"name": "f", "arguments": {}</tool_call>': MALFORMED,
        '<tool_call>{"name": "f", "parameters": {}}</tool_call>': INCOMPLETE,
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>': INCOMPLETE,
        "<tool_call>[]</tool_call>": INCOMPLETE,
        f"<tool_call>{'[' * 100_000}</tool_call>": MALFORMED,
        # two in one block, which verl cannot read either
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}</tool_call>': (
            MALFORMED
        ),
    },
    "qwen3_coder": {
        "": NO_CALL,
        "<function=f></function>": NO_CALL,
        "<tool_call>": NOT_CLOSED,
        "<tool_call></tool_call>": INCOMPLETE,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>': INCOMPLETE,
        "<tool_call><function=f</function></tool_call>": MALFORMED,
    },
    "llama3_json": {
        "": NO_CALL,
        '<think> {"name": "f", "parameters": {}}': NO_CALL,  # inside of a thought
        '<response> {"name": "f", "parameters": {}} </response>': NO_CALL,
        '{"name": "f", "parameters": {}': MALFORMED,
        '{"name": "f"}': INCOMPLETE,
        '{"name": ["f"], "parameters": {}}': INCOMPLETE,
        "{" * 100_000: MALFORMED,
        '{"a":' * 100_000: MALFORMED,
    },
}


@pytest.mark.parametrize("call_format", UNREAD)
def test_what_cannot_be_read_is_a_low_score_and_a_note_says_why(call_format):
    for text, reason in UNREAD[call_format].items():
        notes = CallNotes()
        # a right call beside it does not help
        assert score(text, GOLD, call_format=call_format, notes=notes)["correctness"] == -3.0
        assert notes.why == reason, text
        assert notes.numbers() == {one: float(one == reason) for one in REASONS}
        if text and call_format != "toolrl" and reason != NO_CALL:
            beside = f"{written(call_format, F)}\n{text}"
            assert score(beside, GOLD, call_format=call_format)["correctness"] == -3.0


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_no_note_where_all_is_read_or_no_call_is_asked_for(call_format):
    notes = CallNotes()
    score(written(call_format, F), GOLD, call_format=call_format, notes=notes)
    score("", render_answer("x", response_text="y"), call_format=call_format, notes=notes)
    assert notes.why == "" and {*notes.numbers().values()} == {0.0}


def test_a_parameter_in_xml_has_the_type_of_the_right_one():
    right = {"i": 1, "f": 0.5, "b": False, "s": "7", "l": [1], "d": {"k": 1}, "n": None}

    def typed(key, text):
        block = (
            f"<tool_call><function=f><parameter={key}>\n{text}\n</parameter></function></tool_call>"
        )
        (found,) = read("qwen3_coder", block, call("f", **right)).calls
        return found["parameters"][key]

    assert [typed("i", "12"), typed("i", "1.5"), typed("i", "x")] == [12, "1.5", "x"]
    assert [typed("f", "1.5"), typed("f", "2"), typed("f", "inf")] == [1.5, 2, "inf"]
    assert [typed("b", "True"), typed("b", "false"), typed("b", "1")] == [True, False, False]
    assert [typed("s", "12"), typed("s", "NULL"), typed("other", "12")] == ["12", None, "12"]
    assert [typed("l", "[true, 2]"), typed("l", "[1")] == [[True, 2], "[1"]
    assert [typed("d", '{"k": 2}'), typed("d", "{'k': 2}")] == [{"k": 2}, "{'k': 2}"]
    assert [typed("n", "null"), typed("n", ""), typed("s", "\na\n")] == [None, "", "\na\n"]
    assert typed("i", "9" * 5000) == "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("first", "second"), [(1, 2.5), (None, 5), ("x", 5), (True, "auto"), (1, [1, 2])]
)
def test_two_calls_of_a_function_may_have_values_of_other_types(first, second):
    gold = [call("f", a=first), call("f", a=second)]
    truth = render_answer("x", gold)
    response = f"<think> x </think>\n{written('qwen3_coder', *gold)}"
    assert score(response, truth, call_format="qwen3_coder")["correctness"] == 3.0


# --- format ---------------------------------------------------------------------------------------

THINK = "<think> x </think>"
REPLY = "<response> Hi. </response>"
CALLS_GOLD, BOTH_GOLD = render_answer("x", [F]), render_answer("x", [F], "Hi.")
REPLY_GOLD = render_answer("x", response_text="Hi.")


def layouts(call_format):
    """(ground truth, response, format)."""
    one, two = written(call_format, F), written(call_format, F, G)
    return [
        (CALLS_GOLD, f"{THINK}\n{one}", 1),
        (CALLS_GOLD, f" \n{THINK}\n\n{two}\n", 1),
        (CALLS_GOLD, f"<think>\nlong\n</think>\n\n{one}", 1),
        (CALLS_GOLD, f"{THINK}{one}", 0),
        (CALLS_GOLD, f"{THINK} {one}", 0),
        (CALLS_GOLD, one, 0),
        (CALLS_GOLD, f"So: {THINK}\n{one}", 0),
        (CALLS_GOLD, f"{THINK} So:\n{one}", 0),
        (CALLS_GOLD, f"{THINK}\n{one} ok", 0),
        (CALLS_GOLD, f"{THINK}\n{one}\n{REPLY}", 0),
        (CALLS_GOLD, f"{THINK}\n{REPLY}", 0),
        (CALLS_GOLD, THINK, 0),
        (CALLS_GOLD, f"<think> x\n{one}", 0),
        (CALLS_GOLD, f"{THINK}\n{THINK}\n{one}", 0),
        (CALLS_GOLD, f"{THINK}\n{one[: len(one) // 2]}", 0),
        (BOTH_GOLD, f"{THINK}\n{one}\n{REPLY}", 1),
        (BOTH_GOLD, f"{THINK}\n\n{two}\n\n{REPLY}", 1),
        (BOTH_GOLD, f"{THINK}\n{one}{REPLY}", 0),
        (BOTH_GOLD, f"{THINK}\n{REPLY}\n{one}", 0),
        (BOTH_GOLD, f"{THINK}\n{one}", 0),
        (BOTH_GOLD, f"{THINK}\n{REPLY}", 0),
        (BOTH_GOLD, f"{THINK}\n{one}\n{REPLY}\n{REPLY}", 0),
        (REPLY_GOLD, f"{THINK}\n{REPLY}", 1),
        (REPLY_GOLD, f"{THINK}\n\n{REPLY}", 1),
        (REPLY_GOLD, f"{THINK}{REPLY}", 0),
        (REPLY_GOLD, f"{THINK}\n{one}\n{REPLY}", 0),
        (REPLY_GOLD, f"{THINK}\n{REPLY} ok", 0),
        (REPLY_GOLD, "<think> <response> </think>\n<response> Hi. </response>", 0),
        (REPLY_GOLD, "", 0),
        (THINK, THINK, 1),
        (THINK, f"{THINK} ok", 0),
    ]


@pytest.mark.parametrize("call_format", OWN)
def test_layouts(call_format):
    for gold, response, expected in layouts(call_format):
        found = score(response, gold, call_format=call_format)["format"]
        assert found == expected, (gold, response)


@pytest.mark.parametrize("call_format", TAGGED)
def test_tags_stand_on_their_own_lines_and_nowhere_else(call_format):
    one = written(call_format, F)
    for response in (
        f"{THINK}\n{one.replace('<tool_call>', '<tool_call> ', 1)}",
        f"{THINK}\n{one.replace('</tool_call>', ' </tool_call>')}",
        f"<think> a <tool_call> </think>\n{one}",
        f"{THINK}\n<tool_call>\n{one}",
        f"{THINK}\n{one}\n</tool_call>",
        f"{THINK}\n<tool_call>\n</tool_call>",
    ):
        assert score(response, CALLS_GOLD, call_format=call_format)["format"] == 0, response
    # as in ToolRL, the format does not look into a block
    empty = f"{THINK}\n<tool_call>\n\n</tool_call>"
    assert score(empty, CALLS_GOLD, call_format=call_format)["format"] == 1


def test_between_the_objects_of_llama():
    one = written("llama3_json", F)
    for between, expected in (("", 1), ("\n", 1), (";", 1), (" and ", 0), (",", 0)):
        response = f"{THINK}\n{one}{between}{one}"
        assert score(response, CALLS_GOLD, call_format="llama3_json")["format"] == expected
    tagged = f"{THINK}\n<|python_tag|>{one}"
    assert score(tagged, CALLS_GOLD, call_format="llama3_json") == {"format": 1, "correctness": 3}


def test_a_tag_inside_of_a_block_opens_no_other_one():
    found = read("hermes", f"<tool_call>\n{written('hermes', F)}")
    assert (found.calls, found.unread) == ([], [MALFORMED])


def test_the_calls_of_llama_end_at_a_response():
    tag = call("f", a="<response>")
    before = written("llama3_json", tag, F)
    found = read("llama3_json", f'{before}\n<response> {{"name": "g"}} </response>')
    assert (found.calls, found.unread) == ([tag, F], [])


# --- options --------------------------------------------------------------------------------------


def test_a_format_that_cannot_be_read_is_refused_before_the_training():
    with pytest.raises(ValueError, match=r"call_format: got 'glm'; expected one of toolrl, hermes"):
        declared_bounds(["rlla"], {"call_format": "glm"})
    for name in ("gpt-oss", "kimi", "gemma4"):
        with pytest.raises(ValueError, match=rf"got '{name}'.*between special tokens"):
            score("", GOLD, call_format=name)
    for name in (None, ["hermes"], 1):
        with pytest.raises(ValueError, match=r"call_format: got .*; expected one of"):
            score("", GOLD, call_format=name)
    assert declared_bounds(["rlla"], {"call_format": "hermes"})["correctness"] == (-3.0, 3.0)


# --- the oracles ----------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


@cache
def verls():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's imports, not ours
        from verl.experimental.agent_loop import tool_parser
        from verl.tools.schemas import OpenAIFunctionToolSchema
    return tool_parser.ToolParser, OpenAIFunctionToolSchema


SCHEMA_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}


def verls_calls(call_format, text, gold):
    """The calls that verl's parser reads; it knows the tools, as in an agent loop."""
    parser, schema = verls()
    tools = []
    for name, parameters in rights(gold).items():
        properties = {
            key: {"type": SCHEMA_TYPES.get(type(value), "array"), "description": ""}
            for key, value in parameters.items()
        }
        function = {"name": name, "description": ""}
        function["parameters"] = {"type": "object", "properties": properties, "required": []}
        tools.append(schema(type="function", function=function))
    letters = Letters()
    found = parser.get_tool_parser(call_format, letters)
    _, calls = asyncio.run(found.extract_tool_calls(letters.encode(text), tools))
    return [{"name": c.name, "parameters": json.loads(c.arguments)} for c in calls]


def vllms_calls(_, text, gold):
    """vLLM's rule: each brace outside of an object begins a call, and a bad one undoes all."""
    calls, end = [], -1
    for start in (place for place, letter in enumerate(text) if letter == "{"):
        if start <= end:
            continue
        try:
            value, length = json.JSONDecoder().raw_decode(text[start:])
            parameters = value["arguments"] if "arguments" in value else value["parameters"]
            calls.append({"name": value["name"], "parameters": parameters})
        except (ValueError, KeyError):
            return []
        end = start + length
        assert isinstance(value["name"], str)
    return calls


VALUES = (
    1,
    -7,
    2.5,
    True,
    False,
    "Oslo",
    "",
    "a\nb",
    "7",
    "ä <b> é",
    [1, "a"],
    {"k": [2.5]},
    10**20,
)


def a_call(rng):
    keys = rng.sample(["a", "b", "page", "zip code"], rng.randint(0, 3))
    return call(rng.choice(["f", "get weather/v1.0"]), **{key: rng.choice(VALUES) for key in keys})


def damaged(text, rng):
    """The text with up to three mistakes, of those that models make."""
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, start + 12)
        mistake = rng.choice(["cut", "out", "twice", "swap", "tag", "white", "prose"])
        if mistake == "cut":
            text = text[:end]
        elif mistake == "out":
            text = text[:start] + text[end:]
        elif mistake == "twice":
            text = text[:end] + text[start:]
        elif mistake == "swap":
            text = text[:start] + rng.choice('{}"<>,:=\n') + text[start + 1 :]
        elif mistake == "tag":
            tags = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=x>"]
            text = text[:start] + rng.choice(tags) + text[start:]
        elif mistake == "white":
            text = text.replace("\n", rng.choice(["", "\n\n", " "]), 1)
        else:
            text = f"I think so. {text}\nDone."
    return text


@pytest.mark.parametrize("call_format", OWN)
def test_each_reader_finds_the_calls_that_the_framework_finds(call_format):
    """In 200 texts. Where the framework leaves something out, our reader has a reason for it."""
    rng = random.Random(call_format)
    oracle = vllms_calls if call_format == "llama3_json" else verls_calls
    whole, partial, none = 0, 0, 0
    for _ in range(200):
        calls = [a_call(rng) for _ in range(rng.randint(1, 3))]
        gold = [calls[0], a_call(rng)]
        text = damaged(written(call_format, *calls), rng)
        found, expected = read(call_format, text, *gold), oracle(call_format, text, gold)
        if call_format == "llama3_json" and found.unread:
            expected = expected or found.calls  # vLLM then takes no call at all
        # where a list is right, verl reads Python, in which `true` and `false` are no values
        ours, theirs = (repr(each).replace("'true'", "True") for each in (found.calls, expected))
        ours, theirs = (each.replace("'false'", "False") for each in (ours, theirs))
        assert ours == theirs, text
        if not found.unread:
            whole += 1
        elif found.calls:
            partial += 1
        else:
            none += 1
    assert whole > 60 and partial >= 5 and none >= 5, (whole, partial, none)


@pytest.mark.parametrize("tail", ["", "\n", "\n\n", "\n\n\n", "\n\n\n\n", " \n"])
def test_a_call_in_xml_that_was_cut_off_is_read_as_verl_reads_it(tail):
    gold = [call("f", a="x")]
    for end in ("", "</parameter>", "</parameter></function>"):
        text = f"<tool_call><function=f><parameter=a>y{tail}{end}{tail}"
        found = read("qwen3_coder", text, *gold)
        assert found.calls == verls_calls("qwen3_coder", text, gold) and not found.unread


def test_lists_in_xml_are_json_as_templates_write_them():
    """verl reads them as Python, in which `true` is no value, and keeps the text."""
    gold = [call("f", a=[True, None])]
    text = written("qwen3_coder", *gold)
    assert "[true, null]" in text
    assert read("qwen3_coder", text, *gold).calls == gold
    assert verls_calls("qwen3_coder", text, gold) == [call("f", a="[true, null]")]


# --- hostile text: the time must grow with the length, not with its square ------------------------

LENGTH = 300_000
UNITS = (
    *("<think>", "</think>\n", "<response>", "</response>", " ", "\n", "1", "9.", "[", '"', '\\"'),
    *("<tool_call>", "<tool_call>\n", "</tool_call>", "<tool_call></tool_call>"),
    *("<function=", "<function=f>", "</function>", "<function=f></function>"),
    *("<parameter=", "<parameter=a>", "<parameter=a>1</parameter>"),
    "<tool_call><function=f><parameter=a>",
    *("{", "{}", '{"', '{"a":', '{"a": "<response>"} '),
    '{"name": "f", "parameters": {"a": 1}}',
    '{"name": "f", "arguments": {"a": 1}}; ',
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
)
FRAMES = {
    "alone": "{}",
    "after a thought": "<think> x </think>\n{}",
    "in a block": "<think> x </think>\n<tool_call>\n{}\n</tool_call>",
    "a value": "<think> x </think>\n<tool_call><function=f><parameter=a>{}</parameter>",
    "before a response": "<think> x </think>\n{}\n<response> y </response>",
}


@pytest.mark.slow
@pytest.mark.parametrize("call_format", CALL_FORMATS)
@pytest.mark.parametrize("frame", FRAMES)
def test_hostile_texts_take_less_than_a_second(call_format, frame):
    golds = [render_answer("x", [call("f", a=value)] * 5, "y") for value in (1, 0.5, [1], "x")]
    for unit in UNITS:
        text = FRAMES[frame].replace("{}", unit * (LENGTH // len(unit)), 1)
        for gold in golds:
            start = time.process_time()  # not of what else runs here
            rewards = score(text, gold, call_format=call_format)
            assert time.process_time() - start < 1.0, (unit, gold)
            assert all(abs(value) <= 3 for value in rewards.values())
