"""What is usual for one metric of a run, and how it changes from there.

`finding_rules.py` compares with it. A level does not grow with the steps of a run.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

USUAL = 20  # values that make a usual level
RECENT = 5  # values that make a present level
LONG = 30  # values whose mean is compared, for what a mini-batch of small runs shows by chance
NEAR = 0.05  # of a reward's range: as good as its best
BLOCK = 10  # steps whose mean is compared, where a reward falls while another rises
BLOCKS = 12  # that are kept


class Block(NamedTuple):
    """Some steps of a reward."""

    first: int  # step
    mean: float
    variance: float  # of a step's mean, from one to the next


class Trade(NamedTuple):
    """A reward that fell, and the one that gained most meanwhile."""

    since: int  # step
    before: float  # the mean of the reward that fell
    gained: str  # the other reward
    gained_from: float
    gained_to: float


class Level:
    """What is usual for one metric of a run. It does not grow with the steps."""

    def __init__(self) -> None:
        self.start = math.nan  # median of the first `USUAL` values
        self.window: deque[float] = deque(maxlen=LONG)
        self.steps: deque[int] = deque(maxlen=LONG)  # of the window
        self.best = -math.inf  # the highest mean of `USUAL` values
        self.noise = 0.0  # of these values
        self.length_at_best = math.nan  # of the responses then, in tokens
        self.worse_since: int | None = None  # the first step since then at which it was worse
        self.blocks: deque[Block] = deque(maxlen=BLOCKS)
        self.in_block: list[float] = []
        self.block_began = 0
        self.highest_before = -math.inf  # of the means of blocks that are no longer kept
        self.is_lower = False  # it has lost `TRADED` over the blocks
        self.trade: Trade | None = None
        # The lowest and the highest value of a single sample; unknown is infinitely far.
        self.low = math.inf
        self.high = -math.inf

    def add(self, step: int, value: float) -> None:
        self.window.append(value)
        self.steps.append(step)
        if len(self.window) == USUAL:
            self.start = statistics.median(self.window)

    def latest(self, count: int) -> Sequence[float]:
        """Return the last values, or NaN as long as there are fewer."""
        if len(self.window) < count:
            return [math.nan] * count
        return list(self.window)[-count:]

    def mean(self, count: int = LONG) -> float:
        return sum(self.latest(count)) / count

    def error(self, mean: float) -> float:
        """Return the standard error of the mean of `LONG` values."""
        squares = [(value - mean) * (value - mean) for value in self.latest(LONG)]
        return math.sqrt(sum(squares)) / LONG

    def first_of(self, count: int, holds: Callable[[float], bool]) -> int:
        """Return the first of the last steps, from which on this holds of most values."""
        first = self.steps[-1]
        surplus = 0  # of the values of which it holds over the others, from a step on
        most = 0
        latest = list(zip(self.steps, self.window, strict=True))[-count:]
        for step, value in reversed(latest):
            if holds(value):
                surplus += 1
            else:
                surplus -= 1
            if surplus > most:
                most = surplus
                first = step
        return first

    def add_mean(self, step: int, value: float, length: "Level") -> None:
        """Take the mean of a reward at a step, which `length` has seen already."""
        self.add(step, value)
        # The present level is left out, so that it can be compared with the best one.
        before = self.latest(USUAL + RECENT)[:USUAL]
        mean = sum(before) / USUAL
        if mean > self.best:
            self.best = mean
            self.length_at_best = statistics.median(length.latest(USUAL + RECENT)[:USUAL])
            # Differences of neighbours, because a trend is no noise.
            squares = sum((a - b) * (a - b) for a, b in pairwise(before))
            self.noise = math.sqrt(squares / (2 * USUAL - 2))
        by_chance = 2 * self.noise / math.sqrt(RECENT)
        near = max(NEAR * (self.high - self.low), by_chance)
        if not math.isfinite(near):
            near = by_chance
        is_worse = self.mean(RECENT) < self.best - near
        if not is_worse:
            self.worse_since = None
        elif self.worse_since is None:
            self.worse_since = step

    def add_to_block(self, step: int, value: float) -> bool:
        """Take the mean of a reward at a step; return whether this step ends a block."""
        if not self.in_block:
            self.block_began = step
        self.in_block.append(value)
        if len(self.in_block) < BLOCK:
            return False
        squares = [(a - b) * (a - b) for a, b in pairwise(self.in_block)]
        block = Block(
            first=self.block_began,
            mean=sum(self.in_block) / BLOCK,
            variance=sum(squares) / (2 * len(squares)),
        )
        if len(self.blocks) == BLOCKS:
            self.highest_before = max(self.highest_before, self.blocks[0].mean)
        self.blocks.append(block)
        self.in_block.clear()
        return True

    def error_of_blocks(self) -> float:
        """Return the standard error of the difference of two blocks."""
        variance = sum(block.variance for block in self.blocks) / len(self.blocks)
        return math.sqrt(2 * variance / BLOCK)
