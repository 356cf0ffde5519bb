"""Says which rows are one problem: those that ask the same, whatever else they hold."""

from collections import defaultdict
from collections.abc import Mapping

from verl_gdpo.data_prep.schema import Row
from verl_gdpo.rewards.task import Task


def question_of(row: Row) -> tuple[tuple[str, str], ...]:
    """What a row asks: all its messages, whatever their white space.

    Capitals and marks count: `Print x.` and `Print X.` are two problems.
    """
    return tuple((part["role"], " ".join(part["content"].split())) for part in row["prompt"])


def repetitions(rows: Mapping[int, Row], task: Task) -> dict[str, list[int]]:
    """Return {reason: numbers of the rows to leave out}, so that each problem is asked once.

    The first row of a problem is kept, if all of its rows agree on the answer; else none of them.
    """
    numbers_of = defaultdict(list)
    for number, row in rows.items():
        numbers_of[question_of(row)].append(number)
    gone: dict[str, list[int]] = defaultdict(list)
    for first, *others in numbers_of.values():
        truths = [rows[number]["reward_model"]["ground_truth"] for number in (first, *others)]
        if not all(_agree(task, truths[0], truth) for truth in truths):
            gone["rows that ask the same and disagree on the answer"] += [first, *others]
        elif others:
            gone["an earlier row asks the same"] += others
    return gone


def _agree(task: Task, first: str, second: str) -> bool:
    """Whether the answer to the first ground truth is as good for the second as its own."""
    if first == second:
        return True
    good = [task.good_response(truth) for truth in (first, second)]
    scores = [task.score(response, second, response_tokens=0) for response in good]
    return scores[0] == scores[1]
