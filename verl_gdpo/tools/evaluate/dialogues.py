"""Plays all dialogues of a benchmark with a policy: those that go on advance together.

Answers are scored in threads: a scorer that takes long waits for another process.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from verl_gdpo.terminal import note
from verl_gdpo.tools.evaluate.benchmark import Answer, Messages, Outcome, Question

SECONDS_BETWEEN_LINES = 20.0


class Prompt(NamedTuple):
    """What the model reads: the text of a chat template, and its tokens."""

    text: str
    ids: Sequence[int]
    seed: int = 0


class AnswerEngine(Protocol):
    """A model that answers.

    positions: the longest prompt plus answer that the model can hold, in tokens.
    """

    positions: int

    def prompt(self, messages: Messages, seed: int) -> Prompt:
        """Return messages as the model reads them."""

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """Yield {place of a prompt: its answer} for each batch, in any order."""


class Record(NamedTuple):
    """What the model read, and what it answered: None if it could not read that much."""

    input: str
    answer: Answer | None


@dataclass
class Dialogue:
    """One sample of an answer to one question, from its first prompt to its end.

    records: what was asked and answered, turn by turn.
    asks: what the policy answers next; None at the end.
    outcome: the scores, at the end.
    """

    question: Question
    sample: int
    records: list[Record] = field(default_factory=list)
    asks: Messages | None = None
    outcome: Outcome = field(default_factory=lambda: Outcome({}, []))
    # Whether a prompt had earlier turns of an assistant, which a chat template renders anew.
    has_earlier_turns: bool = False

    def __post_init__(self) -> None:
        self._episode = self.question.start()
        self._send(None)

    def _send(self, answer: Answer | None) -> None:
        try:
            self.asks = self._episode.send(answer)
        except StopIteration as end:
            self.asks, self.outcome = None, end.value
            return
        if any(message["role"] == "assistant" for message in self.asks):
            self.has_earlier_turns = True

    def go_on(self, record: Record) -> None:
        """Take an answer, or None for a prompt that was too long."""
        self.records.append(record)
        self._send(record.answer)


def start_all(questions: Iterable[Question], samples: int) -> list[Dialogue]:
    """Return a new dialogue for each sample of each question; raise ValueError for equal keys."""
    known: dict[str, Question] = {}
    for question in questions:
        if question.key in known:
            raise ValueError(f"two questions have the key {question.key!r}; expected one")
        known[question.key] = question
    return [Dialogue(one, sample) for one in known.values() for sample in range(samples)]


def play(dialogues: Sequence[Dialogue], engine: AnswerEngine, max_tokens: int, seed: int) -> None:
    """Let all dialogues reach their ends.

    Args:
        max_tokens: the room that a prompt has to leave; a longer prompt ends its dialogue.
        seed: of the samples; each draws from a random stream of its own.

    Raises:
        ValueError: no prompt can leave that room, or the model gives no usable numbers.
    """
    longest, last = engine.positions - max_tokens, time.monotonic()
    if longest < 1:
        raise ValueError(
            f"--max-tokens {max_tokens}: the model has {engine.positions} positions, which leaves "
            "no room for a prompt; choose a smaller limit"
        )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        while active := [(one, one.asks) for one in dialogues if one.asks is not None]:
            asked = [(one, engine.prompt(asks, _seed(seed, one))) for one, asks in active]
            short = [(one, prompt) for one, prompt in asked if len(prompt.ids) <= longest]
            too_long = [
                (one, Record(prompt.text, None))
                for one, prompt in asked
                if len(prompt.ids) > longest
            ]
            batches = engine.answers([prompt for _, prompt in short])
            answered = (
                [(short[k][0], Record(short[k][1].text, answer)) for k, answer in batch.items()]
                for batch in batches
            )
            for pairs in chain([too_long], answered):
                for _ in threads.map(lambda pair: pair[0].go_on(pair[1]), pairs):
                    if time.monotonic() - last > SECONDS_BETWEEN_LINES:
                        last, ended = time.monotonic(), sum(one.asks is None for one in dialogues)
                        note(f"{ended:,} of {len(dialogues):,} dialogues")


def _seed(seed: int, dialogue: Dialogue) -> int:
    """A random stream for each answer, whatever the order and the batches."""
    text = f"{seed} {dialogue.sample} {len(dialogue.records)} {dialogue.question.key}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
