"""Says what a row holds, checks it, says which rows are one problem, and counts them.

    {"data_source": "rlla",              # selects the scorer, see verl_gdpo.tasks.TASK_BY_SOURCE
     "prompt": [{"role": "system", "content": "You are a helpful multi-turn ..."},
                {"role": "user", "content": "**Dialogue Records History** ..."}],
     "ability": "math",                  # a column of verl that nothing reads
     "reward_model": {"style": "rule", "ground_truth": "<think> ... </think> ..."},
     "extra_info": {"index": 0, "split": "train"}}    # index: row number in the file, from 0

Every task has the same columns, so verl can train on several tasks at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from verl_gdpo.tasks import TASK_BY_SOURCE, Task, bad_rows
from verl_gdpo.tasks.preparation import DataError, LeftOut, progress
from verl_gdpo.tasks.preparation.overlap import Messages, Overlap, PromptReader, compare

Row = dict[str, Any]
Splits = dict[str, Sequence[Row]]  # "train" and "test" -> rows

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)
ROW_TYPE = pa.struct(list(SCHEMA))
ROLES = ("system", "user", "assistant")
CHARS = [f"prompt chars, {part}" for part in ("low", "median", "p95", "high")]
REPEATED = "repeated problems"


def checked(
    items: Iterable[tuple[int, Any]],
    where: str,
    row_of: Callable[[int, Any], Row] = lambda _, item: item,
    leave_out: Callable[[int, LeftOut], None] = lambda *_: None,
) -> Iterator[tuple[int, Row]]:
    """Yield the rows on which neither verl nor a scorer would fail, and their numbers.

    Args:
        items: numbers in the message, and any values; they are checked completely.
        where: name of the rows in the message, such as the file's path.
        row_of: makes a row of number and value. It raises ValueError for a bad one, and LeftOut for
            one that is left out.
        leave_out: is told of the latter.

    Raises:
        DataError: after the last row, if there is none or a bad one. The message names `where`, and
            of the first ten bad ones the row, the field, the value and what was expected.
    """
    bad, is_any = [], False
    for number, item in items:
        try:
            row = row_of(number, item)
            check_row(row)
        except LeftOut as why:
            leave_out(number, why)
        except ValueError as error:
            bad.append(f"row {number}, {error}")
        else:
            is_any = True
            yield number, row
    if bad or not is_any:
        raise DataError(bad_rows(where, bad) or f"{where}: got no rows; expected at least one")


def check_row(row: Any) -> None:
    """Raise ValueError for a row on which verl or a scorer would fail."""
    _check_type(row, ROW_TYPE, "")
    _check_prompt(row["prompt"])
    _check_ground_truth(row["data_source"], row["reward_model"]["ground_truth"])


def _check_type(value: Any, expected: pa.DataType, field: str) -> None:
    """Raise ValueError if the Arrow type cannot hold a field's value unchanged."""
    if pa.types.is_struct(expected):
        require(isinstance(value, Mapping), field, value, "an object")
        prefix = f"{field}." if field else ""
        types = {part.name: part.type for part in expected}
        if unknown := [name for name in value if name not in types]:
            name, names = unknown[0], [*types]
            raise ValueError(f"field {prefix}{name}: unknown; expected only {names}, remove it")
        for name, of_part in types.items():
            if name not in value:
                raise ValueError(f"field {prefix}{name}: missing")
            _check_type(value[name], of_part, f"{prefix}{name}")
    elif pa.types.is_list(expected):
        require(isinstance(value, list), field, value, "a list")
        for i, item in enumerate(value):
            _check_type(item, expected.value_type, f"{field}[{i}]")
    elif pa.types.is_int64(expected):
        # a bool is an int in Python, and would be read back from the file as an int
        is_index = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        require(is_index, field, value, "an int in [0, 2**63)")
    else:
        require(isinstance(value, str), field, value, "a str")
        try:
            value.encode()  # parquet and tokenizers cannot hold half a surrogate pair; JSON can
        except UnicodeEncodeError:
            require(False, field, value, "valid Unicode")


