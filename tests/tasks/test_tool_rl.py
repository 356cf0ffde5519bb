"""The tool-calling scorer: rows with their arithmetic, verl's own scorer, and hostile text."""

import json
import random
import time
import warnings
from functools import cache
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_of_examples import draw

from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.call_formats import CALL_FORMATS
from verl_gdpo.tasks.tool_rl.score import score

THINK = "<think> I use the tool. </think>"
F = {"name": "f", "parameters": {"a": 1, "b": 2}}


def call(name, **parameters):
    return {"name": name, "parameters": parameters}


def tool_text(*calls):
    """A well-formed response; a str stands for a raw line."""
    lines = [c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in calls]
    return "\n".join([THINK, "<tool_call>", *lines, "</tool_call>"])


def correctness(gold_calls, predicted_calls, **options):
    return score(tool_text(*predicted_calls), tool_text(*gold_calls), **options)["correctness"]


TOOL_GOLD = tool_text(F)
BOTH_GOLD = TOOL_GOLD + "\n<response> done </response>"
RESPONSE_GOLD = THINK + "\n<response> done </response>"
NEITHER_GOLD = THINK
GOLD_OF_EVERY_KIND = (TOOL_GOLD, BOTH_GOLD, RESPONSE_GOLD, NEITHER_GOLD)


# --- golden rows: correctness ---------------------------------------------------------------


def test_equal_calls_reach_the_maximum():
    assert correctness([F], [F]) == 3.0
    # key order is no part of equality, neither in the call nor in its parameters
    assert correctness([F], [{"parameters": {"b": 2, "a": 1}, "name": "f"}]) == 3.0
    assert correctness([F], [F], max_correctness=1.0) == 1.0


def test_scores_of_one_gold_call():
    # gold f(a=1, b=2): D = 1 + (1 + 2) = 4 and C = 6 s / 4 - 3
    # one value wrong: names 1, keys 1, equal values 1 -> s = 3
    assert correctness([F], [call("f", a=1, b=9)]) == pytest.approx(1.5)
    # one parameter missing: names 1, keys 1/2, equal 1 -> s = 2.5
    assert correctness([F], [call("f", a=1)]) == pytest.approx(0.75)
    # one parameter too many: names 1, keys 2/3, equal 2 -> s = 11/3
    assert correctness([F], [call("f", a=1, b=2, c=3)]) == pytest.approx(2.5)
    # another tool: names 0, nothing to match -> s = 0
    assert correctness([F], [call("g", a=1, b=2)]) == pytest.approx(-3.0)
    # the call twice: names {f} and {f, f} -> 1/2, pair 3 -> s = 3.5
    assert correctness([F], [F, F]) == pytest.approx(2.25)
    # a further top-level key breaks equality only: names 1, pair 3 -> s = 4
    assert correctness([F], [{**F, "id": 7}]) == pytest.approx(3.0)
    # gold without parameters, D = 2: names 1/3, keys of two empty lists 1 -> s = 4/3
    assert correctness([call("f")], [call("f")] * 3) == pytest.approx(1.0)


def test_the_first_best_prediction_wins():
    gold = [call("f", a=1, b=2), call("f", a=1, b=3)]  # D = 1 + 3 + 3 = 7
    predicted = [call("f", a=1, b=9), call("f", a=9, b=2)]
    # gold 1 scores 1 + 1 with both and takes the first; gold 2 gets 1 + 0 from the other; names 1
    # -> s = 1 + 2 + 1 = 4
    assert correctness(gold, predicted) == pytest.approx(24 / 7 - 3)
    # the other order: gold 1 takes (9, 2) for 2, gold 2 gets (1, 9) for 2 -> s = 5
    assert correctness(gold, predicted[::-1]) == pytest.approx(30 / 7 - 3)


UNUSABLE_LINES = (
    *("{", "null", "1", "true", '"f"', "[]", "{}", '["name"]', '{"parameters": {}}'),
    '{"name": ["f"], "parameters": {}}',
    '{"name": {}, "parameters": {}}',
    '{"name": "f"}',
    '{"name": "f", "parameters": null}',
    '{"name": "f", "parameters": [["a", 1]]}',
    '{"name": "f", "parameters": "{}"}',
    '{"name": "h", "parameters": {"a": ' + "1" * 5000 + "}}",
    '{"name": "h", "parameters": ' + "[" * 100_000 + "]" * 100_000 + "}",
)


