"""Each text in the table of mutants occurs exactly once in its file, and each test exists."""

from fnmatch import fnmatch

import last_passes
import pytest
from mutants import MUTANTS
from repository import REPO


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.before}")
def test_a_mutant_can_be_made_and_its_test_run(mutant):
    text = (REPO / "verl_gdpo" / mutant.file).read_text()
    assert text.count(mutant.before) == 1
    compile(text.replace(mutant.before, mutant.after), mutant.file, "exec")
    file, name = mutant.test.split("::")
    assert f"\ndef {name}(" in (REPO / "tests" / file).read_text()


def test_no_mutant_is_in_a_file_that_mutmut_changes():
    tool = pytest.importorskip("tomllib").loads((REPO / "pyproject.toml").read_text())["tool"]
    for mutant in MUTANTS:
        file = f"verl_gdpo/{mutant.file}"
        assert not any(fnmatch(file, one) for one in tool["mutmut"]["only_mutate"]), file


def test_the_session_covers_each_test_of_the_table():
    covered = last_passes.covered(REPO)["mutants"]
    assert all(last_passes.is_under(f"tests/{one.test}", covered) for one in MUTANTS)
