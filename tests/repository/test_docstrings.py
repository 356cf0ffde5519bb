"""The examples in docstrings give what they say."""

import doctest
import importlib

import pytest
from repository import REPO

FILES = [REPO / "verl_gdpo" / name for name in ("trl_rewards.py", "scoring/reward_functions.py")]
FILES += [f for room in ("algorithm", "tasks") for f in (REPO / "verl_gdpo" / room).rglob("*.py")]
WITH_EXAMPLE = [file for file in sorted(FILES) if ">>> " in file.read_text()]
MODULES = [".".join(file.relative_to(REPO).with_suffix("").parts) for file in WITH_EXAMPLE]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_say(module):
    failed, tried = doctest.testmod(importlib.import_module(module.removesuffix(".__init__")))
    assert failed == 0 and tried > 0


def test_the_functions_that_are_used_most_have_an_example():
    of_tasks = {f"verl_gdpo.tasks.{task}.score" for task in ("gsm8k", "tool_rl")}
    assert {"verl_gdpo.algorithm.advantage", "verl_gdpo.trl_rewards"} | of_tasks <= {*MODULES}