def test_only_the_first_block_counts():
    wrong = tool_text(call("g"))
    assert score(TOOL_GOLD + wrong, TOOL_GOLD) == {"format": 0.0, "correctness": 3.0}
    assert score(wrong + TOOL_GOLD, TOOL_GOLD) == {"format": 0.0, "correctness": -3.0}
    # a second opening tag ends the first block
    twice = f"<tool_call>\n{json.dumps(F)}\n<tool_call>\n{{\n</tool_call>"
    assert score(twice, TOOL_GOLD)["correctness"] == 3.0
    # the closing tag may stand anywhere, but it must stand
    assert score(f"</tool_call><tool_call>{json.dumps(F)}", TOOL_GOLD)["correctness"] == 3.0
    assert score(f"<tool_call>{json.dumps(F)}", TOOL_GOLD)["correctness"] == -3.0


# --- golden rows: format --------------------------------------------------------------------

LAYOUTS = (
    # (ground truth, response, format)
    (TOOL_GOLD, TOOL_GOLD, 1),
    (TOOL_GOLD, f" \n{TOOL_GOLD}\n\n", 1),  # scored stripped
    (TOOL_GOLD, TOOL_GOLD + " ok", 0),
    (TOOL_GOLD, "So: " + TOOL_GOLD, 0),
    (TOOL_GOLD, TOOL_GOLD.replace("\n<tool_call>", "<tool_call>"), 0),
    (TOOL_GOLD, TOOL_GOLD.replace("\n", "\r\n"), 0),
    (TOOL_GOLD, f"{THINK}\n<tool_call>\n</tool_call>", 0),  # each tag needs a newline of its own
    (TOOL_GOLD, f"{THINK}\n<tool_call>\n\n</tool_call>", 1),
    (TOOL_GOLD, f"<think><think></think>{TOOL_GOLD}", 1),  # think tags are not counted
    (TOOL_GOLD, TOOL_GOLD.replace("I use", "I use <tool_call>"), 0),
    (TOOL_GOLD, TOOL_GOLD.replace("I use", "I use <response>"), 1),  # a tag of another kind
    (TOOL_GOLD, BOTH_GOLD, 0),
    (BOTH_GOLD, BOTH_GOLD, 1),
    (BOTH_GOLD, TOOL_GOLD, 0),
    (BOTH_GOLD, BOTH_GOLD.replace("\n<response>", "\n\n<response>"), 0),
    (BOTH_GOLD, RESPONSE_GOLD + TOOL_GOLD[len(THINK) :], 0),
    (BOTH_GOLD, BOTH_GOLD.replace(" done ", "</response>"), 0),
    (RESPONSE_GOLD, RESPONSE_GOLD, 1),
    (RESPONSE_GOLD, "<think></think>\n<response></response>", 1),
    (RESPONSE_GOLD, RESPONSE_GOLD.replace("I use", "I use <tool_call>"), 1),
    (RESPONSE_GOLD, RESPONSE_GOLD.replace(" done ", "<response>"), 0),
    (RESPONSE_GOLD, "", 0),
    (NEITHER_GOLD, "<think></think>", 1),
    (NEITHER_GOLD, "<think>/think>", 0),
    (NEITHER_GOLD, f"{THINK} and {THINK}", 1),
)


def test_layouts():
    for gold, response, expected in LAYOUTS:
        assert score(response, gold)["format"] == expected, (gold, response)


def test_ground_truth_without_a_call_gives_correctness_zero():
    for gold in (RESPONSE_GOLD, NEITHER_GOLD):
        for response in (TOOL_GOLD, gold, "", "<tool_call>"):
            for options in ({}, {"max_correctness": 1}):
                assert score(response, gold, **options)["correctness"] == 0.0


# --- bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [3, 1])
def test_bounds(most):
    bounds = tool_rl.bounds(max_correctness=most)
    assert bounds == {"format": (0, 1), "correctness": (-most, most)}
    # the values that are reached are the bounds, and none is outside
    seen = [score(response, TOOL_GOLD, max_correctness=most) for response in (TOOL_GOLD, "", THINK)]
    for name, ends in bounds.items():
        values = [scores[name] for scores in seen]
        assert (min(values), max(values)) == ends


def test_bounds_of_bad_options():
    with pytest.raises(ValueError, match="max_correctness: got -1"):
        tool_rl.bounds(max_correctness=-1)


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        (tool_text(""), r"line 1 of 1: got ''.*expected one JSON object"),
        (tool_text("{", ' "name": "f"', "}"), r"line 1 of 3: got '\{'"),
        (tool_text(F, "[]"), r"line 2 of 2: got '\[\]'; expected"),
        (tool_text('{"name": ["f"], "parameters": {}}'), r"string \"name\""),
        (tool_text('{"name": "f"}'), r"object \"parameters\""),
        (tool_text("[" * 100_000), r"line 1 of 1"),
        (TOOL_GOLD.replace("I use", "<tool_call>"), r"got 2 <tool_call> and 1 </tool_call>"),
        (TOOL_GOLD.replace("</tool_call>", ""), r"got 1 <tool_call> and 0 </tool_call>"),
        (RESPONSE_GOLD.replace("</response>", ""), r"got 1 <response> and 0 </response>"),
    ],
)
def test_malformed_ground_truth_raises(gold, message):
    with pytest.raises(ValueError, match=message):
        score(TOOL_GOLD, gold)


