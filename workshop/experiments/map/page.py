"""Writes docs/when_gdpo_helps.md: `page.md.jinja` says the words, and the data the numbers."""

from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

from verl_gdpo.tools.report.page import signed
from workshop.experiments.map import compare, settings
from workshop.experiments.map.arms import ARMS
from workshop.experiments.map.compare import Interval
from workshop.experiments.map.results import MATTERS, PARTS, REACHED, Map, verdict
from workshop.experiments.map.settings import SETTINGS
from workshop.experiments.template import template_beside

PAGE = Path(__file__).parents[3] / "docs" / "when_gdpo_helps.md"
# the same to GDPO and to GRPO on rescaled rewards
REPEATED = ("two, 1:1", "two, 3:1", "two, 6:1", "two, 20:1", "two, 100:1")
VERDICTS = ("more", "a little more", "no difference", "open", "a little less", "less")


def write(found: Map, path: Path) -> None:
    path.write_text(render(found))


def render(found: Map) -> str:
    constants = vars(settings) | vars(compare) | {"MATTERS": MATTERS}
    names = Words(found)
    return template_beside(__file__).render(
        found=found, runs=runs(found), constants=constants, arms=ARMS, words=names
    )


class Words:
    """What the template asks for. A sentence names the verdicts that it is true for.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """

    def __init__(self, found: Map) -> None:
        self.found = found

    def gain(self, setting: str, over: str = "grpo", *expected: str) -> str:
        interval = self.found.gain(setting, over)
        return _checked(f"{setting}: gdpo minus {over}", interval, expected)

    def part(self, setting: str, what: str, *expected: str) -> str:
        interval = self.found.parts[setting][what]
        return _checked(f"{setting}: {what}", interval, expected)

    def mean(self, what: str) -> str:
        """Of a part, over the settings."""
        return signed(fmean(parts[what].mean for parts in self.found.parts.values()), 3)

    def number(self, over: str, *verdicts: str) -> int:
        """Of settings in which GDPO minus `over` has one of these verdicts."""
        return sum(verdict(self.found.gain(name, over)) in verdicts for name in self.found.rows)

    def recovered(self, setting: str) -> str:
        """The share of GDPO's gain that GRPO has once its rewards are rescaled."""
        share = self.found.parts[setting]["scale"].mean / self.found.gain(setting).mean
        return f"{100 * share:.0f} %"

    def steps(self, setting: str, arm: str) -> int:
        steps = self.found.rows[setting][arm].steps
        if steps is None:
            raise ValueError(f"{setting}: {arm} never reaches {REACHED}")
        return steps

    def final(self, setting: str, arm: str) -> str:
        return f"{self.found.rows[setting][arm].final:.2f}"

    def rate(self, setting: str, arm: str) -> str:
        return f"{self.found.rows[setting][arm].rate:.2f}"

    def repeated(self) -> str:
        """What should be the same five times: GDPO minus GRPO on rescaled rewards."""
        *most, last = (signed(gain.mean, 3) for gain in self._repeated())
        return f"{', '.join(most)} and {last}"

    def spread_of_repeated(self) -> str:
        return f"{stdev(gain.mean for gain in self._repeated()):.3f}"

    def error_of_repeated(self) -> str:
        """The standard error of such a difference, from its 95 % interval."""
        return f"{fmean((gain.high - gain.low) / (2 * 1.96) for gain in self._repeated()):.3f}"

    def _repeated(self) -> list[Interval]:
        return [self.found.gain(name, "grpo_range") for name in REPEATED]

    def table(self) -> str:
        return table(self.found)

    def counts(self) -> str:
        return counts(self.found)


def _checked(what: str, interval: Interval, expected: tuple[str, ...]) -> str:
    unknown = {*expected} - {*VERDICTS}
    if unknown or (expected and verdict(interval) not in expected):
        raise ValueError(
            f"page.md.jinja says {expected} of {what}; the data say {verdict(interval)!r}, "
            f"{interval_text(interval)}"
        )
    return interval_text(interval)


def runs(found: Map) -> int:
    """How many policies were trained."""
    tried = sum(len(compare.RATES[SETTINGS[name].optimizer]) for name in found.rows)
    return len(ARMS) * (found.seeds * len(found.rows) + compare.TUNING_SEEDS * tried)


def interval_text(interval: Interval) -> str:
    """The difference, and the interval that holds for all settings at once."""
    low, high = signed(interval.low_all, 3), signed(interval.high_all, 3)
    return f"{signed(interval.mean, 3)} [{low}, {high}]"


def table(found: Map) -> str:
    """A line for each setting: GDPO's outcome, what it is above rivals, and the parts of that."""
    rivals = ("grpo", "grpo_range", "grpo_spread")
    lines = [
        "| setting | GDPO | minus GRPO | minus `grpo_range` | minus `grpo_spread` "
        "| scale | each reward | batch norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.rows.items():
        gains = " | ".join(interval_text(found.gain(name, rival)) for rival in rivals)
        parts = " | ".join(signed(found.parts[name][what].mean, 3) for what in [*PARTS][:3])
        lines.append(f"| {name} | {rows['gdpo'].outcome:.3f} | {gains} | {parts} |")
    return "\n".join(lines)


def counts(found: Map) -> str:
    """A line for each rival: in how many settings GDPO earns more, or less, than it."""
    lines = [f"| arm | {' | '.join(VERDICTS)} |", "|---" * (1 + len(VERDICTS)) + "|"]
    for arm in (arm for arm in ARMS if arm != "gdpo"):
        number = Counter(verdict(found.gain(name, arm)) for name in found.rows)
        lines.append(f"| `{arm}` | {' | '.join(str(number[word]) for word in VERDICTS)} |")
    return "\n".join(lines)
