"""The questions of BFCL-v3, as they lie in the package `bfcl-eval`, and the parts of its code.

Relied on, of bfcl-eval 2025.6.8: the folder `data`, `ast_checker.ast_checker`, and
`model_handler.utils.func_doc_language_specific_pre_processing`. The package asks for numpy 1.26 and
for the clients of many providers. None of them is needed for what we take, so it is installed
without its dependencies.
"""

import copy
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "2025.6.8"
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION}"

# {group: its categories}, in the order of the package
GROUPS = {
    "non_live": (
        *("simple", "java", "javascript", "multiple", "parallel", "parallel_multiple"),
        "irrelevance",
    ),
    "live": (
        *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
        *("live_irrelevance", "live_relevance"),
    ),
    "multi_turn": (
        *("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param"),
        "multi_turn_long_context",
    ),
}
CATEGORIES = tuple(category for group in GROUPS.values() for category in group)
# these have no ground truth: what counts is whether there is a call
WITHOUT_GROUND_TRUTH = ("irrelevance", "live_irrelevance", "live_relevance")

Row = dict[str, Any]


def rows(category: str) -> list[Row]:
    """Return the package's rows of a category, each with its "ground_truth", "" if it has none.

    Raises:
        ValueError: the package is missing, or is another version.
    """
    folder = package() / "data"
    file = f"BFCL_v3_{category}.json"
    found = _with_names_of_their_own(_lines(folder / file))
    if category in WITHOUT_GROUND_TRUTH:
        return [{**row, "ground_truth": ""} for row in found]
    gold = {row["id"]: row["ground_truth"] for row in _lines(folder / "possible_answer" / file)}
    return [{**row, "ground_truth": gold[row["id"]]} for row in found]


def documents() -> dict[str, list[Row]]:
    """Return {class: documents of its functions}, for the dialogues.

    Raises:
        ValueError: as `rows`.
    """
    folder = package() / "data" / "multi_turn_func_doc"
    mapping = importlib.import_module("bfcl_eval.constants.category_mapping")
    files = mapping.MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return {name: _lines(folder / file) for name, file in files.items()}


def _lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _with_names_of_their_own(found: list[Row]) -> list[Row]:
    """Two questions of live_relevance have one id; the second of an id gets ".2" at its end."""
    seen: Counter[str] = Counter()
    for row in found:
        seen[row["id"]] += 1
        if seen[row["id"]] > 1:
            row["id"] += f".{seen[row['id']]}"
    return found


def with_hints(functions: list[Row], category: str) -> list[Row]:
    """Return documents as a policy reads them: with hints about the programming language.

    In Java and JavaScript, all values are texts.
    """
    prepare = _imported(
        "bfcl_eval.model_handler.utils", "func_doc_language_specific_pre_processing"
    )
    prepared: list[Row] = prepare(copy.deepcopy(functions), category)
    return prepared


def ast_checker() -> Callable[..., dict[str, Any]]:
    """Return the package's checker of single turns; the name of its model is ""."""
    module = "bfcl_eval.eval_checker.ast_eval.ast_checker"
    checker: Callable[..., dict[str, Any]] = _imported(module, "ast_checker")
    return checker


def package() -> Path:
    """Return the folder of the package.

    Raises:
        ValueError: it is missing, or is another version.
    """
    try:
        found = metadata.version("bfcl-eval")
    except metadata.PackageNotFoundError:
        raise ValueError(f"bfcl_v3: the package bfcl-eval is missing; run: {INSTALL}") from None
    if found != VERSION:
        raise ValueError(
            f"bfcl_v3: got bfcl-eval {found}; expected {VERSION}, because others have other "
            f"questions or another overall; run: {INSTALL}"
        )
    return Path(importlib.import_module("bfcl_eval").__file__ or "").parent


# what the package imports on the way, and our parts of it never use; {module: its names}
_UNUSED: dict[str, dict[str, Any]] = {
    "bfcl_eval.constants.model_config": {
        "MODEL_CONFIG_MAPPING": {"": SimpleNamespace(underscore_to_dot=False)}
    },
    "bfcl_eval.model_handler.parser.java_parser": {"parse_java_function_call": None},
    "bfcl_eval.model_handler.parser.js_parser": {"parse_javascript_function_call": None},
    "tenacity": {
        "retry": None,
        "retry_if_exception_message": None,
        "retry_if_exception_type": None,
        "wait_random_exponential": None,
    },
}


def _imported(module: str, name: str) -> Any:
    """Return a name of the package, importing it without the clients of its providers."""
    package()
    missing = [other for other in _UNUSED if other not in sys.modules]
    for other in missing:
        sys.modules[other] = _stand_in(other, _UNUSED[other])
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        for other in missing:
            sys.modules.pop(other, None)


def _stand_in(name: str, contents: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def chosen(names: Iterable[str]) -> list[str]:
    """Return the categories that `names` stand for, which are categories or groups of them.

    Raises:
        ValueError: a name is neither.
    """
    wanted: set[str] = set()
    for name in names:
        if name not in GROUPS and name not in CATEGORIES:
            known = ", ".join((*GROUPS, *CATEGORIES))
            raise ValueError(f"bfcl_v3 category: got {name!r}; expected one of {known}")
        wanted.update(GROUPS.get(name, (name,)))
    return [category for category in CATEGORIES if category in wanted]
