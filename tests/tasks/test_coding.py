"""The coding scorer: which programs are right, short and sound; which ground truths are none."""

import json
import math
import random

import pytest
from verl.utils.reward_score import prime_code

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.coding import score as coding
from verl_gdpo.tasks.coding.problem import good_response, parse, program_of
from verl_gdpo.tasks.coding.score import score
from verl_gdpo.tasks.coding.test_cases import problem_of


def truth(tests, function=None, **more):
    return json.dumps({"function": function, "tests": tests, **more})


def block(program):
    return f"Think.\n```python\n{program}\n```\nDone."


def call(*args, accepted, **kwargs):
    return {"args": [*args], "kwargs": kwargs, "accepted": accepted}


PRINTS = truth([{"input": "3\n", "output": "10\n"}, {"input": "4\n", "output": "11\n"}])
CALLS = truth([call(3, accepted=[10]), call(4, accepted=[11])], "add")

HALF_RIGHT = "print(10); input()"
STOPS_AT_4 = "n = int(input())\nassert n != 4\nprint(n + 7)"


@pytest.mark.parametrize(
    ("response", "passed", "bug"),
    [
        (block("print(int(input()) + 7)"), 1, 1),
        (block(HALF_RIGHT), 0.5, 1),
        (block(STOPS_AT_4), 0.5, 0),
        (block("print(0)"), 0, 1),
        (block("print(1 / 0)"), 0, 0),
        (block("print('10'); print(1 / 0)"), 0, 0),  # the output of a crash is none
        (block("print("), 0, 0),
        # what prints nothing in any test has not run
        (block(""), 0, 0),
        ("```python", 0, 0),
        (block("# print(int(input()) + 7)"), 0, 0),
        (block("import os\nos._exit(0)"), 0, 0),
        (block("print()"), 0, 0),
        (block("n = int(input())\nif n == 4: print(0)"), 0, 1),
        (block("import os\nos.write(1, b'10')\nos._exit(0)"), 0.5, 1),
        (block("while True: pass"), 0, 0),
        ("I would print(int(input()) + 7).", 0, 0),  # no block, no program
    ],
)
def test_scores(response, passed, bug, truth=PRINTS):
    expected = {"pass": passed, "length": float(passed == 1), "bug": bug}
    assert score(response, truth, response_tokens=4000, seconds=1) == expected


@pytest.mark.parametrize(
    ("program", "passed", "bug"),
    [
        ("def add(n): return n + 7", 1, 1),
        ("def add(n): print('10'); return 10", 0.5, 1),
        ("def add(n): print(n + 7)", 0, 1),
        ("def other(n): return n + 7", 0, 0),
        # what is no result of the function does not pass for one
        ("class Equal(list):\n    __eq__ = lambda *_: True\ndef add(n): return Equal()", 0, 1),
        ("def add(n): return float('nan')", 0, 1),
        ("def add(n): return 10 ** 5000", 0, 1),
        ("def add(n): return {10, 11}", 0, 1),
    ],
)
def test_scores_of_functions(program, passed, bug):
    test_scores(block(program), passed, bug, CALLS)


def test_a_program_that_has_nothing_to_print():
    assert score(block(""), truth([{"input": "", "output": "\n"}])) == dict.fromkeys(
        ("pass", "length", "bug"), 1.0
    )


def test_the_tests_after_a_limit_are_not_passed():
    """Each of the tests but the second would be passed."""
    tests = [{"input": str(n), "output": str(n)} for n in range(4)]
    loops_once = block("n = int(input())\nwhile n == 1: pass\nprint(n)")
    notes = sandbox.ExecutionNotes()
    found = score(loops_once, truth(tests), seconds=1, wall_seconds=60, notes=notes)
    assert found == {"pass": 0.25, "length": 0.0, "bug": 0.0}
    assert notes.stopped and notes.seconds_waited > 0


SEARCH = """
import gc, re, sys
found, frame = [], sys._getframe()
while frame:
    found += [repr(value) for value in frame.f_locals.values()]
    frame = frame.f_back
found += [repr(item) for item in gc.get_objects() if type(item) in (dict, list, tuple)]
print(*sorted({text for piece in found for text in re.findall("MARK" + r"ED\\w+", piece)}))
"""


