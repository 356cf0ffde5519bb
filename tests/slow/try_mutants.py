"""Makes each fault of `mutants.py` in a copy, where its test has to fail: `nox -s mutants`."""

import shutil
import subprocess
import sys

import pytest
from mutants import MUTANTS
from repository import REPO

COPIED = (
    *("verl_gdpo", "tests", "data_prep", "docs", "workshop", "recipes"),
    *("pyproject.toml", "README.md"),
)
TESTS_FAILED = 1  # pytest's exit status if a test failed; other statuses mean that no test ran


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a copy of the project in which all tests of the table pass."""
    folder = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source = REPO / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    assert status_of(folder, *dict.fromkeys(mutant.test for mutant in MUTANTS)) == 0
    return folder


def status_of(folder, *tests):
    """Return pytest's exit status in the copy, which is imported before an installed package."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    names = [f"tests/{test}" for test in tests]
    return subprocess.run([*command, *names], cwd=folder, check=False, timeout=600).returncode


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.before}")
def test_is_found(copy, mutant):
    file = copy / "verl_gdpo" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.before, mutant.after))
    try:
        assert status_of(copy, mutant.test) == TESTS_FAILED
    finally:
        file.write_text(text)
