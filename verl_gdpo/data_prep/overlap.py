"""Finds validation rows that ask what a training row asks, or nearly that.

Two prompts are *equal* if all their messages are, once case, spacing and punctuation are gone.
Numbers stay apart, and so do `+ * / ^ = < >` and a minus before a number.

They are *nearly equal* if at least `ALIKE` of the triples of words that either has are in both. The
words are those of all messages but the system's. A triple that more than `COMMON` of the prompts
have, such as one of an instruction that stands in all of them, does not count. A prompt with fewer
than `LEAST` triples says too little for that. docs/check.md has the rates of errors.

Time grows with the number of rows, and memory with that of the validation rows whose triples are
compared: `MOST`, evenly spread.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ALIKE, COMMON, LEAST = 0.2, 0.01, 8
ALWAYS_COUNTS = 10  # prompts that may have a triple, where `COMMON` of them are fewer
MOST, MOST_FOR_COMMON = 20_000, 10_000  # rows of validation, and of training for what is common
MOST_WORDS = 500  # of a prompt, the last ones
ROWS_AT_ONCE = 256
# a number, an ideograph, other letters, or a mark of arithmetic
WORD = re.compile(r"\d+(?:\.\d+)?|[\u3400-\u9fff]|[^\W\d_\u3400-\u9fff]+|[+*/^=<>]|-(?=\s*\d)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
BESIDE_NO_NUMBER = re.compile(r"(?<!\d) | (?!\d)")
Messages = Sequence[Mapping[str, Any]]
Numbers = npt.NDArray[np.int64]


class Prompts(NamedTuple):
    number: int
    read: Callable[[int], Iterable[Messages]]  # each one of that many, from the first

    def step(self, most: int) -> int:
        """The distance between evenly spread ones, of which there are at most so many."""
        return max(1, -(-self.number // most))


class Overlap(NamedTuple):
    """{number of a validation row: that of a training row}, of equal and nearly equal ones."""

    equal: Mapping[int, int]
    near: Mapping[int, int]
    rows: int
    compared: int  # of the rows, for near equality

    def describe(self, validation: Callable[[int], str], training: Callable[[int], str]) -> str:
        """What to say, with one example of each kind; "" if there is nothing."""
        kinds = (
            (self.equal, self.rows, "ask what a training row asks"),
            (self.near, self.compared, "ask nearly what a training row asks"),
        )
        found = [
            f"{len(pairs):,} of {rows:,} validation rows {what}, such as {validation(number)} what "
            f"{training(pairs[number])} asks"
            for pairs, rows, what in kinds
            for number in [*pairs][:1]
        ]
        end = ". A score on them does not show generalisation"
        return "; ".join(found) + end if found else ""


def compare(training: Prompts, validation: Prompts) -> Overlap:
    """Compare each validation row with all training rows; both are read twice."""
    keys = np.fromiter(map(key_of, validation.read(1)), np.int64)
    known = np.unique(keys)
    triples = _Triples(training, validation)
    first: dict[int, int] = {}
    for start, batch in _batches(training.read(1)):
        asked = np.fromiter(map(key_of, batch), np.int64)
        places = np.searchsorted(known, asked).clip(max=len(known) - 1)
        for number in np.flatnonzero(known[places] == asked).tolist():
            first.setdefault(int(asked[number]), start + number)
        triples.find(start, batch)
    equal = {number: first[key] for number, key in enumerate(keys.tolist()) if key in first}
    near = {row: other for row, other in triples.found().items() if row not in equal}
    return Overlap(equal, near, len(keys), triples.compared)


def key_of(messages: Messages) -> int:
    """A hash that equal prompts share, in this process."""
    return hash(BESIDE_NO_NUMBER.sub("", " ".join(_words_of(messages))) or str(messages))


class _Triples:
    """The triples of validation rows, in which those of training rows are looked up."""

    def __init__(self, training: Prompts, validation: Prompts) -> None:
        self.step = validation.step(MOST)
        rows, ids = _triples_of(validation.read(self.step))
        others, ids_of_others = _triples_of(training.read(training.step(MOST_FOR_COMMON)))
        self.compared = -(-validation.number // self.step)
        prompts = self.compared + (int(others[-1]) + 1 if len(others) else 0)
        triples, counts = np.unique(np.concatenate([ids, ids_of_others]), return_counts=True)
        self.common = triples[counts > max(ALWAYS_COUNTS, COMMON * prompts)]
        rows, ids, self.sizes = self._which_count(rows, ids, self.compared)
        order = np.argsort(ids)
        self.rows, self.ids = rows[order], ids[order]
        self.alike_to = np.full(self.compared, -1)

    def _which_count(self, rows: Numbers, ids: Numbers, size: int) -> tuple[Numbers, ...]:
        """The triples that count, of prompts that have enough; and how many each prompt has."""
        counts = ~np.isin(ids, self.common)
        sizes = np.bincount(rows[counts], minlength=size)
        counts &= sizes[rows] >= LEAST
        return rows[counts], ids[counts], sizes

    def find(self, start: int, batch: Sequence[Messages]) -> None:
        """Note which validation rows are nearly equal to a row of the batch."""
        rows, ids, sizes = self._which_count(*_triples_of(batch), len(batch))
        low, high = (np.searchsorted(self.ids, ids, side) for side in ("left", "right"))
        counts = high - low
        behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        pairs = np.repeat(rows, counts) * self.compared + self.rows[np.repeat(low, counts) + behind]
        pairs, shared = np.unique(pairs, return_counts=True)
        here, there = pairs // self.compared, pairs % self.compared
        alike = shared >= ALIKE * (sizes[here] + self.sizes[there] - shared)
        alike &= self.alike_to[there] < 0
        self.alike_to[there[alike]] = start + here[alike]

    def found(self) -> dict[int, int]:
        places = np.flatnonzero(self.alike_to >= 0)
        return dict(zip((places * self.step).tolist(), self.alike_to[places].tolist(), strict=True))


def _batches(prompts: Iterable[Messages]) -> Iterator[tuple[int, list[Messages]]]:
    start, remaining = 0, iter(prompts)
    while batch := [*islice(remaining, ROWS_AT_ONCE)]:
        yield start, batch
        start += len(batch)


def _triples_of(prompts: Iterable[Messages]) -> tuple[Numbers, Numbers]:
    """The different triples of words of each prompt: the prompts' numbers, and hashes."""
    rows, ids = array("q"), array("q")
    for row, prompt in enumerate(prompts):
        words = _words_of([m for m in prompt if m["role"] != "system"])[-MOST_WORDS:]
        found = {hash(triple) for triple in zip(words, words[1:], words[2:], strict=False)}
        ids.extend(found)
        rows.extend([row] * len(found))
    return np.array(rows), np.array(ids)


def _words_of(messages: Messages) -> list[str]:
    texts = (message["content"] for message in messages)
    return [word for text in texts if isinstance(text, str) for word in _words(text)]


@lru_cache(1024)  # a system prompt is that of many rows, and each row is asked for twice
def _words(text: str) -> list[str]:
    text = THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return WORD.findall(text)