def test_a_program_sees_its_inputs_and_no_expected_results():
    """The program prints what it finds in its memory of both."""
    tests = [{"input": "MARKEDgiven", "output": out} for out in ("MARKEDwanted", "MARKEDgiven")]
    assert score(block(SEARCH), truth(tests)) == {"pass": 0.5, "length": 0.0, "bug": 1.0}
    assert score(block(SEARCH), truth(tests, solution="MARKEDsolution"))["pass"] == 0.5


def test_length():
    good, half = block("print(int(input()) + 7)"), block(HALF_RIGHT)

    def length(response, tokens, **options):
        return score(response, PRINTS, response_tokens=tokens, **options)["length"]

    assert [length(good, tokens) for tokens in (None, 1, 4000, 4001)] == [1, 1, 1, 0]
    assert [length(half, tokens) for tokens in (1, 4001)] == [0, 0]
    assert [length(half, t, length_needs_pass=False) for t in (1, 4000, 4001)] == [1, 1, 0]
    assert [length(good, tokens, limit_tokens=18) for tokens in (18, 19)] == [1, 0]


def test_only_so_many_tests_run():
    tests = [{"input": f"{n}", "output": f"{min(n, 3)}"} for n in range(1, 13)]
    echo = block("print(input())")
    # 3 of the first 10 are right; 3 of all 12; 2 of the first 2
    assert score(echo, truth(tests))["pass"] == 0.3
    assert score(echo, truth(tests), max_tests=12)["pass"] == 0.25
    assert score(echo, truth(tests), max_tests=2)["pass"] == 1.0


def test_limits_reach_the_sandbox(monkeypatch):
    given = {}

    def run(program, tests, **options):
        given.update(options, tests=tests)
        return [sandbox.TestResult(True, "")] * len(tests)

    monkeypatch.setattr(sandbox, "run", run)
    notes = sandbox.ExecutionNotes()
    options = {"seconds": 2, "wall_seconds": 3, "memory_mb": 256, "notes": notes}
    score(block("x"), CALLS, **options, weak_sandbox=True)
    tests = [{"args": [3], "kwargs": {}}, {"args": [4], "kwargs": {}}]
    assert given == {"tests": tests, "function": "add", **options, "allow_weak": True}


PRINTED = [  # what was printed, what is expected, whether that is right to us, and to verl
    ("1 2\n3\n", "1 2\n3", True, True),
    (" 1 2 \n3", "1 2\n3\n", True, True),
    ("1 2\n\n3", "1 2\n3\n", True, True),
    ("1 2 3", "1 2\n3\n", False, False),
    ("12", "1 2", False, False),
    ("2 1", "1 2", False, False),
    ("3\n1 2", "1 2\n3", False, False),
    ("YES", "Yes", False, False),
    ("x", "a.b", False, False),
    ("", "", True, True),
    ("", "0", False, False),
    # one number in each line
    ("0", "0.000002", False, False),
    ("0.000002000001", "0.000002", True, True),
    ("0.3333333333333333", "0.33333333", True, True),
    ("0.1", "0.2", False, False),  # nor is the last of few digits a small one
    # an absolute error of 1e-6, which verl does not allow
    ("0", "0.0000001", True, False),
    ("0.0000009", "0.0", True, False),
    ("0.000002", "0.0", False, False),
    ("1e-7", "0", False, False),
    ("0.500004", "0.5", True, True),
    ("0.500007", "0.5", False, False),
    ("1000000.5", "1000000.0", True, True),
    ("2.0", "2", True, True),
    ("5e-1", "0.5", True, True),
    ("2\n0.500004", "2\n0.5", True, True),
    ("100001", "100000", False, False),
    # digits behind a leading zero are no number
    ("10", "0010", False, True),
    ("0", "000", False, True),
    ("0010", "0010", True, True),
    ("0", "0", True, True),
    ("nan", "0.5", False, False),
    ("sNaN", "0.5", False, False),
    # an integer is exact, also beside numbers that are not
    ("-100001", "-100000", False, True),
    ("100001\n0.5", "100000\n0.50", False, True),
    # verl does not strip lines among blank ones, and compares lines of several words as text
    ("1 2\n\n 3", "1 2\n3", True, False),
    ("1  2", "1 2", True, False),
    ("0.500004 2", "0.5 2", True, False),
]


