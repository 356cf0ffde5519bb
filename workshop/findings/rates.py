"""Counts what the rules say of the made runs, with intervals of 95 % (Wilson)."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scipy.stats import binomtest

from verl_gdpo.tools.run_folder.findings import Finding, FindingTracker, findings
from verl_gdpo.tools.run_folder.folder import merged
from workshop.findings.made_metrics import Part
from workshop.findings.made_runs import SICK, MadeRun, healthy_runs, sick_runs

SICK_RUNS = 30  # of each fault and number of rows
MOST_HEALTHY, LEAST_SICK = 0.02, 0.9
HEADER = ("made runs", "of", "found", "interval", "told after", "first step named")


@dataclass
class Rate:
    """In how many runs something was found, and what."""

    kind: str
    is_sick: bool = False
    found: int = 0
    runs: int = 0
    # in steps, from the begin of the fault: when it is told, and the first step that is named then
    delays: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    topics: Counter[str] = field(default_factory=Counter)

    def add(self, of_run: list[Finding]) -> None:
        """Count a healthy run."""
        self.runs += 1
        self.found += bool(of_run)
        self.topics.update(finding.topic for finding in of_run)

    def add_sick(self, told: tuple[int, Finding] | None, begin: int) -> None:
        """Count a sick run, by the step at which its fault is told; before it begins, it is not."""
        self.runs += 1
        if told is None or told[0] < begin:
            return
        step, finding = told
        self.found += 1
        self.delays.append(step - begin)
        self.named.append(finding.first - begin)
        self.topics[finding.topic] += 1

    @property
    def missed(self) -> bool:
        share = self.found / self.runs
        return share < LEAST_SICK if self.is_sick else share > MOST_HEALTHY

    def cells(self) -> tuple[str, ...]:
        interval = binomtest(self.found, self.runs).proportion_ci(method="wilson")
        return (
            self.kind,
            str(self.runs),
            f"{self.found / self.runs:.3f}",
            f"{interval.low:.3f} to {interval.high:.3f}",
            f"{statistics.median(self.delays):.0f} steps" if self.delays else "",
            f"{statistics.median(self.named):+.0f}" if self.named else "",
        )

    def __str__(self) -> str:
        goal = "MISSED" if self.missed else "met"
        return f"{'  '.join(self.cells())}  {goal}  {dict(self.topics.most_common(4))}"


def healthy_rates(part: Part, share: float = 1.0, first: int = 0) -> list[Rate]:
    """Of all healthy runs together, by length, by number of series, and by kind."""
    names = [f"{steps:,} steps" for steps in part.lengths]
    names = ["healthy", *names, *(f"{series} series" for series in part.series), *part.healthy]
    rates = {name: Rate(name) for name in names}
    for steps, count in part.lengths.items():
        for run in healthy_runs(part, steps, range(first, first + max(1, round(count * share)))):
            of_run = findings(merged(run.rows))
            for name in ("healthy", f"{steps:,} steps", f"{run.series} series", run.kind):
                rates[name].add(of_run)
    return [rate for rate in rates.values() if rate.runs]


def sick_rates(part: Part, share: float = 1.0, first: int = 0) -> Iterator[Rate]:
    """Of each fault: it is found if a finding names it, and not before it begins."""
    for kind, (topic, _) in SICK.items():
        rate = Rate(kind, is_sick=True)
        for rows in part.sick_rows:
            seeds = range(first, first + max(1, round(SICK_RUNS * share)))
            for run in sick_runs(part, kind, rows, seeds):
                rate.add_sick(_told(run, topic), run.begin)
        yield rate


def _told(run: MadeRun, topic: str) -> tuple[int, Finding] | None:
    """Return the step at which a finding that names the fault is first there, and the finding."""
    tracker = FindingTracker()
    for step, values in merged(run.rows).items():
        tracker.add(step, values)
        for name, streak in tracker.streaks.items():
            finding = streak.finding() if name.startswith(topic) else None
            if finding is not None:
                return step, finding
    return None


def table(rates: list[Rate]) -> str:
    """The rates in Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *(rate.cells() for rate in rates)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