def test_wrong_types_and_options_raise():
    for bad in (None, b"", 3, ["a"]):
        with pytest.raises(ValueError, match=r"tool_rl ground truth: got .*; expected"):
            score("", bad)
    with pytest.raises(TypeError, match="max_corectness"):
        score("", TOOL_GOLD, max_corectness=1)
    for bad in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"tool_rl max_correctness: got .*; expected"):
            score("", TOOL_GOLD, max_correctness=bad)


def test_scoring_prints_nothing_and_leaves_random_alone(capsys):
    before = random.getstate()
    for _ in range(200):
        score("", TOOL_GOLD)
    assert random.getstate() == before
    assert capsys.readouterr() == ("", "")


# --- the reference implementation shipped with verl -----------------------------------------


@cache
def reference_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's imports, not ours
        from verl.utils.reward_score import rlla
    return rlla


def reference(response, ground_truth):
    rlla = reference_module()
    # Its randint only decides whether to print; fixed, it leaves the global generator alone too.
    with mock.patch.object(rlla.random, "randint", lambda *_: 2):
        result = rlla.compute_score("rlla", response, ground_truth, {"experiment_name": "qwen"})
    return {"format": result["format_reward"], "correctness": result["accuracy_reward"]}


def assert_same_as_reference(response, ground_truth):
    expected = reference(response, ground_truth)
    got = score(response, ground_truth)
    assert got == pytest.approx(expected, rel=0, abs=1e-9), (response, ground_truth)


GOLD_CALLS = (
    [call("f", a=1)],
    [call("get weather/v1.0", city="Oslo", days=3, metric=True)],
    [call("f"), call("g", page="1")],
    [call("f", a=1, b=2), call("f", a=1, b=3), call("f", a=2)],
    [call("f", a={"x": [1, {"k": None}], "y": 1.5}, b=[1, 2]), call("g", s="naïve </think> 😀")],
    [call("f", q="a\nb", n=None, z=False), call("g", q=0), call("h"), call("f", q="a")],
)
VALUES = (0, 1, 1.0, True, None, "1", "", "Oslo", "a", [], [1, 2], {"k": 1}, float("nan"), -0.0)
KEYS = ("a", "b", "page", "q", "zz")
NAMES = ("f", "g", "h", "unknown", None, 1, True, ["f"], {"f": 1})
PARAMETERS = (None, [], [["a", 1]], "{}", 3, {})
RAW_LINES = ("", "{", "null", "7", "true", '"f"', "[]", "{}", '["name"]', "f(a=1)", "// note")
CALL = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "parameters": st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=3)
        | st.sampled_from(PARAMETERS),
    }
)
# a gold answer, and calls of which many are its own, or nearly so
ANSWERS = st.sampled_from(GOLD_CALLS).flatmap(
    lambda gold: st.tuples(
        st.just(gold),
        st.lists(
            st.sampled_from(gold)
            | st.builds(lambda c, k, v: {**c, "parameters": {**c["parameters"], k: v}},
                        st.sampled_from(gold), st.sampled_from(KEYS), st.sampled_from(VALUES))
            | CALL | st.sampled_from(RAW_LINES),
            max_size=4,
        ),
    )
)  # fmt: skip


def test_same_as_the_reference_on_golden_rows():
    for gold, response, _ in LAYOUTS:
        assert_same_as_reference(response, gold)
    for line in UNUSABLE_LINES:
        assert_same_as_reference(tool_text(F, line), TOOL_GOLD)


FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>"),
    *("\n", "\n\n", " ", "\r\n", "\x00", "\ud800", "\u2028", "\ufeff", "<", "{", "}", "[" * 60),
    *("<think> t </think>\n<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<response>"),
    *(json.dumps(F), json.dumps(F) + "\n", json.dumps(call("f", a=1)), json.dumps(call("g"))),
    *('{"name": "f", "parameters": {"b": 2}}\n', '{"name": "f", "parameters": {"a": NaN}}\n'),
    *('{"name": null, "parameters": -Infinity}\n', '{"name": ["f"]}', '{"name": 1e999}\n'),
    *('{"name": "f"', ', "parameters": {"a": 1, "b": [2]}}', '{"name": "f"}', "1" * 5000),
)
SPLICES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=10).map("".join)
WELL_WRAPPED = st.lists(st.sampled_from([f for f in FRAGMENTS if "{" in f]), max_size=5).map(
    lambda parts: tool_text("\n".join(p.strip() for p in parts))
)


