"""Coding problems out of the forms of others: what is read, left out with a count, and refused."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_rows import prepare

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.coding import rows as coding
from verl_gdpo.tasks.coding.problem import SYSTEM_PROMPT, good_response, parse
from verl_gdpo.tasks.coding.score import score
from verl_gdpo.tasks.coding.test_cases import problem_of


def check_of(*lines, function="Solution().f"):
    body = "".join(f"    {line}\n" for line in lines)
    return {"functional": f"def check(candidate):\n{body}\n\ncheck({function})"}


def call(*args, accepted, **kwargs):
    return {"args": [*args], "kwargs": kwargs, "accepted": accepted}


GOOD = {"problem": "Add.", "tests": [{"input": "1", "output": "2"}]}


@pytest.mark.parametrize(
    ("tests", "function", "expected"),
    [
        (
            check_of("assert candidate(nums = [2, -7], t = 'a') == [[True, None]]"),
            "f",
            [call(nums=[2, -7], t="a", accepted=[[[True, None]]])],
        ),
        (
            check_of("assert candidate((1, 2)) == 1.5", "assert candidate() == 'x'", function="g"),
            "g",
            [call([1, 2], accepted=[1.5]), call(accepted=["x"])],
        ),
        ([{"input": "1\n", "output": "2\n"}], None, [{"input": "1\n", "output": "2\n"}]),
        (
            {"inputs": ["1\n", ["2", "3"]], "outputs": ["4\n", ["5"]]},
            None,
            [{"input": "1\n", "output": "4\n"}, {"input": "2\n3", "output": "5"}],
        ),
        ({"fn_name": None, "inputs": ["1"], "outputs": ["2"]}, None, [GOOD["tests"][0]]),
        (
            {"fn_name": "f", "inputs": ['[1, 2]\n"a"', [3]], "outputs": ["7", [8, 9]]},
            "f",
            [call([1, 2], "a", accepted=[7]), call(3, accepted=[[8, 9]])],
        ),
        # each result in a list of its own, as APPS and TACO write them, or truly such lists
        (
            {"fn_name": "f", "inputs": ["1", "2"], "outputs": ["[3]", "[[4, 5]]"]},
            "f",
            [call(1, accepted=[[3], 3]), call(2, accepted=[[[4, 5]], [4, 5]])],
        ),
        (
            {"fn_name": "f", "inputs": ["1", "2"], "outputs": ["[3]", "[]"]},
            "f",
            [call(1, accepted=[[3]]), call(2, accepted=[[]])],
        ),
    ],
)
def test_forms(tests, function, expected):
    left_out = []
    problem = problem_of(tests, "here", left_out.append)
    assert (problem.function, problem.tests) == (function, expected)
    assert not left_out
    assert parse(problem.text()) == problem


KEPT = "assert candidate(1) == 1"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("assert is_same_list(candidate(1), 2)", "is not `assert candidate"),
        ("assert candidate(1) != 1", "is not `assert candidate"),
        ("assert candidate(1) == 1 == 1", "is not `assert candidate"),
        ("x = 1", "is not `assert candidate"),
        ("assert candidate(list_node([1])) == 1", "no literal"),
        ("assert candidate(1) == open('/etc/passwd').read()", "no literal"),
        ("assert candidate(**{'x': 1}) == 1", r"after \*\*"),
        ("assert candidate({1, 2}) == 1", "JSON cannot hold"),
        ("assert candidate({1: 2}) == 1", "JSON cannot hold"),
        ("assert candidate(1e999) == 1", "JSON cannot hold"),
        ("assert other(1) == 1", "is not `assert candidate"),
    ],
)
def test_a_test_that_is_left_out(line, reason):
    left_out = []
    problem = problem_of(check_of(KEPT, line), "here", left_out.append)
    assert problem.tests == [call(1, accepted=[1])]
    (why,) = left_out
    assert re.search(reason, why)


def test_a_problem_without_a_test():
    forms = [check_of("x = 1"), [], {"inputs": [], "outputs": []}]
    forms += [{"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}]
    for tests in [*forms, {"fn_name": "f", "inputs": ["1"], "outputs": ["None"]}]:
        assert problem_of(tests, "here", print) is None


@pytest.mark.parametrize(
    ("tests", "got"),
    [
        (None, "the type NoneType"),
        ({}, "the keys"),
        ({"inputs": ["1"], "outputs": ["1"], "other": 1}, "the keys"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
        ({"inputs": "1", "outputs": ["1"]}, "the type str where a list should be"),
        ({"inputs": [1], "outputs": ["1"]}, "the type int where a text should be"),
        ({"fn_name": 3, "inputs": ["1"], "outputs": ["1"]}, "the type int where a text should be"),
        ({"assert_case": ["assert f() == 1"]}, "the keys"),
        ({"functional": "assert f() == 1"}, "not `def check"),
        ([{"input": "1", "output": "2"}, {"input": "1"}], "test 1 without input and output"),
        ([{"input": "1", "output": 2}], "in test 0 the type int where a text should be"),
    ],
)
def test_another_form_is_an_error(tests, got):
    with pytest.raises(ValueError, match=rf"^field here: got .*{got}.*expected {{functional}}"):
        problem_of(tests, "here", print)


def write(path, rows):
    path.write_text(json.dumps(rows))
    return path


def test_files_of_problems(tmp_path, capsys):
    leetcode = {
        "problem": "Say one.",
        "solutions": "class Solution:\n    def f(self, n): return 1",
        "tests": check_of(KEPT, "assert is_same_list(candidate(1), 1)"),
    }
    nothing = {"problem": "Lists.", "tests": check_of("assert is_same_list(candidate(1), 1)")}
    source = write(tmp_path / "a.json", [GOOD, nothing, leetcode])
    test = write(tmp_path / "b.json", [{**GOOD, "solutions": ["1 / 0", "print(3)", "print(2)"]}])
    code, (train_rows, test_rows) = prepare("coding", tmp_path, "--from", source, "--test", test)
    assert code == 0
    first, second = train_rows
    assert first["prompt"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Add."},
    ]
    assert first["data_source"] == "verl_gdpo/coding"
    assert [row["extra_info"]["index"] for row in train_rows] == [0, 1]
    truth = second["reward_model"]["ground_truth"]
    assert score(good_response(truth), truth) == {"pass": 1, "length": 1, "bug": 1}
    assert parse(test_rows[0]["reward_model"]["ground_truth"]).solution == "print(2)"
    said = capsys.readouterr().err
    reason = "a statement that is not `assert candidate(...) == literal`"
    assert f"{source}: 2 x left out, of the tests ({reason}): row 1, 2\n" in said
    assert f"{source}: 1 x left out (no test that can be used): row 1\n" in said
    assert str(test) not in said


SEVERAL = [
    "If there are multiple answers, print any of them.",
    "If there is more than one solution, you can output any.",
    "Otherwise, print any suitable value of d.",
    "You may return the answer in any order.",
    "The integers in the lists may be returned in any order.",
    "Return any valid permutation.",
    "For each test, output n integers, any suitable matrix.",
]
ONE = [
    "You can finish the tasks in any order you like. Return the minimum energy.",
    "You may swap them multiple times and in any order. Print the least distance.",
    "If there are multiple rooms, return the room with the lowest number.",
    "Print YES if the base does not contain any of the squares.",
    "There are several test cases. Print the sum.",
]


def test_problems_that_take_any_of_several_answers_are_left_out(tmp_path, capsys):
    rows = [{**GOOD, "problem": f"{n:02}: {text}"} for n, text in enumerate((*SEVERAL, *ONE))]
    test = write(tmp_path / "b.json", [GOOD])
    files = ("--from", write(tmp_path / "a.json", rows), "--test", test)
    code, (train, _) = prepare("coding", tmp_path, *files)
    assert code == 0
    assert [row["prompt"][1]["content"][4:] for row in train] == ONE
    why = "it takes any of several answers, and its tests know one"
    assert f"7 x left out ({why}): row 0, 1, 2, 3, 4, 5, 6\n" in capsys.readouterr().err


def test_a_solution_is_run_and_a_row_that_contradicts_it_is_left_out(tmp_path, capsys):
    solutions = ["print(2)", "print(3)", "import numpy\nprint(2)", ["print(3)", "1 / 0"], [], None]
    rows = [{**GOOD, "problem": f"Add {n}.", "solutions": s} for n, s in enumerate(solutions)]
    source = write(tmp_path / "a.json", rows)
    code, (train, _) = prepare("coding", tmp_path, "--from", source, "--test", source)
    assert code == 0
    kept = [parse(row["reward_model"]["ground_truth"]).solution for row in train]
    assert kept == ["print(2)", None, None, None]
    assert [row["prompt"][1]["content"] for row in train] == [f"Add {n}." for n in (0, 2, 4, 5)]
    said = capsys.readouterr().err
    assert f"{source}: 2 x left out (its solution gives other results than its te" in said
    assert (
        f"{source}: 1 x repaired (its solution, which does not run here, is gone): row 2\n" in said
    )


def test_how_solutions_run(tmp_path, monkeypatch):
    """In a weak sandbox if it is named, and with time enough for a busy machine to decide none."""
    given = []

    def run(program, tests, *, allow_weak, wall_seconds, **_):
        given.append((allow_weak, wall_seconds))
        return [sandbox.TestResult(True, "2\n")] * len(tests)

    monkeypatch.setattr(sandbox, "run", run)
    rows = [{**GOOD, "problem": f"Add {n}.", "solutions": ["a", "b"][: n + 1]} for n in range(2)]
    # asks the same as the first, so its solution is tried on the tests of that one
    rows.append({**rows[0], "solutions": ["c"]})
    source = write(tmp_path / "a.json", rows)
    for more in ([], ["--weak-sandbox"]):
        code, _ = prepare("coding", tmp_path, "--from", source, "--test", source, *more)
        assert code == 0 and {is_weak for is_weak, _ in given} == {bool(more)}
        assert given[0] == (bool(more), 60.0)  # a row's solution, before rows are compared
        given.clear()


def test_one_problem_with_other_tests(tmp_path, capsys):
    """They agree if the solution of one passes the tests of the other."""
    more = [{"input": "5", "output": "6"}]
    add = {"problem": "Add one.", "solutions": "print(int(input()) + 1)"}
    rows = [
        {**add, "tests": GOOD["tests"]},
        {**add, "tests": more},
        {**GOOD, "problem": "Two."},
        {**GOOD, "problem": "Two.", "tests": more},
    ]
    source = write(tmp_path / "a.json", rows)
    _, (train, _) = prepare("coding", tmp_path, "--from", source, "--test", source)
    assert [row["prompt"][1]["content"] for row in train] == ["Add one."]
    said = capsys.readouterr().err
    assert "1 x left out (an earlier row asks the same): row 1\n" in said
    assert "2 x left out (rows that ask the same and disagree on the answer): row 2, 3\n" in said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x", "row 1, the whole row: got 'x'; expected an object"),
        ({"problem": "Add."}, "row 1, field tests: missing"),
        ({**GOOD, "hint": 1}, "row 1, field hint: unknown"),
        ({**GOOD, "solutions": [1]}, "row 1, field solutions: got 1; expected a str"),
        ({**GOOD, "tests": {}}, "row 1, field tests: got the keys"),
        ({**GOOD, "problem": "\ud800"}, "row 1, field prompt"),
        ({**GOOD, "problem": ""}, "row 1, field prompt[1].content: got ''; expected some text"),
    ],
)
def test_a_bad_row_is_refused(tmp_path, capsys, row, message):
    source = write(tmp_path / "a.json", [GOOD, row])
    assert prepare("coding", tmp_path, "--from", source, "--test", source) == (1, [None, None])
    assert f"a.json, {message}" in capsys.readouterr().err


def verls(path, rows):
    """Rows as in Eurus-2-RL."""
    columns = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Problem {number}"}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (source, truth) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(columns), path)
    return path


def test_a_file_of_verls(tmp_path, capsys):
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    rows = [("numina_amc_aime", "7"), ("taco", tests), ("codecontests", tests), ("apps", tests)]
    path = verls(tmp_path / "eurus.parquet", rows)
    table = pq.read_table(path).to_pylist()
    table[3]["prompt"][0]["content"] = "Print any of them."
    pq.write_table(pa.Table.from_pylist(table), path)
    code, (train, _) = prepare("coding", tmp_path, "--from", path, "--test", path)
    assert code == 0
    assert [row["prompt"][0]["content"] for row in train] == ["Problem 1", "Problem 2"]
    assert {row["data_source"] for row in train} == {"verl_gdpo/coding"}
    truth = parse(train[0]["reward_model"]["ground_truth"])
    assert truth.tests == [{"input": "1\n", "output": "2\n"}]
    assert "1 x left out (another task): row 0\n" in capsys.readouterr().err


def test_a_bad_row_of_verls(tmp_path, capsys):
    for truth, message in (("{", "got no JSON"), ('{"inputs": []}', "got the keys")):
        path = verls(tmp_path / "eurus.parquet", [("numina_amc_aime", "7"), ("apps", truth)])
        assert prepare("coding", tmp_path, "--from", path, "--test", path)[0] == 1
        said = capsys.readouterr().err
        assert f"eurus.parquet, row 1, field reward_model.ground_truth: {message}" in said


def test_our_own_parquet_comes_back_as_it_is(tmp_path):
    _, (train, test) = prepare("coding", tmp_path, "--synthetic", 6)
    out = tmp_path / "out"
    (tmp_path / "again").mkdir()
    files = ("--from", out / "train.parquet", "--test", out / "test.parquet")
    assert prepare("coding", tmp_path / "again", *files) == (0, [train, test])


def test_synthetic_rows():
    rows = [*coding.make_rows(30, split="train", seed=3)]
    problems = [parse(row["reward_model"]["ground_truth"]) for row in rows]
    assert {problem.function for problem in problems} == {None, "f"}
    # both lengths of both kinds
    assert {problem.solution.count("\n") for problem in problems} == {0, 1, 2}


def test_synthetic_splits_share_no_pair():
    def pairs(split):
        rows = [*coding.make_rows(300, split=split, seed=0)]
        return {tuple(row["prompt"][-1]["content"].rstrip(".").split()[-2:]) for row in rows}

    train, test = pairs("train"), pairs("test")
    assert not train & test
    # each operator, and nearly each number, is in both
    assert {o for o, _ in train} == {o for o, _ in test} == {"+", "-", "*"}
    assert len({n for _, n in train} & {n for _, n in test}) > 30
