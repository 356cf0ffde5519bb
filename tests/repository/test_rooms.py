"""How large the house may be, and how its names are chosen."""

import ast
import sys

import pytest
from repository import REPO

from workshop.count_lines import code_lines

ALGORITHM = {"numpy", "torch", "omegaconf", "pydantic", "verl_gdpo"}
MOST_RAW_LINES, MOST_IMPORTS_INSIDE = 300, 5


def test_the_algorithm_imports_four_packages():
    for file in (REPO / "verl_gdpo" / "algorithm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            assert packages <= ALGORITHM, file.name


@pytest.mark.parametrize(
    ("folder", "lines", "files"),
    [("verl_gdpo", 14_010, 128), ("tests", 24_940, 224), ("workshop", 3_610, 59)],
)
def test_a_folder_keeps_its_size(folder, lines, files):
    """A feature that comes is worth one that goes."""
    sources = [path.read_text() for path in (REPO / folder).rglob("*.py")]
    assert sum(map(code_lines, sources)) <= lines
    assert len(sources) <= files


def test_files_are_short_and_import_at_their_top():
    inside = []
    for file in (REPO / "verl_gdpo").rglob("*.py"):
        source = file.read_text()
        assert source.count("\n") <= MOST_RAW_LINES, file.name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                imports = (each for each in ast.walk(node) if isinstance(each, ast.ImportFrom))
                inside += [
                    file.name for each in imports if f"{each.module}".startswith("verl_gdpo")
                ]
    assert len(inside) <= MOST_IMPORTS_INSIDE, inside


def test_a_class_name_stands_for_one_thing_and_a_value_is_a_noun():
    classes, participles = [], {"said", "found", "given", "seen"}
    for file in (REPO / "verl_gdpo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.append(node.name)
            named = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
            assert named not in participles, f"{file.name}:{node.lineno}"
    assert len(classes) == len({*classes})