@pytest.mark.parametrize(
    ("output", "expected", "is_right"),
    [
        ("0", "inf", False),
        ("5", "Infinity", False),
        ("inf", "inf", True),
        ("1_0", "10", False),
        ("1e1000000", "0.5", False),  # decimal.Overflow in a difference
        ("1e-1000000", "0.5", False),
    ],
)
def test_what_is_no_finite_number_is_a_word(output, expected, is_right):
    """A number within 1e-5 of infinity would be any number."""
    assert coding._is_right(output, {"output": expected}) == is_right
    if "_" not in output and "e" not in output:
        value = float(expected)
        output = output.replace("inf", "Infinity")
        assert coding._is_right(output, {"accepted": [value]}) == is_right


@pytest.mark.parametrize(("output", "expected", "is_right"), [row[:3] for row in PRINTED])
def test_printed_text(output, expected, is_right):
    assert coding._is_right(output, {"output": expected}) == is_right


@pytest.mark.parametrize(
    ("output", "accepted", "is_right"),
    [
        ("[1, 2]", [[1, 2]], True),
        ("[1, 2]", [[2, 1]], False),
        ("[1]", [[1, 2]], False),
        ("[1, 2]", [5, [1, 2]], True),
        ("true", [True], True),
        ("1", [True], True),  # as Python's ==, by which the asserts were written
        ('"1"', [1], False),
        ("null", [None], True),
        ("null", [0], False),
        ("0.30000000000000004", [0.3], True),
        ("0", [1e-7], True),
        ("0", [2e-6], False),
        ("1e-7", [0], False),
        ("[2.0000001, 0.5]", [[2, 0.5]], False),
        ("3", [3.0], True),
        ("[[0.30000000000000004]]", [[[0.3]]], True),
        ("3.0000001", [3], False),
        ("3.0", [3], True),
        ("1" + "0" * 400, [1.0], False),
        ('{"a": [1]}', [{"a": [1]}], True),
        ('{"a": 1}', [{"b": 1}], False),
        ("NaN", [0.5], False),
        ("", ["", None, []], False),
        ("?", ["?"], False),
        ("[" * 100_000, [[]], False),
        ("9" * 100_000, [9], False),
    ],
)
def test_results(output, accepted, is_right):
    assert coding._is_right(output, {"accepted": accepted}) == is_right


GOOD_TEST = {"input": "1", "output": "2"}


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        ("", "got no JSON"),
        (None, "got no JSON .*None"),
        ("[" * 100_000, "got no JSON"),
        ("[]", r"expected the keys"),
        (json.dumps({"tests": [GOOD_TEST]}), r"got \['tests'\]; expected the keys"),
        (truth([GOOD_TEST], extra=1), "expected the keys"),
        (truth([]), "tests: got .*at least one"),
        (truth([GOOD_TEST], "os.system"), "function: got 'os.system'"),
        (truth([GOOD_TEST], solution=1), "solution: got 1"),
        (truth([GOOD_TEST], "f"), r"tests\[0\]: got .*'accepted', 'args', 'kwargs'"),
        (truth([GOOD_TEST, {"input": "1"}]), r"tests\[1\]: got"),
        (truth([{"input": 1, "output": "2"}]), r"tests\[0\].input: got 1; expected a str"),
        (truth([{"input": "\ud800", "output": "2"}]), r"tests\[0\].input: got .*Unicode"),
        (truth([{"args": {}, "kwargs": {}, "accepted": [1]}], "f"), r"tests\[0\].args: got {}"),
        (truth([call(1, accepted=[])], "f"), r"tests\[0\].accepted: got .*at least one"),
    ],
)
def test_bad_ground_truth(ground_truth, message):
    """Found without a program, before training."""
    with pytest.raises(ValueError, match=message):
        coding.TASK.check_ground_truth(ground_truth)


