"""The settings of the map: which rewards there are, and how training goes.

An answer has three positions with one of 8 tokens each. One answer to each prompt is right in every
respect. An event holds where each position that it looks at has one of its tokens: that of the
right answer and others, drawn for each seed. An event is the same for all prompts ("shared", what a
format is like) or another one for each prompt ("own", what a correct answer is like). If it allows
4 of 8 tokens at each of three positions, it holds for 12.5 % of the answers of an untrained policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

PROMPTS, POSITIONS, TOKENS, STEPS = 16, 3, 8, 100
# how often an event holds before training: how many tokens it allows at the first positions
SHARES = {"3 %": (4, 2, 2), "6 %": (4, 4, 2), "12 %": (4, 4, 4), "25 %": (4, 4), "50 %": (4,)}
LARGEST_FACTOR = 8  # of a range that depends on the prompt; the smallest is 1/8
RANGES = {"1/16": 1 / 16, "1/4": 1 / 4, "1": 1.0, "4": 4.0, "16": 16.0}


@dataclass(frozen=True)
class Part:
    """What an event allows at one position."""

    position: int
    tokens: int
    own: bool
    # with places, the tokens are these of an order common to all events of the prompt; the right
    # token has place 0
    places: tuple[int, ...] = ()
    # the event of the setting whose order of tokens this part has; None for an order of its own
    like: int | None = None


Event = tuple[Part, ...]


@dataclass(frozen=True)
class Reward:
    """`range` times the share of the events that hold."""

    events: tuple[Event, ...] = ()
    range: float = 1.0
    by_prompt: Literal["no", "each", "all"] = "no"  # times 1/8 to 8, for each reward or for all
    noise: float = 0.0  # this share of the reward is a random number
    wrong: float = 0.0  # the reward says the opposite this often
    worth: float = 1.0  # its weight in the outcome by which arms are judged

    @property
    def is_noisy(self) -> bool:
        return self.noise > 0 or self.wrong > 0

    @property
    def bound(self) -> float:
        """The highest value that the reward can have; the lowest is 0."""
        return self.range * (1 if self.by_prompt == "no" else LARGEST_FACTOR)


@dataclass(frozen=True)
class Setting:
    name: str
    rewards: tuple[Reward, ...]
    samples: int = 8
    start: float = 0.0  # spread of the first logits

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for reward in self.rewards for event in reward.events)


def event(share: str, own: bool) -> Event:
    return tuple(Part(i, tokens, own) for i, tokens in enumerate(SHARES[share]))


def needing(first: Event, other: Event) -> Event:
    """`other`, which holds only where `first` does: the first event of the setting."""
    return (*(replace(part, like=0) for part in first), *other)


def several(*ranges: float, by_prompt: Literal["no", "each"] = "no") -> tuple[Reward, ...]:
    """As many rewards, each met by 12.5 %; every second one is a prompt's own."""
    return tuple(
        Reward((event("12 %", own=k % 2 == 1),), size, by_prompt) for k, size in enumerate(ranges)
    )


def answers(*ranges: float, by_prompt: Literal["no", "each"] = "no") -> tuple[Reward, ...]:
    """As many rewards, each met by 12.5 %, and all a prompt's own."""
    return tuple(Reward((event("12 %", own=True),), size, by_prompt) for size in ranges)


def pair(big: float = 1.0, **both: Any) -> tuple[Reward, ...]:
    """A format and an answer, each met by 12.5 %."""
    return tuple(replace(reward, **both) for reward in several(big, 1.0))


