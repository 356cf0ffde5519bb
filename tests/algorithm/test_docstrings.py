"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
from repository import REPO

ROOMS = ("algorithm", "tasks")
FILES = [REPO / "verl_gdpo" / "trl_rewards.py"]
FILES += [file for room in ROOMS for file in sorted((REPO / "verl_gdpo" / room).rglob("*.py"))]
MODULES = [
    ".".join(Path(file).relative_to(REPO).with_suffix("").parts)
    for file in FILES
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_say(module):
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert failed == 0 and tried > 0


def test_the_functions_that_are_used_most_have_an_example():
    assert {
        "verl_gdpo.algorithm.advantage",
        "verl_gdpo.tasks.gsm8k.score",
        "verl_gdpo.tasks.tool_rl.score",
        "verl_gdpo.trl_rewards",
    } <= {*MODULES}
