"""BFCL-v3, the Berkeley Function Calling Leaderboard, in ToolRL's form.

`--bench bfcl_v3`. The numbers can be compared with the paper's, but do not reproduce them: the code
that made those was not published. docs/evaluate_bfcl.md says what is known and what is ours.
"""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from verl_gdpo.evaluation.benchmark import Benchmark
from verl_gdpo.evaluation.bfcl import package
from verl_gdpo.evaluation.bfcl.episodes import question
from verl_gdpo.evaluation.questions import Question, ScoreColumn

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
SINGLE_TURN = (*GROUPS["non_live"], *GROUPS["live"])


def questions(options: Namespace) -> Sequence[Question]:
    """Return the questions of the categories asked for, in the order of `CATEGORIES`.

    Raises:
        ValueError, OSError: a category is unknown, or the package cannot be asked.
    """
    categories = _chosen(options.bfcl_v3_categories or GROUPS)
    return [question(row) for one in categories for row in package.ask(one, "questions", one)[0]]


def _chosen(names: Iterable[str]) -> list[str]:
    """The categories that `names` stand for, which are categories or groups of them."""
    chosen: set[str] = set()
    for name in names:
        if name not in GROUPS and name not in CATEGORIES:
            known = ", ".join((*GROUPS, *CATEGORIES))
            raise ValueError(f"bfcl_v3 category: got {name!r}; expected one of {known}")
        chosen.update(GROUPS.get(name, (name,)))
    return [category for category in CATEGORIES if category in chosen]


def columns(_questions: Sequence[Question]) -> Sequence[ScoreColumn]:
    """Return the paper's columns, and what they are made of.

    Source: the leaderboard of bfcl-eval 2025.6.8, which counts what was not run as 0.
    """
    non_live, live, dialogues = _non_live("accuracy"), _live("accuracy"), _multi_turn()
    overall = ScoreColumn("overall", parts=(non_live, live, dialogues))
    single = [_leaf(category, "format", over_answers=True) for category in SINGLE_TURN]
    steps = [_leaf(category, "format", over_answers=True) for category in GROUPS["multi_turn"]]
    return (
        live,
        dialogues,
        non_live,
        overall,
        ScoreColumn("format", parts=tuple(single), by_questions=True),
        ScoreColumn("format of steps", parts=tuple(steps)),
        _live("accuracy_after_thought", "live, after <think>"),
        _non_live("accuracy_after_thought", "non-live, after <think>"),
    )


def _leaf(category: str, score: str, *, over_answers: bool = False) -> ScoreColumn:
    return ScoreColumn(category, category=category, score=score, over_answers=over_answers)


def _non_live(score: str, name: str = "non-live") -> ScoreColumn:
    languages = tuple(_leaf(category, score) for category in ("simple", "java", "javascript"))
    others = ("multiple", "parallel", "parallel_multiple", "irrelevance")
    simple = ScoreColumn("simple, in three languages", parts=languages)
    return ScoreColumn(name, parts=(simple, *(_leaf(category, score) for category in others)))


def _live(score: str, name: str = "live") -> ScoreColumn:
    parts = tuple(_leaf(category, score) for category in GROUPS["live"])
    return ScoreColumn(name, parts=parts, by_questions=True)


def _multi_turn() -> ScoreColumn:
    parts = tuple(_leaf(category, "accuracy") for category in GROUPS["multi_turn"])
    return ScoreColumn("multi-turn", parts=parts)


def _add_options(group: Any) -> None:
    group.add_argument(
        "--bfcl-v3-categories",
        nargs="+",
        metavar="NAME",
        help=f"only these of {', '.join((*GROUPS, *CATEGORIES))}; without one of them, "
        "the numbers that need it stay empty",
    )


BENCHMARK = Benchmark(
    name="bfcl_v3",
    summary="function calls: the Berkeley leaderboard, version 3, in ToolRL's form",
    questions=questions,
    columns=columns,
    max_tokens=4096,  # what the package asks for
    data_source="bfcl_v3",
    add_options=_add_options,
    notes=(
        "BFCL-v3 in ToolRL's form can be compared with the paper's numbers, and does not reproduce "
        "them: the code that made them was not published.",
        "format is ours: nobody published what the paper's correct format is.",
    ),
)
