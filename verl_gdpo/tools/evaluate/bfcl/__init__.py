"""BFCL-v3, the Berkeley Function Calling Leaderboard, in ToolRL's form.

`--bench bfcl_v3`. The numbers can be compared with the paper's, but do not reproduce them: the code
that made those was not published. docs/evaluate.md says what each number is. ToolRL has published
a handler for an older package. These things differ:

                                          ToolRL's handler         here
    a call within `<think>`               counts                   not in the two "after <think>"
    in a dialogue, a line without a name  a call `()`              left out
    in a dialogue, a name that is no text undoes all calls         left out
    a value over which the checker fails  stops the evaluation     wrong
    sampling                              temperature 0.001        greedy
    a long prompt                         leaves fewer than 4,096  wrong, if it leaves fewer
                                          tokens for the answer    than `--max-tokens`

Of the questions of the package, two in Java have no right answer, and six of live have none that
agrees with both function and ground truth.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from verl_gdpo.tasks.tool_rl.score import TASK
from verl_gdpo.tools.evaluate.benchmark import (
    Answer,
    Benchmark,
    Episode,
    Messages,
    Outcome,
    Question,
    ScoreColumn,
    Scores,
    ask_once,
)
from verl_gdpo.tools.evaluate.bfcl import form, package

# {group: its categories}, in the order of the package.
GROUPS = {
    "non_live": (
        "simple",
        "java",
        "javascript",
        "multiple",
        "parallel",
        "parallel_multiple",
        "irrelevance",
    ),
    "live": (
        "live_simple",
        "live_multiple",
        "live_parallel",
        "live_parallel_multiple",
        "live_irrelevance",
        "live_relevance",
    ),
    "multi_turn": (
        "multi_turn_base",
        "multi_turn_miss_func",
        "multi_turn_miss_param",
        "multi_turn_long_context",
    ),
}
CATEGORIES = GROUPS["non_live"] + GROUPS["live"] + GROUPS["multi_turn"]
# The leaderboard takes the mean of these for one number: one call, in three languages.
SIMPLE = ("simple", "java", "javascript")
WRONG = {"format": 0.0, "accuracy": 0.0, "accuracy_after_thought": 0.0}

# What `questions` of worker.py returns of a question.
PackageRow = Mapping[str, Any]


class Step(NamedTuple):
    """An answer within a turn of a dialogue, and the calls that it makes, as text."""

    answer: str
    calls: list[str]


# The steps of each turn.
Turns = Sequence[Sequence[Step]]


def questions(options: Namespace) -> Sequence[Question]:
    """Return the questions of the categories asked for, in the order of `CATEGORIES`.

    Raises:
        ValueError, OSError: the package cannot be asked.
    """
    names = options.bfcl_v3_categories or list(GROUPS)
    made: list[Question] = []
    for group, categories in GROUPS.items():
        for category in categories:
            if group in names or category in names:
                rows = package.ask(category, "questions", category)[0]
                made.extend(question(row) for row in rows)
    return made


def question(row: PackageRow) -> Question:
    """Return the question of a row."""
    if row["category"].startswith("multi_turn"):
        truth = "\n".join("; ".join(calls) for calls in row["gold"])
        return Question(row["key"], row["category"], partial(_play, row), truth)
    dialogue = [message for turn in row["turns"] for message in turn]
    prompt = form.prompt(row["tools"], dialogue, multi_turn=False)
    start = partial(ask_once, prompt, partial(_score, row), WRONG)
    truth = json.dumps(row["gold"], ensure_ascii=False)
    return Question(row["key"], row["category"], start, truth)


def _score(row: PackageRow, answer: Answer) -> Scores:
    """Return the scores of an answer.

    format: 1 if it has one of the three forms.
    accuracy: 1 if the package's checker accepts its calls.
    accuracy_after_thought: the same, without calls within `<think>`, which ToolRL takes too.
    """
    response = answer.response
    calls = form.calls(response.text, multi_turn=False)
    later = form.calls(response.answer, multi_turn=False)
    is_right = _is_right(row, calls)
    is_right_later = is_right
    if later != calls:
        is_right_later = _is_right(row, later)
    return {
        "format": float(form.is_correct_format(response)),
        "accuracy": float(is_right),
        "accuracy_after_thought": float(is_right_later),
    }


def _is_right(row: PackageRow, calls: Sequence[form.Call]) -> bool:
    """Return whether the package accepts calls as the answer to a question of one turn."""
    if not row["gold"]:
        # Without a right answer, what counts is whether there is a call.
        return bool(calls) is (row["category"] == "live_relevance")
    made = [{call.name: call.parameters} for call in calls]
    return _ask(row, "is_right", made) == [True]


def _ask(row: PackageRow, task: str, about: Any) -> list[Any]:
    """Return [what a function of worker.py says of a question], or [] if that needs too much."""
    return package.ask(row["category"], task, row["key"], about)


def _play(row: PackageRow) -> Episode:
    """Turns of a user, steps of the policy, and the results of its calls.

    A turn ends with an answer that makes no call. One step more than allowed ends the dialogue: as
    wrong, unless the turn is the last one; then the checker decides. So does the package.
    """
    turns: list[list[Step]] = []
    formats: list[Scores] = []
    for _ in row["gold"]:
        steps: list[Step] = []
        turns.append(steps)
        for _ in range(form.MAX_STEPS + 1):
            messages = _messages(row, turns)
            answer = None
            if messages is not None:
                answer = yield messages
            if answer is None:
                return Outcome({"accuracy": 0.0}, formats)
            response = answer.response
            calls = [str(call) for call in form.calls(response.text, multi_turn=True)]
            steps.append(Step(response.text, calls))
            formats.append({"format": float(form.is_correct_format(response))})
            if not calls:
                break
        if steps[-1].calls:
            # There is a call even in the step that is one more than allowed.
            break
    is_right = False
    if len(turns) == len(row["gold"]):
        made = [[step.calls for step in turn] for turn in turns]
        is_right = _ask(row, "is_right_dialogue", made) == [True]
    return Outcome({"accuracy": float(is_right)}, formats)


def _messages(row: PackageRow, turns: Turns) -> Messages | None:
    """Return the dialogue so far, with the results of all calls; None if these need too much."""
    calls_of_steps = [step.calls for turn in turns for step in turn]
    # A step without calls has no results.
    results_of_steps: Sequence[Sequence[str]] = calls_of_steps
    if any(calls_of_steps):
        reply = _ask(row, "results", calls_of_steps)
        if not reply:
            return None
        results_of_steps = reply[0]

    results_left = iter(results_of_steps)
    messages: list[Mapping[str, str]] = []
    for turn, request in zip(turns, row["turns"], strict=False):
        messages.extend(request)
        for step in turn:
            messages.append({"role": "assistant", "content": step.answer})
            for call, result in zip(step.calls, next(results_left), strict=True):
                messages.append({"role": "tool", "name": call, "content": result})
    return form.prompt(row["tools"], messages, multi_turn=True)


def columns(_categories: Sequence[str]) -> Sequence[ScoreColumn]:
    """Return the paper's columns, and what they are made of.

    Source: the leaderboard of bfcl-eval 2025.6.8, which counts what was not run as 0.
    """
    non_live = _non_live("non-live", "accuracy")
    live = _live("live", "accuracy")
    dialogues = ScoreColumn("multi-turn", parts=_leaves("multi_turn", "accuracy"))
    single = _leaves("non_live", "format") + _leaves("live", "format")
    return (
        live,
        dialogues,
        non_live,
        ScoreColumn("overall", parts=(non_live, live, dialogues)),
        ScoreColumn("format", parts=single, by_questions=True),
        ScoreColumn("format of steps", parts=_leaves("multi_turn", "format")),
        _live("live, after <think>", "accuracy_after_thought"),
        _non_live("non-live, after <think>", "accuracy_after_thought"),
    )


def _leaves(group: str, score: str) -> tuple[ScoreColumn, ...]:
    """Return a column for each category of a group. The format is over all answers."""
    leaves = []
    for name in GROUPS[group]:
        leaf = ScoreColumn(name, category=name, score=score, over_answers=score == "format")
        leaves.append(leaf)
    return tuple(leaves)


def _non_live(name: str, score: str) -> ScoreColumn:
    leaves = _leaves("non_live", score)
    languages = tuple(leaf for leaf in leaves if leaf.category in SIMPLE)
    others = tuple(leaf for leaf in leaves if leaf.category not in SIMPLE)
    simple = ScoreColumn("simple, in three languages", parts=languages)
    return ScoreColumn(name, parts=(simple, *others))


def _live(name: str, score: str) -> ScoreColumn:
    return ScoreColumn(name, parts=_leaves("live", score), by_questions=True)


def _add_options(group: Any) -> None:
    names = list(GROUPS) + list(CATEGORIES)
    about = f"only these of {', '.join(names)}; a number that needs another one stays empty"
    option = "--bfcl-v3-categories"
    group.add_argument(option, nargs="+", metavar="NAME", choices=names, help=about)


def _no_call_format(options: Namespace) -> Mapping[str, Any]:
    """Return no option of the scorer, which has none."""
    if options.call_format is not None:
        raise ValueError(
            f"--call-format {options.call_format}: bfcl_v3 asks for calls in ToolRL's form, and "
            "reads no other; leave it out"
        )
    return {}


BENCHMARK = Benchmark(
    name="bfcl_v3",
    summary="function calls: the Berkeley leaderboard, version 3, in ToolRL's form",
    questions=questions,
    columns=columns,
    max_tokens=4096,  # what the package asks for
    data_source="bfcl_v3",
    add_options=_add_options,
    scorer=_no_call_format,
    kept_tokens=TASK.kept_tokens,
    notes=(
        "BFCL-v3 in ToolRL's form can be compared with the paper's numbers, and does not reproduce "
        "them: the code that made them was not published.",
        "format is ours: nobody published what the paper's correct format is.",
    ),
)
