"""The record that describes a benchmark to `verl-gdpo evaluate`, and finds it by its name.

A benchmark is a module or a package of this folder with a `BENCHMARK`.
"""

import importlib
import pkgutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_gdpo.evaluation.questions import Column, Question


def _none(_parser: Any) -> None:
    pass


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    name: the NAME in `--bench NAME`.
    summary: one line for `--help`.
    questions: `questions(options)` returns all questions in an order that never changes; it raises
        ValueError or OSError, in one line, where data are missing or bad. `options` has the values
        of `add_options`, `options.data` (a list of Paths, maybe empty: --data), `options.config`
        (the configuration of a run as a DictConfig, or None for a model) and `options.step` (of
        training; 0 for a model).
    columns: `columns(questions)` returns the numbers of the table, from the left to the right.
    max_tokens: the limit of output tokens, unless --max-tokens or the run says another.
    add_options: `add_options(group)` adds the benchmark's own command options with
        `group.add_argument`; their names begin with the benchmark's, so that none is taken twice.
    data_source: stands in the rollout dump.
    data_help: what `--data` names; "" if the benchmark takes none.
    percent: the table shows the numbers as percent.
    notes: sentences for people who compare the numbers with others; they stand in the result.
    """

    name: str
    summary: str
    questions: Callable[[Namespace], Sequence[Question]]
    columns: Callable[[Sequence[Question]], Sequence[Column]]
    max_tokens: int
    data_source: str
    data_help: str = ""
    add_options: Callable[[Any], None] = _none
    percent: bool = True
    notes: tuple[str, ...] = ()


def benchmarks() -> dict[str, Benchmark]:
    """Return {name: benchmark}, in the order of the modules' names."""
    from verl_gdpo import evaluation

    names = [module.name for module in pkgutil.iter_modules(evaluation.__path__)]
    modules = [importlib.import_module(f"{evaluation.__name__}.{name}") for name in names]
    found = [one for module in modules for one in getattr(module, "BENCHMARKS", ())]
    found += [module.BENCHMARK for module in modules if hasattr(module, "BENCHMARK")]
    return {one.name: one for one in found}
