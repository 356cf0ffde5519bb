"""Whether verl can join the data files of a run, and what each of them lacks.

Relies on verl 0.9 `RLHFDataset._read_files_and_tokenize`, which reads each file of `train_files` or
`val_files` by `datasets.load_dataset`, and joins them by `datasets.concatenate_datasets`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets

from verl_gdpo.tools.check.data_files import DataFile

# The types of a file are those of its schema, so a few rows are enough.
ROWS = 10
LISTS = (datasets.List, datasets.LargeList)


def what_cannot_be_joined(key: str, files: Sequence[DataFile]) -> list[str]:
    """Return what keeps `datasets` from reading, or from joining, the files of `data.<key>`."""
    problems = []
    read = []
    for file in files:
        try:
            read.append(datasets.Dataset(file.table.slice(0, ROWS)))
        except (ValueError, TypeError) as error:
            # The schema has types of a newer, or of another, version of `datasets`.
            problems.append(
                f"data.{key}: {file.path}: verl reads it with datasets {datasets.__version__}, "
                f"which says: {error}. Write the file anew without its schema's metadata: "
                "table.replace_schema_metadata(None)"
            )
    if problems:
        return problems
    try:
        datasets.concatenate_datasets(read)
    except ValueError as error:
        paths = [file.path for file in files]
        differing = _differing_types(paths, [each.features for each in read])
        what = "; ".join(differing) or str(error)
        return [f"data.{key}: verl cannot join the files: {what}. Write all files with one type"]
    return []


def _differing_types(
    paths: Sequence[str], features_of_files: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Say which columns have one type in a file and another in a later one."""
    # {column: (its type, the first file that has it)}
    known: dict[str, tuple[str, str]] = {}
    differing = []
    for path, features in zip(paths, features_of_files, strict=True):
        for column, kind in _types_of_columns(features):
            first_kind, first_path = known.setdefault(column, (kind, path))
            if kind != first_kind:
                differing.append(f"{column} is {first_kind} in {first_path} and {kind} in {path}")
    return differing


def _types_of_columns(features: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the types of all columns, with those inside of structs and lists.

    >>> features = {"prompt": datasets.List({"role": datasets.Value("string")})}
    >>> list(_types_of_columns(features))
    [('prompt', 'a list'), ('prompt[].role', 'string')]
    """
    for name, feature in features.items():
        column = f"{prefix}{name}"
        # A list in a list adds another pair of brackets.
        while isinstance(feature, LISTS):
            yield column, "a list"
            column += "[]"
            feature = feature.feature
        if isinstance(feature, Mapping):
            if not column.endswith("[]"):
                yield column, "a struct"
            yield from _types_of_columns(feature, f"{column}.")
        elif feature.dtype != "null":
            # A column of nulls joins any other.
            yield column, feature.dtype


def columns_that_a_file_lacks(key: str, files: Sequence[DataFile]) -> list[str]:
    """Return a remark for each file of `data.<key>` without a column that another file has."""
    # {column: the first file that has it}
    known: dict[str, str] = {}
    for file in files:
        for column in file.table.column_names:
            known.setdefault(column, file.path)
    remarks = []
    for file in files:
        absent = [column for column in known if column not in file.table.column_names]
        if absent:
            others = ", ".join(dict.fromkeys(known[column] for column in absent))
            remarks.append(
                f"data.{key}: {file.path} has no {', '.join(absent)}, which {others} has: verl "
                "fills it with None"
            )
    return remarks
