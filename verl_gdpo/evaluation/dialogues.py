"""Plays all dialogues of a benchmark with a policy: those that go on advance together.

Answers are scored in threads: a scorer that takes long waits for another process.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from verl_gdpo.evaluation.engines import AnswerEngine, Prompt
from verl_gdpo.evaluation.questions import Episode, Messages, Question, Scores
from verl_gdpo.evaluation.records import Answers, Place, Record
from verl_gdpo.run.console import duration

SECONDS_BETWEEN_LINES = 20.0


@dataclass
class Dialogue:
    """One sample of an answer to one question, from its first prompt to its end.

    records: what was asked and answered, turn by turn.
    of_answers: the scores of each answer.
    asks: what the policy answers next; None at the end.
    scores: of the whole, at the end.
    """

    question: Question
    sample: int
    episode: Episode
    records: list[Record] = field(default_factory=list)
    of_answers: list[Scores] = field(default_factory=list)
    asks: Messages | None = field(init=False)
    scores: Scores = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._ask(self.episode.prompt())

    def _ask(self, messages: Messages | None) -> None:
        self.asks = messages
        if messages is None:
            self.scores = self.episode.scores()

    @property
    def place(self) -> Place:
        """Which answer comes next."""
        return Place(self.question.key, self.sample, len(self.records))

    @property
    def is_too_long(self) -> bool:
        """Whether a prompt was longer than the model can read."""
        return bool(self.records) and self.records[-1].answer is None

    def go_on(self, record: Record) -> None:
        """Take an answer, or None for a prompt that was too long."""
        self.records.append(record)
        if record.answer is None:
            self.episode.abandon()
            self._ask(None)
        else:
            self.of_answers.append(self.episode.take(record.answer))
            self._ask(self.episode.prompt())


def start_all(questions: Iterable[Question], samples: int) -> list[Dialogue]:
    """Return a new dialogue for each sample of each question; keys have to differ.

    Raises:
        ValueError: two questions have one key, or there is none.
    """
    known: dict[str, Question] = {}
    for question in questions:
        if question.key in known:
            raise ValueError(f"two questions have the key {question.key!r}; expected one")
        known[question.key] = question
    if not known:
        raise ValueError("the benchmark has no questions")
    return [
        Dialogue(question, sample, question.start())
        for question in known.values()
        for sample in range(samples)
    ]


def replay(dialogues: Sequence[Dialogue], known: Mapping[Place, Record]) -> None:
    """Give dialogues the answers that they got before.

    Raises:
        ValueError: an answer belongs to no dialogue.
    """
    left = dict(known)

    def go_on(dialogue: Dialogue) -> None:
        while dialogue.asks is not None and (record := left.pop(dialogue.place, None)):
            dialogue.go_on(record)

    _ThreadedScoring(dialogues).run([partial(go_on, one) for one in dialogues])
    if left:
        raise ValueError(
            f"{len(left)} of the answers on the disk belong to no dialogue, such as "
            f"{next(iter(left))}; another version of the benchmark has asked for them. Start again "
            "in another folder: --out"
        )


def play(
    dialogues: Sequence[Dialogue],
    engine: AnswerEngine,
    answers: Answers,
    max_tokens: int,
    seed: int,
) -> None:
    """Let all dialogues reach their ends; each answer is kept as soon as it is there.

    Args:
        max_tokens: the room that a prompt has to leave; a longer prompt ends its dialogue as wrong.
        seed: of the samples; each draws from a random stream of its own.

    Raises:
        ValueError: the model gives no usable numbers.
    """
    scoring = _ThreadedScoring(dialogues)
    longest = engine.positions - max_tokens
    while active := [(one, one.asks) for one in dialogues if one.asks is not None]:
        asked: list[tuple[Dialogue, Prompt]] = []
        too_long = []
        for dialogue, messages in active:
            prompt = engine.prompt(messages, _seed(seed, dialogue.place))
            if len(prompt.ids) > longest:
                too_long.append((dialogue, Record(prompt.text, None)))
            else:
                asked.append((dialogue, prompt))
        _keep(too_long, answers, scoring)
        for batch in engine.answers([prompt for _, prompt in asked]):
            answered = ((*asked[k], answer) for k, answer in batch.items())
            pairs = [(one, Record(prompt.text, answer)) for one, prompt, answer in answered]
            _keep(pairs, answers, scoring)


def _keep(
    pairs: Sequence[tuple[Dialogue, Record]], answers: Answers, scoring: "_ThreadedScoring"
) -> None:
    for dialogue, record in pairs:
        answers.add(dialogue.place, record)
    scoring.run([partial(dialogue.go_on, record) for dialogue, record in pairs])


def _seed(seed: int, place: Place) -> int:
    """A random stream for each answer, whatever the order and the batches."""
    text = f"{seed} {place.sample} {place.turn} {place.key}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class _ThreadedScoring:
    """Threads; and a line on stderr now and then: what has been done, and how long is left."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._dialogues = dialogues
        self._start = self._last = time.monotonic()
        self._ended_before = self._ended()

    def _ended(self) -> int:
        return sum(one.asks is None for one in self._dialogues)

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(lambda call: call(), calls):
                if time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
                    self._show()

    def _show(self) -> None:
        self._last = time.monotonic()
        ended, total = self._ended(), len(self._dialogues)
        answers = sum(len(one.records) for one in self._dialogues)
        line = f"evaluate: {ended:,} of {total:,} dialogues, {answers:,} answers"
        if done := ended - self._ended_before:
            left = (self._last - self._start) / done * (total - ended)
            line += f", {duration(left)} left"
        print(line, file=sys.stderr, flush=True)