def test_bad_options():
    bad = {"limit_tokens": 0, "max_tests": 0, "seconds": math.nan, "wall_seconds": 0}
    for name, value in {**bad, "memory_mb": 1}.items():
        for function in (lambda **option: score("", PRINTS, **option), coding.bounds):
            with pytest.raises(ValueError, match=f"coding {name}: got"):
                function(**{name: value})


@pytest.mark.parametrize("ground_truth", [PRINTS, CALLS])
def test_a_good_response_without_a_solution(ground_truth):
    """A table of the results; the solution where there is one."""
    assert score(good_response(ground_truth), ground_truth) == {"pass": 1, "length": 1, "bug": 1}
    known = json.loads(ground_truth) | {"solution": "print(9)\n"}
    assert good_response(json.dumps(known)) == "```python\nprint(9)\n```"


def test_round_trip():
    for ground_truth in (PRINTS, CALLS, truth([GOOD_TEST] * 12, solution="é")):
        assert parse(parse(ground_truth).text()) == parse(ground_truth)


def test_hostile_answers_of_a_megabyte():
    """None raises, hangs or passes; the sandbox's limits hold for what runs."""
    size = 1 << 20
    for text in (
        "```" * (size // 3),
        "```python" * (size // 9),
        block("(" * size),
        block("#" * size),
        block("x = " + "9" * size),
        block("-" * size + "1"),
        block("print('1 ' * 500_000)"),
        block("print('1.5 ' * 250_000)"),
        "a" * size,
        "".join(random.Random(0).choices("`pythn \n", k=size)),
    ):
        scores = score(text, PRINTS)
        assert scores["pass"] == 0 and scores["length"] == 0


FOUND = {  # the program in it; None without one
    **dict.fromkeys(
        [
            *(f"```{label}\nx = 1\n```" for label in ("", "py", "python3", "Python", "python3.11")),
            "```python\ny\n``` or\n```py\nx = 1\n``` prints\n```\n7\n```",
            "```py\nx = 1\n``` prints\n```text\n7\n```",
            *("```python3\nx = 1", "x = 1", "<think>\nMaybe y = 2?\n</think>\n\nx = 1\n"),
            *("a ```python\nx = 1\n``` b ```\ny\n```", "a ```\nx = 1\n``` b"),
            *("1. Code:\n   ```python\n   x = 1\n   ```", "``` python\nx = 1\n```"),
        ],
        "x = 1",
    ),
    **dict.fromkeys(
        [
            *("", "The answer is 1.", "I would import sys and read n.", "no block"),
            *("# Solution\n\nRead n.", "<think>\nx = 1", "<think>\nx = 1\n</think>\nI give up."),
        ]
    ),
}


def test_a_program_in_an_item_of_a_list_loses_the_indentation_of_the_item():
    item = "1. Code:\n   ```\n   if x:\n       y\n   ```"
    assert program_of(item).strip() == "if x:\n    y"
    assert program_of("```python\nif x:\n    y\n```").strip() == "if x:\n    y"


@pytest.mark.parametrize(("response", "program"), FOUND.items())
def test_a_program_is_found_in_any_fence_and_in_none(response, program):
    assert (program_of(response) or "").strip() == (program or "")
    assert (program_of(response) is None) == (program is None)


def test_verls_own_scorer_takes_the_first_element_of_a_list_for_all_of_it():
    """Ours takes it where all results of a problem are lists of one element: `test_cases.py`."""
    first = block("def f(n): return n")
    for outputs, verls, ours in ((["[1, 2, 3]", "[2]"], 1, 0), (["[1]", "[2]"], 1, 1)):
        form = {"fn_name": "f", "inputs": ["1", "2"], "outputs": outputs}
        assert float(prime_code.compute_score(first, form, continuous=True)[0]) == verls
        form = {"fn_name": "f", "inputs": ["1", "2"], "outputs": outputs}  # verl changes it
        assert score(first, problem_of(form, "here", print).text())["pass"] == ours
