"""Says what a person should know about a run, from its metrics alone.

The rules look at one step after the other, and keep a bounded memory, so that a step costs the same
at the end of a long run as at its start. What they look for has to hold for some steps in a row
before it is said, and counts as one stretch until it has failed for as many. docs/tools.md lists
the rules, and docs/metrics.md says how often they are right (`python -m workshop.findings`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_gdpo.run.finding_rules import RULES, Memory, Row, Seen
from verl_gdpo.run.folder import Metrics

NOW = {"is": "is", "are": "are", "come": "come", "fall": "falls"}
PAST = {"is": "was", "are": "were", "come": "came", "fall": "fell"}


@dataclass(frozen=True)
class Finding:
    """What was found, at which training steps, and what to do about it.

    `topic` stays the same while the numbers in `what` change.
    """

    topic: str
    what: str
    first: int
    last: int
    advice: str
    is_over: bool = False

    @property
    def steps(self) -> str:
        return f"steps {self.first} to {self.last}" + (", and not since" if self.is_over else "")

    def __str__(self) -> str:
        return f"{self.what} ({self.steps}). {self.advice}."


@dataclass
class Stretch:
    """The latest stretch of steps in which a condition holds.

    It begins with `hold` steps in a row, and ends before `hold` steps in a row without it.
    """

    hold: int
    trues: int = 0
    falses: int = 0
    since: int = 0
    begun: int | None = None
    found: tuple[int, int] | None = None
    seen: Seen | None = None  # at the last step of `found`

    def add(self, step: int, seen: Seen) -> None:
        if not seen.holds:
            self.trues, self.falses = 0, self.falses + 1
            if self.falses == self.hold:
                self.begun = None
            return
        self.since = self.since if self.trues else step
        self.trues, self.falses = self.trues + 1, 0
        if self.trues == self.hold and self.begun is None:
            self.begun = self.since
        if self.begun is not None:
            self.found, self.seen = (self.begun, step), seen

    def finding(self) -> Finding | None:
        if self.found is None or self.seen is None:
            return None
        is_over = self.begun is None
        words = {**(PAST if is_over else NOW), **self.seen.numbers}
        what, advice = (text.format_map(words) for text in (self.seen.what, self.seen.advice))
        return Finding(self.seen.topic, what, *self.found, advice, is_over)


class Watch:
    """Takes the steps of a run in their order, and says what they show up to now."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.stretches: dict[str, Stretch] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step. Its validation may follow as another row of the same step."""
        row = Row.of(step, values)
        for rule in RULES:
            for seen in rule(row, self.memory):
                self.stretches.setdefault(seen.topic, Stretch(seen.hold)).add(step, seen)

    def findings(self) -> list[Finding]:
        """Return what was found, the latest first; what is over stands behind what is not."""
        found = [f for stretch in self.stretches.values() if (f := stretch.finding())]
        return sorted(found, key=lambda one: (one.is_over, -one.last))


def findings(metrics: Metrics) -> list[Finding]:
    """Return what the metrics {step: {name: value}} of a run show; empty for a healthy run."""
    watch = Watch()
    for step, values in sorted(metrics.items()):
        watch.add(step, values)
    return watch.findings()
