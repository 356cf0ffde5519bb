"""What a process loads to score a row: the scorer of its task, and nothing of another one."""

import pytest
from processes import completed

PROGRAM = """
import sys
from verl_gdpo.tasks import TASK_BY_SOURCE, options_for
options = options_for({source!r}, {options})
TASK_BY_SOURCE[{source!r}].score("", {truth!r}, response_tokens=0, **options)
print(*sys.modules)
"""
REGISTRY = {"tasks"}
TASKS = ("coding", "constraints", "gsm8k", "math_length", "tool_rl")
FOLDERS = {f"tasks.{name}" for name in TASKS}  # a line each
SANDBOX = {"tasks.sandbox"} | {f"tasks.sandbox.{name}" for name in ("inside", "lock", "machine")}
CODING_TRUTH = '{"function": null, "tests": [{"input": "", "output": ""}]}'
TOOL_RL = {f"tasks.tool_rl.{name}" for name in ("score", "form", "call_formats")}
CODING = {"tasks.coding.score", "tasks.coding.problem", *SANDBOX}
MATH = {"tasks.math_length.score", *SANDBOX, "tasks.sandbox.limited_pool", "terminal"}


@pytest.mark.parametrize(
    ("source", "truth", "options", "own"),
    [
        ("verl_gdpo/gsm8k", "72", {}, {"tasks.gsm8k.score"}),
        ("verl_gdpo/constraints", '{"keyword": ["a"]}', {}, {"tasks.constraints.score"}),
        ("rlla", "x", {}, TOOL_RL),
        ("verl_gdpo/coding", CODING_TRUTH, {}, CODING),
        ("verl_gdpo/math_length", "7", {}, MATH),
    ],
)
def test_a_row_loads_its_own_scorer_and_nothing_heavy(source, truth, options, own):
    code = PROGRAM.format(source=source, truth=truth, options=options)
    loaded = {*completed("-c", code).stdout.split()}
    ours = {name.removeprefix("verl_gdpo.") for name in loaded if name.startswith("verl_gdpo.")}
    assert ours == REGISTRY | FOLDERS | own
    assert not loaded & {"sympy", "math_verify", "torch", "verl", "ray", "transformers"}
