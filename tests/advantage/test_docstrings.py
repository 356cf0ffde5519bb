"""The examples in docstrings of the equation and the settings give what they say."""

import doctest

import pytest

from verl_gdpo.advantage import equation
from verl_gdpo.settings import reward_terms


@pytest.mark.parametrize("module", [equation, reward_terms], ids=lambda module: module.__name__)
def test_examples_give_what_they_say(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0
