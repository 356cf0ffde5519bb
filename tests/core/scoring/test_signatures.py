"""Which arguments a function takes."""

import functools

import pytest

from verl_gdpo.scoring.signatures import keywords_of, taken_arguments


def takes_two(a, *, b=1):
    pass


def takes_all(a, **others):
    pass


def by_position(a, /, *more):
    pass


class Called:
    def __call__(self, a):
        pass


@pytest.mark.parametrize(
    ("function", "names", "takes_any_other"),
    [
        (takes_two, {"a", "b"}, False),
        (takes_all, {"a"}, True),
        (by_position, set(), False),
        (Called(), {"a"}, False),
        (functools.partial(takes_two, b=2), {"a", "b"}, False),
        (functools.partial(takes_two, 1), {"b"}, False),
    ],
)
def test_the_keywords_of_a_function(function, names, takes_any_other):
    assert keywords_of(function) == (names, takes_any_other)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (takes_two, {"a": 1, "b": 2}),
        (takes_all, {"a": 1, "b": 2, "c": 3}),  # `thought` goes to a function that names it alone
        (lambda thought, **others: None, {"thought": 4, "a": 1, "b": 2, "c": 3}),
        (by_position, {}),
    ],
)
def test_a_function_gets_what_it_takes(function, taken):
    given = {"a": 1, "b": 2, "c": 3, "thought": 4}
    assert taken_arguments(function, given, if_named=["thought"]) == taken
