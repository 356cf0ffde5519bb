"""What each room may import, where import-linter cannot say it."""

import ast
import sys

import pytest
from repository import REPO

ALGORITHM = {"numpy", "torch", "omegaconf", "pydantic", "verl_gdpo"}


def test_the_algorithm_imports_four_packages():
    for file in (REPO / "verl_gdpo" / "algorithm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            assert packages <= ALGORITHM, file.name


# Its tests start Ray, and lie in tests/on_ray.
NEEDS_RAY = {"shared_limits"}


def has_code(file):
    code = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, code) for node in ast.parse(file.read_text()).body)


@pytest.mark.parametrize("room", ["algorithm", "scoring", "hooks"])
def test_each_module_of_the_core_has_tests_under_its_name(room):
    """`test_trainer.py`, and what would make it too long in `test_trainer_dropped.py`."""
    files = [*(REPO / "verl_gdpo" / room).glob("*.py")]
    modules = {file.stem for file in files} - {"__init__"}
    tests = {
        file.stem.removeprefix("test_") for file in (REPO / "tests/core" / room).glob("test_*")
    }
    expected = {file.stem for file in files if has_code(file)} - NEEDS_RAY
    assert expected - tests == set()
    strange = {test for test in tests if not any(f"{test}_".startswith(f"{m}_") for m in modules)}
    assert strange == set()
    for module in NEEDS_RAY & modules:
        assert (REPO / "tests" / "on_ray" / f"test_{module}.py").exists()
