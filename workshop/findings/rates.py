"""Counts what the rules say of the made runs, with intervals of 95 % (Wilson)."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scipy.stats import binomtest

from verl_gdpo.tools.run_folder.findings import Finding, findings
from verl_gdpo.tools.run_folder.folder import merged
from workshop.findings.made_metrics import Part
from workshop.findings.made_runs import SICK, healthy_runs, sick_runs

SICK_RUNS = 30  # of each fault and number of rows
MOST_HEALTHY, LEAST_SICK = 0.02, 0.9
HEADER = ("made runs", "of", "found", "interval", "after")


@dataclass
class Rate:
    """In how many runs something was found, and what."""

    kind: str
    is_sick: bool = False
    found: int = 0
    runs: int = 0
    delays: list[int] = field(default_factory=list)  # in steps, from the begin of the fault
    topics: Counter[str] = field(default_factory=Counter)

    def add(self, of_run: list[Finding], begin: int = 0) -> None:
        self.runs, self.found = self.runs + 1, self.found + bool(of_run)
        self.delays += [min(finding.first for finding in of_run) - begin] if of_run else []
        self.topics.update(finding.topic for finding in of_run)

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
            f"{statistics.median(self.delays):.0f} steps" if self.delays and self.is_sick else "",
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
    """Of each fault: it is found if the finding that names it holds after its begin."""
    for kind, (topic, _) in SICK.items():
        rate = Rate(kind, is_sick=True)
        for rows in part.sick_rows:
            seeds = range(first, first + max(1, round(SICK_RUNS * share)))
            for run in sick_runs(part, kind, rows, seeds):
                named = [one for one in findings(merged(run.rows)) if one.topic.startswith(topic)]
                rate.add([one for one in named if one.first >= run.begin], run.begin)
        yield rate


def table(rates: list[Rate]) -> str:
    """The rates in Markdown."""
    rows = [HEADER, ("---",) * len(HEADER), *(rate.cells() for rate in rates)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