def _check_prompt(prompt: list[dict[str, str]]) -> None:
    """Raise ValueError for messages that chat templates refuse, or that ask nothing."""
    require(bool(prompt), "prompt", prompt, "at least one message")
    for i, message in enumerate(prompt):
        role, field = message["role"], f"prompt[{i}].role"
        require(role in ROLES, field, role, f"one of {ROLES}")
        require(i == 0 or role != "system", field, role, "'system' only as the first")
    require(role == "user", field, role, "'user'")
    question = message["content"]
    require(bool(question.strip()), f"prompt[{i}].content", question, "some text")


def _check_ground_truth(data_source: str, ground_truth: str) -> None:
    """Raise ValueError if no scorer takes the row, or if its scorer refuses the ground truth."""
    require(
        data_source in TASK_BY_SOURCE,
        "data_source",
        data_source,
        f"one of {sorted(TASK_BY_SOURCE)}",
    )
    field = "reward_model.ground_truth"
    require(bool(ground_truth.strip()), field, ground_truth, "some text")
    try:
        TASK_BY_SOURCE[data_source].check_ground_truth(ground_truth)
    except (TypeError, ValueError) as error:
        raise ValueError(f"field {field}: {error}") from error


def require(is_good: bool, field: str, value: Any, expected: str) -> None:
    """Raise ValueError unless the value of a field is good; "" stands for the whole row."""
    if not is_good:
        place = f"field {field}" if field else "the whole row"
        raise ValueError(f"{place}: got {repr(value)[:80]}; expected {expected}")


def question_of(row: Row) -> tuple[tuple[str, str], ...]:
    """What a row asks: all its messages, whatever their white space.

    Capitals and marks count: `Print x.` and `Print X.` are two problems.
    """
    return tuple((part["role"], " ".join(part["content"].split())) for part in row["prompt"])


def repetitions(rows: Sequence[Row], task: Task) -> dict[str, list[int]]:
    """Return {reason: numbers of the rows to leave out}, so that each problem is asked once.

    The first row of a problem is kept, if all of its rows agree on the answer; else none of them.
    """
    asked = np.fromiter((hash(question_of(row)) for row in rows), np.int64)
    questions, counts = np.unique(asked, return_counts=True)
    numbers_of = defaultdict(list)
    for number in np.flatnonzero(np.isin(asked, questions[counts > 1])).tolist():
        numbers_of[question_of(rows[number])].append(number)
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


def numbers_of(rows: Sequence[Row]) -> dict[str, int]:
    """Return {name: number} of a file with at least one row.

    The characters are those of all messages of a prompt, without the chat template: the lowest
    value, the lower median, the 95th percentile (nearest rank) and the highest value. A repeated
    problem is a row that asks what an earlier one asks.
    """
    chars, asked = np.zeros((2, len(rows)), np.int64)
    for number, row in enumerate(rows):
        chars[number] = sum(len(message["content"]) for message in row["prompt"])
        asked[number] = hash(question_of(row))
    spread = np.quantile(chars, (0, 0.5, 0.95, 1), method="inverted_cdf").tolist()
    repeated = len(rows) - len(np.unique(asked))
    return {"rows": len(rows), **dict(zip(CHARS, spread, strict=True)), REPEATED: repeated}


def overlap(splits: Splits) -> Overlap:
    """Return which test rows ask what a training row asks, or nearly that."""

    def prompts(rows: Sequence[Row]) -> PromptReader:
        def read(step: int) -> Iterator[Messages]:
            numbers = progress(range(0, len(rows), step), "comparing prompts")
            return (rows[number]["prompt"] for number in numbers)

        return PromptReader(len(rows), read)

    return compare(prompts(splits["train"]), prompts(splits["test"]))


def table(splits: Splits, shared: Overlap) -> str:
    """Return a table with one column per file; the last lines are the overlap."""
    columns = [numbers_of(rows) for rows in splits.values()]
    lines = [f"{'':24}" + "".join(f"{split:>12}" for split in splits)]
    lines += [f"{name:24}" + "".join(f"{c[name]:>12,}" for c in columns) for name in columns[0]]
    lines += [f"{'test problems in train':24}{len(shared.equal):>24,}"]
    return "\n".join([*lines, f"{'nearly in train':24}{len(shared.near):>24,}"])