def test_same_as_the_reference_on_all_kinds_of_calls():
    outcomes = set()

    @draw(times=10)
    @given(ANSWERS)
    def compare(calls):
        gold, response = tool_text(*calls[0]), tool_text(*calls[1])
        assert_same_as_reference(response, gold)
        outcomes.add(score(response, gold)["correctness"])

    compare()
    assert len(outcomes) > 50  # not two or three


@draw(times=2)
@given(st.text() | SPLICES | WELL_WRAPPED, st.sampled_from(GOLD_OF_EVERY_KIND))
def test_any_string_scores_as_the_reference_does(response, gold):
    assert_same_as_reference(response, gold)


@draw(times=2)
@given(st.text() | SPLICES | WELL_WRAPPED, st.sampled_from(GOLD_OF_EVERY_KIND))
def test_no_string_raises_and_scores_stay_in_range(response, gold):
    got = score(response, gold, response_tokens=3, step=40)
    assert list(got) == ["format", "correctness"]
    assert all(type(value) is float for value in got.values())
    assert abs(got["correctness"]) <= 3 + 1e-9


# --- hostile text: the time must grow with the length, not with its square ------------------

MB = 1_000_000


def fill(unit):
    return (unit * (MB // len(unit) + 1))[:MB]


def block(body):
    return f"<think>\n</think>\n<tool_call>\n{body}\n</tool_call>"


def many(line):
    return block("\n".join([line] * (MB // (len(line) + 1))))


def parameter(value):
    return block('{"name": "f", "parameters": {"a": ' + value + "}}")


HOSTILE = {
    "open arrays": block("[" * MB),
    "open objects": block(fill('{"a":')),
    "deep value": parameter("[" * (MB // 2) + "]" * (MB // 2)),
    "one huge int": parameter("9" * MB),
    "ints at the digit limit": parameter("[" + ",".join(["9" * 4299] * (MB // 4300)) + "]"),
    "long fraction": parameter("0." + "1" * MB),
    "long exponent": parameter("1e" + "9" * MB),
    "halfway float": parameter("9007199254740993" + "0" * MB + f"1.0e-{MB}"),
    "one call repeated": many('{"name":"f","parameters":{"a":1,"b":2}}'),
    "almost the gold call": many('{"name":"f","parameters":{"a":2}}'),
    # 2**61 - 1 is CPython's hash modulus: all these names have the hash 0
    "names that collide": block("\n".join(f'{{"name":{i * (2**61 - 1)}}}' for i in range(30_000))),
    "empty lines": block("\n" * MB),
    "whitespace": " " * MB,
    "think tags": fill("<think>"),
    "tool blocks": "<think>" + fill("</think>\n<tool_call>\n") + "\n</tool_call>",
    "all blocks": "<think>" + fill("</think>\n<tool_call>\n\n</tool_call>\n<response>"),
    "many keys": block(
        '{"name":"f","parameters":{' + ",".join(f'"{i}":0' for i in range(100_000)) + "}}"
    ),
    "escapes": parameter('"' + "\\u00e9" * (MB // 6) + '"'),
    "NUL": "\x00" * MB,
}
FIVE_CALLS = tool_text(*[F] * 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_scores_within_two_seconds(name):
    for gold in (FIVE_CALLS, FIVE_CALLS + "\n<response> done </response>", RESPONSE_GOLD):
        start = time.process_time()  # not of what else runs here
        score(HOSTILE[name], gold)
        assert time.process_time() - start < 2.0, gold


@pytest.mark.parametrize("gold", GOLD_OF_EVERY_KIND)
def test_the_format_where_the_prompt_has_closed_the_thought(gold):
    blocks = gold.removeprefix(THINK).removeprefix("\n")
    right = score(blocks, gold, closed_thought=True)
    assert right == {**score(gold, gold), "format": 1.0}
    wrong = [gold, f"</think>\n{blocks}", f"so\n{blocks}", f"{blocks}\nso", blocks + blocks + "x"]
    for response in wrong:
        assert score(response, gold, closed_thought=True)["format"] == 0.0, response
        correctness = score(response, gold)["correctness"]
        assert score(response, gold, closed_thought=True)["correctness"] == correctness


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_a_closed_thought_in_each_format_of_calls(call_format):
    good = tool_rl.TASK.good_response_of(TOOL_GOLD, {"call_format": call_format})
    blocks = good.removeprefix(THINK).removeprefix("\n")
    for text, closed, form in (
        (good, False, 1),
        (blocks, True, 1),
        (good, True, 0),
        (blocks, False, 0),
    ):
        rewards = score(text, TOOL_GOLD, call_format=call_format, closed_thought=closed)
        assert rewards == {"format": form, "correctness": 3.0}
