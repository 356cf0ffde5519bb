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

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

ALIKE = 0.2
SHARED = 5
COMMON = 0.01
LEAST = 8
# So many prompts may have a triple that counts, where `COMMON` of them are fewer.
ALWAYS_COUNTS = 10
# So many validation rows, evenly spread, have their triples compared. The same number of training
# rows says which triples are common.
MOST = 5000
MOST_WORDS = 300  # The last ones of a prompt.
# A number, an ideograph, other letters, or a mark of arithmetic.
WORD = re.compile(r"\d+(?:\.\d+)?|[\u3400-\u9fff]|[^\W\d_\u3400-\u9fff]+|[+*/^=<>]|-(?=\s*\d)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
BESIDE_NO_NUMBER = re.compile(r"(?<!\d) | (?!\d)")
Messages = Sequence[Mapping[str, Any]]
Label = Callable[[int], str]


class PromptReader(NamedTuple):
    """The prompts of a file, which are read more than once and never all in memory.

    number: how many there are.
    read: `read(step)` gives every `step`-th one, from the first.
    """

    number: int
    read: Callable[[int], Iterable[Messages]]

    def spread(self) -> Iterable[tuple[int, Messages]]:
        """At most `MOST` of them, with their numbers."""
        step = max(1, math.ceil(self.number / MOST))
        return zip(range(0, self.number, step), self.read(step), strict=True)


class Overlap(NamedTuple):
    """{number of a validation row: that of a training row}, of equal and nearly equal ones."""

    equal: Mapping[int, int]
    near: Mapping[int, int]
    rows: int
    compared: int  # So many of the rows were compared for near equality.

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
    common = _common_triples(sample.values(), training)
    index = _RareTriples(sample, common)
    keys = [_key_of(prompt) for prompt in validation.read(1)]

    first_row: dict[int, int | None] = dict.fromkeys(keys)  # {key: the first training row with it}
    near: dict[int, int] = {}
    for row, prompt in enumerate(training.read(1)):
        key = _key_of(prompt)
        if key in first_row and first_row[key] is None:
            first_row[key] = row
        for number in index.near(_triples_of(prompt) - common):
            near.setdefault(number, row)

    equal = {}
    for number, key in enumerate(keys):
        row_with_key = first_row[key]
        if row_with_key is not None:
            equal[number] = row_with_key
    nearly_equal = {number: near[number] for number in sorted(near.keys() - equal.keys())}
    return Overlap(equal, nearly_equal, len(keys), len(sample))


def _common_triples(validation: Collection[set[int]], training: PromptReader) -> set[int]:
    """The triples that too many prompts have to say anything.

    Args:
        validation: the triples of each validation row that is compared.
        training: all training rows, of which some are read.
    """
    prompts_with: Counter[int] = Counter()
    for triples in validation:
        prompts_with.update(triples)
    prompt_count = len(validation)
    for _, prompt in training.spread():
        prompts_with.update(_triples_of(prompt))
        prompt_count += 1
    most = max(ALWAYS_COUNTS, COMMON * prompt_count)
    return {triple for triple, count in prompts_with.items() if count > most}


class _RareTriples:
    """The validation rows by the triples that they have, without the common ones."""

    def __init__(self, sample: Mapping[int, set[int]], common: set[int]) -> None:
        self._rows_with: dict[int, list[int]] = defaultdict(list)  # {triple: numbers of rows}
        self._sizes: dict[int, int] = {}  # {number of a row: how many triples it has}
        for number, triples in sample.items():
            rare = triples - common
            self._sizes[number] = len(rare)
            if len(rare) >= LEAST:
                for triple in rare:
                    self._rows_with[triple].append(number)

    def near(self, triples: set[int]) -> Iterator[int]:
        """Yield the rows that have nearly the prompt with these triples."""
        if len(triples) < LEAST:
            return
        rows = chain.from_iterable(self._rows_with.get(triple, ()) for triple in triples)
        for number, shared in Counter(rows).items():
            either = len(triples) + self._sizes[number] - shared
            if shared >= max(SHARED, ALIKE * either):
                yield number


def _key_of(messages: Messages) -> int:
    """A hash that equal prompts share, in this process."""
    words = " ".join(_words_of(messages))
    # A space stays between two numbers alone, or 1 23 would be 12 3.
    text = BESIDE_NO_NUMBER.sub("", words)
    # Without any word, the prompts have to be the same.
    return hash(text or str(messages))


def _triples_of(messages: Messages) -> set[int]:
    """Hashes of the triples of words."""
    asked = [message for message in messages if message["role"] != "system"]
    words = _words_of(asked)[-MOST_WORDS:]
    return {hash(triple) for triple in zip(words, words[1:], words[2:], strict=False)}


def _words_of(messages: Messages) -> list[str]:
    words = []
    for message in messages:
        text = message["content"]
        # A content of text and images is a list.
        if isinstance(text, str):
            words.extend(_words(text))
    return words


# Many rows have the same system message, and each row is asked for twice.
@lru_cache(64)
def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", text).casefold()
    return WORD.findall(THOUSANDS.sub("", plain))
