"""Counts what the rules say of the made runs, with intervals of 95 % (Wilson)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from scipy.stats import binomtest

from verl_gdpo.run.findings import findings
from verl_gdpo.run.folder import merged
from verl_gdpo.terminal import render
from workshop.findings.made_runs import (
    LENGTHS,
    MadeRun,
    healthy_runs,
    wrecked_runs,
)

WITHIN = 10  # steps after its onset in which a fault has to be found
HELD_OUT = 20_000  # seeds from here on; the rules were tuned on those below
SIZES = {60: 504, 500: 504, 5000: 192}  # healthy runs of each length
FAULTS = {60: 40, 500: 40, 5000: 5}  # runs of each fault
# {fault: how the topic begins that names it}
NAMED = {
    "reward is NaN for 30 steps": "no number",
    "gradient is NaN": "no number",
    "gradient norm 22,000": "gradient",
    "entropy 1e-4": "entropy",
    "KL .4 where it was .001": "update",
    "KL to the reference .4 where it was .001": "reference",
    "|A| grows e^10": "advantages",
    "correctness .62 to .016 at once": "collapse",
    "correctness .62 to .016 slowly": "collapse",
}
HEADER = ("runs", "of", "steps", "found", "interval", "goal", "met", "which")
MOST_HEALTHY = 0.05


@dataclass
class Rate:
    """In how many runs something was found, and what; `goal` bounds the rate."""

    kind: str
    steps: str
    goal: str = ""
    found: int = 0
    runs: int = 0
    topics: Counter[str] = field(default_factory=Counter)

    def add(self, topics: set[str]) -> None:
        self.runs, self.found = self.runs + 1, self.found + bool(topics)
        self.topics.update(topics)

    @property
    def missed(self) -> bool:
        share, bound = self.found / self.runs, self.goal.rpartition(" ")[2]
        if not self.goal:
            return False
        return share > float(bound) if self.goal.startswith("<=") else share < float(bound)

    def cells(self) -> tuple[str, ...]:
        interval = binomtest(self.found, self.runs).proportion_ci(method="wilson")
        which = ", ".join(f"{topic} {count}" for topic, count in self.topics.most_common(4))
        return (
            self.kind,
            str(self.runs),
            self.steps,
            f"{self.found / self.runs:.3f}",
            f"{interval.low:.3f} to {interval.high:.3f}",
            self.goal,
            "" if not self.goal else "NO" if self.missed else "yes",
            which,
        )


def topics(run: MadeRun, before: int | None = None) -> set[str]:
    """What is found in a run, or in its steps before one. What is over counts too."""
    rows = [row for row in run.rows if before is None or row[0] < before]
    return {finding.topic for finding in findings(merged(rows))}


def rates(first: int, part: float = 1.0) -> Iterator[Rate]:
    """Of healthy and wrecked runs.

    Args:
        first: the first seed.
        part: of the sizes above.
    """
    for steps in LENGTHS:
        yield from _healthy(healthy_runs(_seeds(first, SIZES[steps], part), steps), steps)
    for steps in LENGTHS:
        yield from _wrecked(wrecked_runs(_seeds(first, FAULTS[steps], part), steps), steps)


def _seeds(first: int, count: int, part: float) -> range:
    return range(first, first + max(1, round(count * part)))


def _healthy(runs: Iterable[MadeRun], steps: int) -> Iterator[Rate]:
    every = Rate("healthy", str(steps), f"<= {MOST_HEALTHY}")
    kinds: dict[str, Rate] = {}
    for run in runs:
        found = topics(run)
        every.add(found)
        kinds.setdefault(run.kind, Rate(f"healthy, {run.kind}", str(steps))).add(found)
    yield every
    yield from (rate for rate in kinds.values() if rate.found)


def _wrecked(runs: Iterable[MadeRun], steps: int) -> Iterator[Rate]:
    kinds: dict[str, Rate] = {}
    for run in runs:
        assert run.onset is not None
        rate = kinds.setdefault(run.kind, Rate(run.kind, str(steps), ">= 1"))
        new = topics(run, run.onset + WITHIN) - topics(run, run.begin)
        rate.add({topic for topic in new if topic.startswith(NAMED[run.kind])})
    yield from kinds.values()


def table(found: Iterable[Rate]) -> str:
    return render(HEADER, [rate.cells() for rate in found], left=range(len(HEADER)))
