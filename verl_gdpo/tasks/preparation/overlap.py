"""Finds validation rows that ask what a training row asks, or nearly that.

Two prompts are *equal* if all their messages are, once case, spacing and punctuation are gone.
Numbers stay apart, and so do `+ * / ^ = < >` and a minus before a number.

They are *nearly equal* if at least `ALIKE` of the triples of words that either has, and at least
`SHARED`, are in both. The words are those of all messages but the system's. A triple that more than
`COMMON` of the prompts have, such as one of an instruction that stands in all of them, does not
count. A prompt with fewer than `LEAST` triples says too little for that. The rates of errors
are in workshop/overlap.md.

Time grows with the number of rows, and memory with that of the validation rows.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

ALIKE, SHARED, COMMON, LEAST = 0.2, 5, 0.01, 8
ALWAYS_COUNTS = 10  # prompts that may have a triple, where `COMMON` of them are fewer
MOST = 5000  # validation rows whose triples are compared, evenly spread; training rows for `COMMON`
MOST_WORDS = 300  # of a prompt, the last ones
# a number, an ideograph, other letters, or a mark of arithmetic
WORD = re.compile(r"\d+(?:\.\d+)?|[\u3400-\u9fff]|[^\W\d_\u3400-\u9fff]+|[+*/^=<>]|-(?=\s*\d)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
BESIDE_NO_NUMBER = re.compile(r"(?<!\d) | (?!\d)")
Messages = Sequence[Mapping[str, Any]]
Label = Callable[[int], str]


class PromptReader(NamedTuple):
    number: int
    read: Callable[[int], Iterable[Messages]]  # each one of that many, from the first

    def spread(self) -> Iterable[tuple[int, Messages]]:
        """At most `MOST` of them, with their numbers."""
        step = max(1, -(-self.number // MOST))
        return zip(range(0, self.number, step), self.read(step), strict=True)


class Overlap(NamedTuple):
    """{number of a validation row: that of a training row}, of equal and nearly equal ones."""

    equal: Mapping[int, int]
    near: Mapping[int, int]
    rows: int
    compared: int  # of the rows, for near equality

    def describe_equal(self, validation: Label, training: Label) -> str:
        """What to warn of equal prompts, with an example; "" if there are none.

        Args:
            validation, training: return what a row is called, by its number.
        """
        if not self.equal:
            return ""
        example = _example(self.equal, validation, training)
        return (
            f"{len(self.equal):,} of {self.rows:,} validation rows have the prompt of a training "
            f"row: {example}. A score on them does not show generalisation"
        )

    def describe_near(self, validation: Label, training: Label) -> str:
        """What to note of nearly equal prompts, with an example; "" if there are none."""
        if not self.near:
            return ""
        example = _example(self.near, validation, training)
        return (
            f"{len(self.near):,} of {self.compared:,} validation rows have nearly the prompt of a "
            f"training row: {example}. Read a few of them: of 20 such pairs in MATH, 7 were copies "
            "with other numbers, and 13 were other problems"
        )


def _example(pairs: Mapping[int, int], validation: Label, training: Label) -> str:
    """Return the first pair, in words."""
    number = next(iter(pairs))
    return f"{validation(number)} has that of {training(pairs[number])}"


def compare(training: PromptReader, validation: PromptReader) -> Overlap:
    """Compare each validation row with all training rows."""
    sample = {number: _triples_of(prompt) for number, prompt in validation.spread()}
    every = [*sample.values(), *(_triples_of(prompt) for _, prompt in training.spread())]
    most = max(ALWAYS_COUNTS, COMMON * len(every))
    common = {triple for triple, count in Counter(chain(*every)).items() if count > most}
    del every
    places, sizes = defaultdict(list), {}
    for number, triples in sample.items():
        rare = triples - common
        sizes[number] = len(rare)
        if len(rare) < LEAST:
            continue
        for triple in rare:
            places[triple].append(number)
    keys = [_key_of(prompt) for prompt in validation.read(1)]
    first: dict[int, int | None] = dict.fromkeys(keys)
    near: dict[int, int] = {}
    for row, prompt in enumerate(training.read(1)):
        if first.get(key := _key_of(prompt), row) is None:
            first[key] = row
        triples = _triples_of(prompt) - common
        if len(triples) < LEAST:
            continue
        shared = Counter(chain.from_iterable(places.get(t, ()) for t in triples))
        for number, count in shared.items():
            if count >= max(SHARED, ALIKE * (len(triples) + sizes[number] - count)):
                near.setdefault(number, row)
    asked = ((number, first[key]) for number, key in enumerate(keys))
    equal = {number: other for number, other in asked if other is not None}
    near = {number: near[number] for number in sorted(near.keys() - equal.keys())}
    return Overlap(equal, near, len(keys), len(sample))


def _key_of(messages: Messages) -> int:
    """A hash that equal prompts share, in this process."""
    return hash(BESIDE_NO_NUMBER.sub("", " ".join(_words_of(messages))) or str(messages))


def _triples_of(messages: Messages) -> set[int]:
    """Hashes of the triples of words."""
    words = _words_of([m for m in messages if m["role"] != "system"])[-MOST_WORDS:]
    return {hash(triple) for triple in zip(words, words[1:], words[2:], strict=False)}


def _words_of(messages: Messages) -> list[str]:
    texts = (message["content"] for message in messages)
    return [word for text in texts if isinstance(text, str) for word in _words(text)]


@lru_cache(64)  # a system message is that of many rows, and each row is asked for twice
def _words(text: str) -> list[str]:
    text = THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return WORD.findall(text)
