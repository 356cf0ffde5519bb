"""Plays all dialogues of a benchmark with a policy: those that go on advance together.

Answers are scored in threads: a scorer that takes long waits for another process.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
            self.asks = None
            self.outcome = end.value
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
    dialogues = []
    for question in known.values():
        for sample in range(samples):
            dialogues.append(Dialogue(question, sample))
    return dialogues


class _Asked(NamedTuple):
    """What a dialogue asks next, as the model reads it."""

    dialogue: Dialogue
    prompt: Prompt


class _Answered(NamedTuple):
    """What a dialogue has asked, and its answer; None if the model could not read that much."""

    asked: _Asked
    answer: Answer | None

    def go_on(self) -> None:
        """Let the dialogue go on, up to what it asks next: this scores the answer."""
        self.asked.dialogue.go_on(Record(self.asked.prompt.text, self.answer))


class _Progress:
    """Says now and then how many dialogues have ended."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._dialogues = dialogues
        self._last = time.monotonic()

    def tell(self) -> None:
        """Print a line, if the last one is `SECONDS_BETWEEN_LINES` old."""
        if time.monotonic() - self._last <= SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        ended = sum(one.asks is None for one in self._dialogues)
        note(f"{ended:,} of {len(self._dialogues):,} dialogues")


def play(dialogues: Sequence[Dialogue], engine: AnswerEngine, max_tokens: int, seed: int) -> None:
    """Let all dialogues reach their ends.

    Args:
        max_tokens: the room that a prompt has to leave; a longer prompt ends its dialogue.
        seed: of the samples; each draws from a random stream of its own.

    Raises:
        ValueError: no prompt can leave that room, or the model gives no usable numbers.
    """
    longest = engine.positions - max_tokens
    if longest < 1:
        raise ValueError(
            f"--max-tokens {max_tokens}: the model has {engine.positions} positions, which leaves "
            "no room for a prompt; choose a smaller limit"
        )
    progress = _Progress(dialogues)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        while True:
            asked = _next_prompts(dialogues, engine, seed)
            if not asked:
                return
            for answered in _answers(asked, engine, longest):
                # A result comes when its dialogue has gone on, and raises what its scorer raised.
                for _ in threads.map(_Answered.go_on, answered):
                    progress.tell()


def _next_prompts(dialogues: Sequence[Dialogue], engine: AnswerEngine, seed: int) -> list[_Asked]:
    """Return what the dialogues ask that have not reached their ends."""
    asked = []
    for dialogue in dialogues:
        if dialogue.asks is not None:
            prompt = engine.prompt(dialogue.asks, _seed(seed, dialogue))
            asked.append(_Asked(dialogue, prompt))
    return asked


def _answers(
    asked: Sequence[_Asked], engine: AnswerEngine, longest: int
) -> Iterator[list[_Answered]]:
    """Yield the answers in batches, as they are generated; first, all prompts that are too long.

    Args:
        longest: the number of tokens that a prompt may have.
    """
    short = [one for one in asked if len(one.prompt.ids) <= longest]
    yield [_Answered(one, None) for one in asked if len(one.prompt.ids) > longest]
    for batch in engine.answers([one.prompt for one in short]):
        yield [_Answered(short[place], answer) for place, answer in batch.items()]


def _seed(seed: int, dialogue: Dialogue) -> int:
    """Return a seed of its own for each answer, whatever the order and the batches."""
    text = f"{seed} {dialogue.sample} {len(dialogue.records)} {dialogue.question.key}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
