"""How dumps and metrics handle the values that a scorer may return in addition to its rewards."""

import collections
import datetime
import enum
import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl_gdpo.algorithm.values import (
    LONGEST,
    as_json,
    as_numbers_or_text,
    may_be_meant,
    plain_name,
    value_or_error,
)


class Hostile:
    def __repr__(self):
        raise KeyError("no repr")


ITSELF = object()
RING = []
RING.append(RING)


@pytest.mark.parametrize(
    ("value", "dumped"),
    [
        *[(value, ITSELF) for value in (None, True, 3, 0.5, "text", [1, "a"], {"a": [None]})],
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (torch.tensor(1.5), 1.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.1"), 0.1),
        (np.array([1, 2]), "array([1, 2])"),
        (torch.ones(2), "tensor([1., 1.])"),
        ({1}, "{1}"),
        (b"\xff", r"b'\xff'"),
        (1 + 2j, "(1+2j)"),
        (datetime.date(2026, 11, 21), "datetime.date(2026, 11, 21)"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ([{1}], "[{1}]"),
        (math.nan, "nan"),
        ([math.inf], "[inf]"),
        ("\ud800", r"\ud800"),
        (RING, "[[...]]"),
        ([10**5000], "<list without a repr>"),
        (Hostile(), "<Hostile without a repr>"),
    ],
)
def test_a_value_in_a_dump(value, dumped):
    result = as_json(value)
    if dumped is ITSELF:
        assert result is value
    else:
        assert (type(result), result) == (type(dumped), dumped)
    json.dumps(result, ensure_ascii=False, allow_nan=False).encode()


def test_a_dump_holds_a_beginning_of_what_is_long():
    for value in ("x" * LONGEST, [1] * LONGEST, {i: "x" for i in range(LONGEST)}):
        text = as_json(value)
        full = value if isinstance(value, str) else repr(value)
        assert text.startswith(full[:LONGEST]) and len(text) < LONGEST + 40
    assert f"({len(full)} characters)" in text


@pytest.mark.parametrize(
    ("column", "result"),
    [
        ([1, None, True, np.float32(0.5), Fraction(1, 4)], [1.0, None, 1.0, 0.5, 0.25]),
        ([1.0, "1"], ["1.0", "1"]),
        (["1", "2"], ["1", "2"]),
        ([None, b"1"], [None, "b'1'"]),
        ([{1}, 2], ["{1}", "2"]),
        ([torch.ones(2), 1.0], ["tensor([1., 1.])", "1.0"]),
        ([datetime.date(2026, 11, 21)], ["datetime.date(2026, 11, 21)"]),
        ([[1, 2], [3]], ["[1, 2]", "[3]"]),
        ([None, None], [None, None]),
    ],
)
def test_a_column_in_validation(column, result):
    assert as_numbers_or_text(column) == result
    assert math.isnan(as_numbers_or_text([math.nan])[0])


def test_what_is_just_not_too_long_is_kept():
    fits = ["x" * (LONGEST - 4)]  # as JSON: two brackets and two quotes more
    assert as_json(fits) is fits
    assert type(as_json([fits[0] + "x"])) is str
    text = "\ud800" + "x" * (LONGEST - 6)  # which JSON cannot hold, and is six characters as text
    assert as_json(text) == r"\ud800" + "x" * (LONGEST - 6)
    assert as_json(text + "x").endswith(f"... ({LONGEST + 1} characters)")


class Word(str):
    """As a class of the user's file, which other processes cannot import."""


class Kind(enum.IntEnum):
    GOOD = 1


class Mood(str, enum.Enum):
    CALM = "calm"


class Few(list):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Word("a"), "a"),
        (Kind.GOOD, 1),
        (Mood.CALM, "calm"),
        ([Word("a"), {Mood.CALM: Kind.GOOD}], ["a", {"calm": 1}]),
        ({"a": [Few([Kind.GOOD])]}, {"a": [[1]]}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (np.float64(0.5), 0.5),
    ],
)
def test_no_class_of_the_users_leaves_the_process(value, plain):
    def classes(value):
        inside = list(value.items()) if isinstance(value, dict) else value
        inside = inside if isinstance(value, list | tuple | dict) else []
        return {type(value)}.union(*map(classes, inside))

    result = as_json(value)
    assert result == plain
    assert classes(result) <= {str, int, float, list, dict, tuple}
    assert plain_name(Mood.CALM) == "calm" and type(plain_name(Mood.CALM)) is str
    assert plain_name(3) == 3


def test_a_look_at_a_mapping_does_not_change_it():
    value = collections.defaultdict(float, a=1.0)
    assert not may_be_meant(value)
    assert as_json(value) == {"a": 1.0}
    assert {**value} == {"a": 1.0}


@pytest.mark.parametrize("value", [1e39, -1e155, np.float32(2e38), 10**40])
def test_a_value_that_would_overflow_is_refused(value):
    with pytest.raises(ValueError, match=r"a is -?\S+; expected a number from -1e\+38 to 1e\+38"):
        value_or_error(value, "a ")
    assert value_or_error(-1e38) == -1e38


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_numbers_become_python_floats(value):
    assert type(value_or_error(value)) is float
    assert value_or_error(value) == 1.0


MEANT = ["1.0", "[1]", "array(1.)", "array([1.])", [1.0], np.array([1.0])]


@pytest.mark.parametrize("value", MEANT)
def test_what_may_be_meant_as_a_number(value):
    assert may_be_meant(value)


@pytest.mark.parametrize("value", ["yes", "nan", "(1)", [1.0, 2.0], ["inf"], [], {"a": 1}, None])
def test_what_is_not_meant_as_a_number(value):
    assert not may_be_meant(value)
