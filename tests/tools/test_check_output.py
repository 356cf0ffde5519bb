"""What `verl-gdpo check` prints: each line says how much it weighs; what weighs most is last."""

import io

import pytest

from verl_gdpo.tools.check.output import Output


class Terminal(io.StringIO):
    def isatty(self):
        return True


def fails(message):
    raise ValueError(message)


def printed(output, err):
    output.finish()
    output.finish_with_problems(err, " (-v shows more)")
    return output.out.getvalue(), err.getvalue()


def test_each_line_says_its_weight_and_problems_are_last_with_their_number():
    output = Output(io.StringIO())
    output.ask(fails, "a=1: too low")
    output.warnings.append("c is odd")
    output.refuse(lambda: ["b=2: too high\nSet it to 1", "a=1: too low"])
    output.warn(lambda: "")
    output.note(["30 steps", "one file"])
    said, problems = printed(output, io.StringIO())
    assert said.splitlines() == [
        "verl-gdpo check: note: 30 steps",
        "verl-gdpo check: note: one file",
        "verl-gdpo check: warning: c is odd",
    ]
    assert problems == (
        "verl-gdpo check: problem: a=1: too low\n"
        "verl-gdpo check: problem: b=2: too high\n       Set it to 1\n"
        "verl-gdpo check: 2 problems, 1 warning (-v shows more)\n"
    )


@pytest.mark.parametrize(("warnings", "counted"), [([], ""), (["x", "y"], ", 2 warnings")])
def test_without_a_problem_the_last_line_says_so(warnings, counted):
    output = Output(io.StringIO())
    output.warnings += warnings
    said, problems = printed(output, io.StringIO())
    assert problems == ""
    assert said.splitlines()[-1] == f"verl-gdpo check: no problem found{counted}"
    assert said.count("verl-gdpo check: warning: ") == len(warnings)


@pytest.mark.parametrize("has_problem", [True, False])
def test_a_brief_output_has_notes_beside_a_problem_alone(has_problem):
    output = Output(io.StringIO(), is_brief=True)
    output.note("30 steps")
    output.show("a table")
    output.warnings.append("odd")
    assert output.out.getvalue() == ""
    if has_problem:
        output.problems.append("wrong")
    said, _ = printed(output, io.StringIO())
    assert ("verl-gdpo check: note: 30 steps\na table\n" in said) == has_problem
    assert "verl-gdpo check: warning: odd" in said


def test_colours_are_for_a_terminal_alone_and_for_nobody_who_does_not_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def shown(stream):
        output = Output(stream())
        output.note("long " * 40)
        output.warnings.append("odd")
        output.problems.append("wrong")
        return "".join(printed(output, stream()))

    plain = shown(io.StringIO)
    assert "\x1b" not in plain
    coloured = shown(Terminal)
    assert "verl-gdpo check: \x1b[1;31mproblem:\x1b[0m wrong\n" in coloured
    assert "verl-gdpo check: \x1b[33mwarning:\x1b[0m odd\n" in coloured
    for code in ("1;31", "33", "2", "0"):
        coloured = coloured.replace(f"\x1b[{code}m", "")
    assert coloured == plain
    for variable, value in {"NO_COLOR": "1", "TERM": "dumb"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            assert shown(Terminal) == plain