def judged_by_range(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    return tuple(replace(reward, worth=reward.range) for reward in rewards)


def of_places(big: float, *places: tuple[int, ...]) -> tuple[Reward, ...]:
    """Rewards that allow these places of the common order at every position."""
    return tuple(
        Reward((tuple(Part(i, len(some), True, some) for i in range(POSITIONS)),), size)
        for some, size in zip(places, (big, 1.0), strict=True)
    )


def grid_name(share: str, size: str) -> str:
    return f"format x 1, answer {share} x {size}"


def _grid() -> Iterator[Setting]:
    for share in SHARES:
        for text, size in RANGES.items():
            rewards = (
                Reward((event("12 %", own=False),)),
                Reward((event(share, own=True),), size),
            )
            yield Setting(grid_name(share, text), rewards)


def _ranges() -> Iterator[Setting]:
    for big in (1, 3, 6, 20, 100):
        yield Setting(f"two, {big}:1", pair(big))
    yield Setting("two, 20:1, judged by range", judged_by_range(pair(20)))
    for big in (1, 6):
        yield Setting(f"two answers, {big}:1", answers(big, 1))


def _numbers() -> Iterator[Setting]:
    yield Setting("four answers, equal", answers(1, 1, 1, 1))
    for text, ranges in (
        ("four, equal", (1, 1, 1, 1)),
        ("six, equal", (1, 1, 1, 1, 1, 1)),
        ("four, a format x 6", (6, 1, 1, 1)),
        ("four, an answer x 6", (1, 1, 1, 6)),
        ("six, a format x 6", (6, 1, 1, 1, 1, 1)),
        ("six, an answer x 6", (1, 1, 1, 1, 1, 6)),
        ("four, x 8 4 2 1", (8, 4, 2, 1)),
        ("four, x 1 2 4 8", (1, 2, 4, 8)),
    ):
        yield Setting(text, several(*ranges))


def _groups() -> Iterator[Setting]:
    for samples in (4, 16):
        for big in (1, 6):
            name = f"two, {big}:1, {samples} samples"
            yield Setting(name, pair(big), samples)


def _related() -> Iterator[Setting]:
    for big in (1, 6):
        for text, second in (("alike", (0, 1, 2, 4)), ("hard to have both", (0, 4, 5, 6))):
            rewards = of_places(big, (0, 1, 2, 3), second)
            yield Setting(f"{text}, {big}:1", rewards)
        format, answer = pair(big)
        nested = format, replace(answer, events=(needing(*format.events, *answer.events),))
        yield Setting(f"one needs the other, {big}:1", nested)
    for big in (1, 6):
        rewards = of_places(big, (0, 1, 2, 3), (4, 5, 6, 7))
        yield Setting(f"conflict, {big}:1", rewards)
    yield Setting("conflict, 6:1, judged by range", judged_by_range(rewards))


def _noise() -> Iterator[Setting]:
    for big in (1, 6):
        yield Setting(f"half noise, {big}:1", pair(big, noise=0.5))
        yield Setting(f"wrong in 20 %, {big}:1", pair(big, wrong=0.2))
    for size in (1.0, 0.05):
        useless = Reward((), size, noise=1.0, worth=0.0)
        yield Setting(f"two and noise of {size:g}", (*pair(), useless))
    yield Setting("two and four noises of 0.05", (*pair(), *[useless] * 4))


def _by_prompt() -> Iterator[Setting]:
    yield Setting("two, range by prompt", pair(by_prompt="each"))
    yield Setting("four, range by prompt", several(1, 1, 1, 1, by_prompt="each"))
    yield Setting("two answers, range by prompt", answers(1, 1, by_prompt="each"))
    yield Setting("four answers, range by prompt", answers(1, 1, 1, 1, by_prompt="each"))
    one, other = pair()
    yield Setting("two, range of one by prompt", (replace(one, by_prompt="each"), other))
    yield Setting("two, a factor by prompt", pair(by_prompt="all"))
    yield Setting("two, 6:1, a factor by prompt", pair(6, by_prompt="all"))


def _conditions() -> Iterator[Setting]:
    correct, short = event("12 %", own=True), (Part(0, 4, own=False),)
    for size in (1, 4):
        for text, second in (("anyway", short), ("if correct", needing(correct, short))):
            rewards = Reward((correct,)), Reward((second,), size)
            yield Setting(f"short x {size} {text}", rewards)
    parts = tuple((Part(i, 1, own=True),) for i in range(POSITIONS))
    tool_rl = Reward((event("12 %", own=False),)), Reward(parts, 6)
    yield Setting("as ToolRL: format x 1, graded x 6", tool_rl)


def _uneven() -> Iterator[Setting]:
    for big in (1, 20):
        yield Setting(f"two, {big}:1, uneven start", pair(big), start=1.0)


SETTINGS = {
    setting.name: setting
    for setting in chain(
        _grid(),
        _ranges(),
        _numbers(),
        _groups(),
        _related(),
        _noise(),
        _by_prompt(),
        _conditions(),
        _uneven(),
    )
}
