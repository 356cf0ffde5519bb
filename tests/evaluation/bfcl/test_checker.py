"""Calls of a single turn against the package's checker, on small questions made here."""

import json

import bfcl_gold
import pytest

from verl_gdpo.evaluation.bfcl import checker
from verl_gdpo.evaluation.bfcl.form import Call, calls
from verl_gdpo.sandbox.limited_process import LimitedPool


def document(name, **types):
    properties = {key: {"type": kind, "description": "?"} for key, kind in types.items()}
    for one in properties.values():
        if one["type"] in ("array", "ArrayList"):
            one["items"] = {"type": "String" if one["type"] == "ArrayList" else "integer"}
    required = [key for key in types if key != "unit"]
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": name, "description": "?", "parameters": parameters}


AREA = document("area.of", base="integer", sides="array", unit="string")
GOLD = {"area.of": {"base": [10], "sides": [[3, 4]], "unit": ["cm", ""]}}
OTHER = {"area.of": {"base": [2], "sides": [[5]], "unit": [""]}}
ROWS = {
    "simple": {"function": [AREA], "ground_truth": [GOLD]},
    "multiple": {"function": [document("other"), AREA], "ground_truth": [GOLD]},
    "parallel": {"function": [AREA], "ground_truth": [GOLD, OTHER]},
    "irrelevance": {"function": [AREA], "ground_truth": ""},
    "live_relevance": {"function": [AREA], "ground_truth": ""},
    "java": {
        "function": [document("List.add", items="ArrayList", at="long")],
        "ground_truth": [{"List.add": {"items": [["a", "b"]], "at": [5]}}],
    },
    "javascript": {
        "function": [document("add", items="array")],
        "ground_truth": [{"add": {"items": [[1, 2]]}}],
    },
}


def is_correct(category, found):
    return checker.is_correct(ROWS[category], category, [Call(*one) for one in found])


@pytest.mark.parametrize("category", ["simple", "multiple", "parallel", *checker.LANGUAGES])
def test_each_alternative_of_the_ground_truth_is_right(category):
    tried = [*bfcl_gold.right_calls(ROWS[category], category)]
    assert len(tried) == (1 if category in checker.LANGUAGES else 2)  # with the unit, and without
    assert all(is_correct(category, found) for found in tried)
    assert not is_correct(category, [])


# how a wrong answer is wrong, and where it is right all the same
@pytest.mark.parametrize(
    ("kind", "right_in"),
    [
        *((kind, ()) for kind in ("name", "missing", "extra", "type", "nested", "two for one")),
        ("order", ("simple", "multiple", "parallel")),  # of parameters, and of parallel calls
        ("optional", ("simple", "multiple", "parallel")),  # the unit is left out
        ("prose around", ("simple", "multiple", "parallel")),
        ("broken JSON", ()),
        ("two tags", ()),
    ],
)
def test_wrong_answers(kind, right_in):
    for category in ("simple", "multiple", "parallel"):
        right = next(bfcl_gold.right_calls(ROWS[category], category))
        answer, in_it = bfcl_gold.wrong_answers(right)[kind]
        found = [(call.name, call.parameters) for call in calls(answer, multi_turn=False)]
        assert found == in_it
        assert is_correct(category, found) is (category in right_in)


def test_where_no_function_fits_a_call_is_wrong():
    for found in ([], [("anything", {})]):
        assert is_correct("irrelevance", found) is not found
        assert is_correct("live_relevance", found) is bool(found)


@pytest.mark.parametrize(
    "found",
    [
        {"base": 10, "sides": {"x": 1}},
        {"base": 10, "sides": [[[]]]},
        {"base": float("nan"), "sides": [3, 4]},
        {"base": 10, "sides": json.loads("[" * 900 + "]" * 900)},
        {"base": 10, "sides": [3, 4], "unit": "c" * 10_000_000},
        {"base": 10, "sides": [3] * 100_000},
        {"base": "__import__('os').abort()", "sides": [3, 4]},
    ],
    ids=["object", "nested", "nan", "deep", "long", "many", "code"],
)
def test_a_hostile_answer_is_wrong(found):
    for category in ("simple", "multiple"):
        assert is_correct(category, [("area.of", found)]) is False
    assert is_correct("parallel", [("area.of", found)] * 2) is False


def test_java_has_a_process_with_limits(monkeypatch):
    pool, at_end = LimitedPool(checker.__file__, 0.5, checker.LIMIT_BYTES), []

    class Asked:
        def ask(self, request, doing):
            at_end.append(pool.ask(request, doing))
            return at_end[-1]

    monkeypatch.setattr(checker, "_pool", Asked())
    # the time of the package's regular expression doubles with each pair of brackets
    text = "new Array([]" + ",[]" * 60
    assert is_correct("javascript", [("add", {"items": text})]) is False
    assert at_end.pop() == ([], False)
    # the package's int() raises over this one
    (((name, given),),) = bfcl_gold.right_calls(ROWS["java"], "java")
    assert is_correct("java", [(name, {**given, "at": "9" * 5000 + "L"})]) is False
    assert at_end.pop() == ([False], True)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert is_correct("java", [(name, {"items": deep})]) is False
    assert at_end == []
    # and what is not the answer's doing stops the evaluation
    monkeypatch.setattr(checker, "_pool", LimitedPool("/nowhere", 1, checker.LIMIT_BYTES))
    with pytest.raises(OSError, match="checker of bfcl-eval, java: no process for it can be start"):
        is_correct("java", [("List.add", {})])
