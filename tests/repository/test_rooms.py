"""What each room may import, where import-linter cannot say it."""

import ast
import sys

from repository import REPO

ALGORITHM = {"numpy", "torch", "omegaconf", "pydantic", "verl_gdpo"}


def test_the_algorithm_imports_four_packages():
    for file in (REPO / "verl_gdpo" / "algorithm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            assert packages <= ALGORITHM, file.name
