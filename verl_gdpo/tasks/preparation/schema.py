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
    bad = []
    has_rows = False
    for number, item in items:
        try:
            row = row_of(number, item)
            check_row(row)
        except LeftOut as why:
            leave_out(number, why)
        except ValueError as error:
            bad.append(f"row {number}, {error}")
        else:
            has_rows = True
            yield number, row
    if bad:
        raise DataError(bad_rows(where, bad))
    if not has_rows:
        raise DataError(f"{where}: got no rows; expected at least one")


def check_row(row: Any) -> None:
    """Raise ValueError for a row on which verl or a scorer would fail."""
    _check_type(row, ROW_TYPE, "")
    _check_prompt(row["prompt"])
    _check_ground_truth(row["data_source"], row["reward_model"]["ground_truth"])


def _check_type(value: Any, expected: pa.DataType, field: str) -> None:
    """Raise ValueError if the Arrow type cannot hold a field's value unchanged."""
    if pa.types.is_struct(expected):
        _check_object(value, expected, field)
    elif pa.types.is_list(expected):
        require(isinstance(value, list), field, value, "a list")
        for i, item in enumerate(value):
            _check_type(item, expected.value_type, f"{field}[{i}]")
    elif pa.types.is_int64(expected):
        # A bool is an int in Python, and would be read back from the file as an int.
        is_index = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        require(is_index, field, value, "an int in [0, 2**63)")
    else:
        require(isinstance(value, str), field, value, "a str")
        # JSON can hold half a surrogate pair. Parquet and tokenizers cannot.
        try:
            value.encode()
        except UnicodeEncodeError:
            require(False, field, value, "valid Unicode")


def _check_object(value: Any, expected: pa.StructType, field: str) -> None:
    """Raise ValueError unless a value has just the keys of a struct, and what each can hold."""
    require(isinstance(value, Mapping), field, value, "an object")
    prefix = f"{field}." if field else ""
    types = {part.name: part.type for part in expected}
    for name in value:
        if name not in types:
            names = list(types)
            raise ValueError(f"field {prefix}{name}: unknown; expected only {names}, remove it")
    for name, type_of_part in types.items():
        if name not in value:
            raise ValueError(f"field {prefix}{name}: missing")
        _check_type(value[name], type_of_part, f"{prefix}{name}")


def _check_prompt(prompt: list[dict[str, str]]) -> None:
    """Raise ValueError for messages that chat templates refuse, or that ask nothing."""
    require(bool(prompt), "prompt", prompt, "at least one message")
    for i, message in enumerate(prompt):
        role = message["role"]
        field = f"prompt[{i}].role"
        require(role in ROLES, field, role, f"one of {ROLES}")
        require(i == 0 or role != "system", field, role, "'system' only as the first")
    end = len(prompt) - 1
    last = prompt[end]
    require(last["role"] == "user", f"prompt[{end}].role", last["role"], "'user'")
    question = last["content"]
    require(bool(question.strip()), f"prompt[{end}].content", question, "some text")


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
    # Only the rows whose hash another one has are read again, because each is unpacked for that.
    hashes = np.fromiter((hash(question_of(row)) for row in rows), np.int64)
    questions, counts = np.unique(hashes, return_counts=True)
    repeated = np.flatnonzero(np.isin(hashes, questions[counts > 1]))
    numbers_by_question = defaultdict(list)
    for number in repeated.tolist():
        numbers_by_question[question_of(rows[number])].append(number)

    gone: dict[str, list[int]] = defaultdict(list)
    for numbers in numbers_by_question.values():
        truths = [rows[number]["reward_model"]["ground_truth"] for number in numbers]
        if not all(_agree(task, truths[0], truth) for truth in truths):
            gone["rows that ask the same and disagree on the answer"].extend(numbers)
        elif len(numbers) > 1:
            gone["an earlier row asks the same"].extend(numbers[1:])
    return gone


def _agree(task: Task, first: str, second: str) -> bool:
    """Whether the answer to the first ground truth is as good for the second as its own."""
    if first == second:
        return True
    response_to_first = task.good_response(first)
    response_to_second = task.good_response(second)
    rewards_of_first = task.score(response_to_first, second, response_tokens=0)
    rewards_of_second = task.score(response_to_second, second, response_tokens=0)
    return rewards_of_first == rewards_of_second


def numbers_of(rows: Sequence[Row]) -> dict[str, int]:
    """Return {name: number} of a file with at least one row.

    The characters are those of all messages of a prompt, without the chat template: the lowest
    value, the lower median, the 95th percentile (nearest rank) and the highest value. A repeated
    problem is a row that asks what an earlier one asks.
    """
    chars = np.zeros(len(rows), np.int64)
    hashes = np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        chars[number] = sum(len(message["content"]) for message in row["prompt"])
        hashes[number] = hash(question_of(row))
    quantiles = np.quantile(chars, (0, 0.5, 0.95, 1), method="inverted_cdf").tolist()
    numbers = {"rows": len(rows)}
    numbers.update(zip(CHARS, quantiles, strict=True))
    numbers[REPEATED] = len(rows) - len(np.unique(hashes))
    return numbers


def overlap(splits: Splits) -> Overlap:
    """Return which test rows ask what a training row asks, or nearly that."""

    return compare(_prompts_of(splits["train"]), _prompts_of(splits["test"]))


def _prompts_of(rows: Sequence[Row]) -> PromptReader:
    def read(step: int) -> Iterator[Messages]:
        for number in progress(range(0, len(rows), step), "comparing prompts"):
            yield rows[number]["prompt"]

    return PromptReader(len(rows), read)


def table(splits: Splits, shared: Overlap) -> str:
    """Return a table with one column per file; the last lines are the overlap."""
    columns = [numbers_of(rows) for rows in splits.values()]
    lines = [f"{'':24}" + "".join(f"{split:>12}" for split in splits)]
    for name in columns[0]:
        cells = [f"{column[name]:>12,}" for column in columns]
        lines.append(f"{name:24}" + "".join(cells))
    lines.append(f"{'test problems in train':24}{len(shared.equal):>24,}")
    lines.append(f"{'nearly in train':24}{len(shared.near):>24,}")
    return "\n".join(lines)
