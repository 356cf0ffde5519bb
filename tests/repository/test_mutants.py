"""Each text in the table of mutants occurs exactly once in its file, and each test exists."""

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
