"""Pictures, videos and sound of the rows, and the places for them in the messages.

The rules are those of verl 0.9.1 `RLHFDataset._build_messages`: where a row has a file of any kind,
the texts of its messages have one <image>, <video> or <audio> for each of its files, and the model
has a processor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_gdpo.tools.check.data_files import DataFile, rows_of
from verl_gdpo.tools.check.prompts import Messages

KINDS = ("image", "video", "audio")

# {kind: a number of files, or of places for them}
Counts = Mapping[str, int]


def look_at_media(config: Any, key: str, files: Sequence[DataFile]) -> tuple[list[str], list[str]]:
    """Return problems and warnings of the files of `data.<key>`."""
    problems: list[str] = []
    warnings: list[str] = []
    for file in files:
        columns = _columns_of(config, file)
        no_lists = _no_lists(file, columns)
        problems += [f"data.{key}: {text}" for text in no_lists]
        if not columns or no_lists:
            continue
        media = Media.of(config, file, columns)
        if media.filled and _has_no_processor(config):
            problems.append(f"data.{key}: {_without_processor(config, media)}")
        elif media.misplaced:
            text = f"data.{key}: {_misplaced(media)}"
            drops = config.data.get("filter_overlong_prompts", False)
            if drops and len(media.misplaced) < file.table.num_rows:
                warnings.append(f"{text}. verl leaves such rows out without a word")
            elif drops:
                problems.append(f"{text}. verl leaves such rows out, and none of the file is left")
            else:
                problems.append(f"{text}. verl ends at the first such row")
        if media.unfilled:
            warnings.append(f"data.{key}: {_unfilled(media)}")
    return problems, warnings


def _columns_of(config: Any, file: DataFile) -> dict[str, str]:
    """Return {kind: the column of its files}, for the columns that the file has."""
    columns = {}
    for kind in KINDS:
        column = config.data.get(f"{kind}_key", f"{kind}s")
        if column in file.table.column_names:
            columns[kind] = column
    return columns


def _no_lists(file: DataFile, columns: Mapping[str, str]) -> list[str]:
    """Say which of the columns hold something else than lists."""
    said = []
    for kind, column in columns.items():
        values = file.table[column]
        type_of_files = values.type
        if pa.types.is_list(type_of_files) or pa.types.is_large_list(type_of_files):
            continue
        if values.null_count < len(values):
            said.append(
                f"{file.path}: {column} is {type_of_files}; expected a list of files. verl takes "
                f"one entry of it for each <{kind}> of the messages: write a list, also for one "
                "file"
            )
    return said


@dataclass(frozen=True)
class Media:
    """The rows of a file that have pictures, videos or sound, or a place for them.

    columns: {kind: the column of its files}.
    filled: rows with files.
    misplaced: rows with another number of places than of files, with both numbers.
    unfilled: rows with a place, and without any file.
    """

    file: DataFile
    columns: Mapping[str, str]
    filled: Sequence[int]
    misplaced: Sequence[tuple[int, Counts, Counts]]
    unfilled: Sequence[int]

    @classmethod
    def of(cls, config: Any, file: DataFile, columns: Mapping[str, str]) -> "Media":
        filled = []
        misplaced = []
        unfilled = []
        # Arrow counts the files without reading them.
        numbers = {}
        for kind, column in columns.items():
            if not pa.types.is_null(file.table[column].type):
                numbers[kind] = pc.list_value_length(file.table[column]).to_pylist()
        prompt = config.data.prompt_key
        for number, row in enumerate(rows_of(file.table, prompt)):
            places = _places(row[prompt])
            counts = dict.fromkeys(KINDS, 0)
            for kind, of_rows in numbers.items():
                counts[kind] = of_rows[number] or 0
            if any(counts.values()):
                filled.append(number)
                if counts != places:
                    misplaced.append((number, places, counts))
            elif any(places[kind] for kind in columns):
                unfilled.append(number)
        return cls(file, columns, filled, misplaced, unfilled)

    def count(self, rows: Sequence[Any]) -> str:
        return f"{len(rows)} of {self.file.table.num_rows} rows in {self.file.path}"


def _places(messages: Messages) -> Counts:
    """Return how many places for files the texts of messages have. verl reads no parts of one."""
    places = dict.fromkeys(KINDS, 0)
    for message in messages:
        if isinstance(message["content"], str):
            for kind in KINDS:
                places[kind] += message["content"].count(f"<{kind}>")
    return places


def _misplaced(media: Media) -> str:
    number, places, counts = media.misplaced[0]
    differing = []
    for kind in KINDS:
        if places[kind] != counts[kind]:
            column = media.columns.get(kind, f"{kind}s")
            differing.append(f"files in {column}: {counts[kind]}, <{kind}>: {places[kind]}")
    return (
        f"{media.count(media.misplaced)} have another number of places in their messages than of "
        f"files, such as row {number} ({'; '.join(differing)}). Write one <image>, <video> or "
        "<audio> for each file into the text of a message, where it is to stand"
    )


def _unfilled(media: Media) -> str:
    named = " or ".join(f"<{kind}>" for kind in media.columns)
    return (
        f"{media.count(media.unfilled)} have {named} in their messages and no file for it, such as "
        f"row {media.unfilled[0]}: the policy reads it as text, and sees nothing"
    )


def _has_no_processor(config: Any) -> bool:
    """Whether the model is in a folder here, and knows texts alone."""
    model = config.actor_rollout_ref.model
    folder = Path(str(model.get("tokenizer_path") or model.path)).expanduser()
    # They are called processor_config.json, preprocessor_config.json and the like.
    return folder.is_dir() and not any(folder.glob("*processor_config.json"))


def _without_processor(config: Any, media: Media) -> str:
    model = config.actor_rollout_ref.model
    kind = next(iter(media.columns))
    return (
        f"{media.count(media.filled)} have files in {', '.join(media.columns.values())}, such as "
        f"row {media.filled[0]}. verl ends at the first such row, because the model at "
        f"{model.get('tokenizer_path') or model.path} has no processor for them (no "
        "preprocessor_config.json). Take a model that has one, or let "
        f"data.{kind}_key name no column"
    )
