"""How many kinds of mistakes `verl-gdpo check` says, and how many healthy runs it refuses.

`check_mistakes.txt` and `check_healthy.txt` are the lists; docs/check.md has the counts. Of
`check_broken.txt`, the whole messages are compared. Lines of `check_pairs.txt` have several
mistakes.
"""

import pytest
from repository import REPO
from rows_for_check import arguments_of, messages_of


def lines_of(name):
    """Five of six take longer than all other tests of check, and rarely fail."""
    lines = (REPO / "tests" / "tools" / f"check_{name}.txt").read_text().splitlines()
    for number, line in enumerate(line for line in lines if not line.startswith("#")):
        yield pytest.param(*line.split(" | "), marks=pytest.mark.slow if number % 6 else ())


@pytest.mark.parametrize(("added", "words"), [*lines_of("mistakes")])
def test_a_mistake_is_said(plain, data, added, words):
    """In a warning or a problem: after a problem, other remarks are shown too."""
    _, warnings, problems = plain("--brief", *arguments_of(added, data))
    assert [part for part in words.split(" & ") if part not in (problems or warnings)] == []


@pytest.mark.parametrize(("added", "words"), [*lines_of("pairs")])
def test_no_mistake_hides_another(plain, data, added, words):
    code, warnings, problems = plain("--brief", *arguments_of(added, data))
    assert code == 1
    told = problems + warnings
    assert [part for part in words.split(" & ") if part not in told] == [], told


@pytest.mark.parametrize(("added", "message"), [*lines_of("broken")])
def test_a_broken_configuration(plain, data, added, message):
    code, _, printed = plain(*arguments_of(added, data))
    assert code == 1
    messages = [text.replace(str(data), "DATA") for text in messages_of(printed)]
    assert messages == message.split(" && ")


@pytest.mark.parametrize("added", [*lines_of("healthy")])
def test_a_healthy_configuration_is_not_refused(plain, data, added):
    code, _, problems = plain(*arguments_of(added, data))
    assert (code, problems) == (0, "")
