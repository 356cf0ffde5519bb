"""Keeps an evaluation on disk while it runs, so that it can go on after a kill at any moment.

OUT/evaluation.json  what was asked, of whom and how: written first, and compared before going on
OUT/answers.jsonl    each answer, as soon as it is there

A line of answers.jsonl:

    {"key": "simple_12", "sample": 0, "turn": 0, "input": "...", "output": "...", "tokens": 41,
     "is_cut": false}

An `output` of None stands for a prompt that is too long for the model.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, NamedTuple

from verl_gdpo.atomic import replace_together
from verl_gdpo.evaluation.questions import Answer

SETTINGS, ANSWERS = "evaluation.json", "answers.jsonl"


class Place(NamedTuple):
    """Which answer: the question, the number of the sample, the number of the turn; from 0."""

    key: str
    sample: int
    turn: int


@dataclass(frozen=True)
class Record:
    """What the model read, and what it answered: None if it could not read that much."""

    input: str
    answer: Answer | None


def start(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new evaluation, or compare those of one that was stopped.

    Raises:
        ValueError: the folder has an evaluation with other settings, which the message names, or
            answers without settings.
    """
    path = folder / SETTINGS
    asked = json.loads(json.dumps(settings))
    if not path.exists():
        if (folder / ANSWERS).exists():
            raise ValueError(
                f"{folder}: has {ANSWERS} and no {SETTINGS}, so nobody knows whose answers these "
                "are. Name another folder with --out"
            )
        write_json(path, asked)
        return
    before = read_json(path)
    keys = sorted(key for key in {**before, **asked} if before.get(key) != asked.get(key))
    if keys:
        differences = "; ".join(
            f"{key}: {before.get(key)!r} before, {asked.get(key)!r} now" for key in keys
        )
        raise ValueError(
            f"{path} is of an evaluation with other settings, so its answers cannot be used "
            f"({differences}). Name another folder with --out, or delete this one"
        )


class Answers:
    """The answers of one evaluation, in a file that one process may write.

    known: what the file held when it was opened.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file.

        Raises:
            ValueError: another process writes it, or a line cannot be read.
        """
        self._path = folder / ANSWERS
        self._file: BufferedRandom = open(self._path, "ab+")  # noqa: SIM115 - `close` closes it
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{self._path}: another process is evaluating into it") from None
        try:
            self.known = self._read()
        except ValueError:
            self._file.close()
            raise

    def _read(self) -> dict[Place, Record]:
        """All whole lines; a last line without its end, which a kill leaves, is cut off."""
        known: dict[Place, Record] = {}
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                place, record = _read_line(line)
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self._path}, line {number}: no answer: {error!r}") from None
            known[place] = record
        self._file.truncate(end)
        self._file.seek(end)
        return known

    def add(self, place: Place, record: Record) -> None:
        """Append an answer, and hand it to the operating system."""
        line: dict[str, Any] = {**place._asdict(), "input": record.input, "output": None}
        if (answer := record.answer) is not None:
            line |= {"output": answer.text, "tokens": answer.tokens, "is_cut": answer.is_cut}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Put everything on the disk, and let other processes in."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _read_line(text: bytes) -> tuple[Place, Record]:
    line = json.loads(text)
    place = Place(str(line["key"]), int(line["sample"]), int(line["turn"]))
    if line["output"] is None:
        return place, Record(line["input"], None)
    answer = Answer(str(line["output"]), int(line["tokens"]), bool(line["is_cut"]))
    return place, Record(line["input"], answer)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    with replace_together(path) as (temporary,):
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; raise ValueError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got a JSON {type(value).__name__}; expected an object")
    return value
