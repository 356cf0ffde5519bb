"""What the templates of docs/when_gdpo_helps.md ask for.

They say the words, and the data the numbers. A sentence names the verdicts that it is true for.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from scipy import stats

from workshop.experiments.differences import Difference, signed
from workshop.experiments.map import compare
from workshop.experiments.map.compare import MATTERS, OPTIMIZERS, VERDICTS, gain, joint, settings
from workshop.experiments.template import template_beside
from workshop.experiments.trainer import compare as trainer

# the setting of the trainer: that of the map
SAME = {
    "20_to_1": "two, 20:1",
    "1_to_1": "two, 1:1",
    "by_prompt": "two answers, range by prompt",
    "tool_rl": "as ToolRL: format x 1, graded x 6",
}
# the rival in the trainer: what it is called in the map
RIVALS = {"grpo": "grpo", "grpo_rescaled": "grpo_range"}


def render(name: str = "page.md.jinja") -> str:
    template = template_beside(__file__, name)
    return template.render(page=sys.modules[__name__], compare=compare)


def text(setting: str, over: str, *expected: str, arm: str = "gdpo") -> str:
    """A difference under both optimisers, and checked: what both say together.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """
    if {*expected} - {*VERDICTS}:
        raise ValueError(f"page.md.jinja expects {expected}; verdicts are {VERDICTS}")
    said = joint(setting, over, arm)
    both = " / ".join(of_one(gain(name, setting, over, arm)) for name in OPTIMIZERS)
    if expected and said not in expected:
        raise ValueError(
            f"page.md.jinja says {expected} of {setting}: {arm} minus {over}; the data say "
            f"{said!r}, {both}"
        )
    return both


def of_one(one: Difference) -> str:
    return one.text() if any(one.values) else "0, the same"


def equal_ranges() -> list[str]:
    """The settings in which rewards divided by their ranges, of all prompts, train the same."""
    trained_again = (gain("adam", name, "grpo", "grpo_range").values for name in settings())
    pairs = zip(settings(), trained_again, strict=True)
    return [name for name, values in pairs if not any(values) and "range" not in name]


def span(names: Sequence[str], over: str) -> str:
    """The smallest and the largest mean of some settings, under both optimisers."""
    ends = []
    for optimizer in OPTIMIZERS:
        means = _means(optimizer, over, names)
        ends.append(f"{signed(min(means))} to {signed(max(means))}")
    said = Counter(joint(name, over) for name in names)
    counted = ", ".join(f"{number} {word}" for word, number in said.most_common())
    return f"{' / '.join(ends)} ({counted})"


def in_trainer(setting: str) -> str:
    """GDPO minus GRPO in verl's trainer, of the mean of all shares."""
    return trainer.difference(setting, "grpo", trainer.mean_of_all).text()


class Beside(NamedTuple):
    """GDPO minus a rival, in verl's trainer and under each optimiser of the map."""

    setting: str
    rival: str
    endpoint: str
    trainer: float
    of_optimizer: list[float]

    @property
    def errors(self) -> list[float]:
        return [mean - self.trainer for mean in self.of_optimizer]


def beside() -> Iterator[Beside]:
    endpoints = {"small": trainer.share("small"), "shares": trainer.mean_of_all}
    for setting, rival in trainer.COMPARISONS:
        for field, endpoint in endpoints.items():
            means = [
                gain(optimizer, SAME[setting], RIVALS[rival], field=field).mean
                for optimizer in OPTIMIZERS
            ]
            what = "the small reward" if field == "small" else "both shares"
            shown = trainer.difference(setting, rival, endpoint).mean
            yield Beside(SAME[setting], trainer.NAMES[rival], what, shown, means)


def mean_errors() -> list[str]:
    """Of the absolute errors, under each optimiser."""
    rows = [row.errors for row in beside()]
    return [f"{fmean(map(abs, errors)):.3f}" for errors in zip(*rows, strict=True)]


def verdicts(arm: str) -> list[int]:
    """How many settings have each verdict of GDPO minus an arm."""
    said = Counter(joint(name, arm) for name in settings())
    return [said[word] for word in VERDICTS]


def mean_of(arm: str) -> str:
    """GDPO minus an arm, over all settings, under both optimisers."""
    return " / ".join(signed(fmean(_means(optimizer, arm))) for optimizer in OPTIMIZERS)


def recovered(setting: str, by: str = "grpo_range") -> str:
    """The share of GDPO's gain over GRPO that a rival has, under both optimisers."""
    shares = []
    for optimizer in OPTIMIZERS:
        part = gain(optimizer, setting, "grpo", by).mean / gain(optimizer, setting).mean
        shares.append(f"{100 * part:.0f} %")
    return " / ".join(shares)


def number(over: str, *expected: str) -> int:
    """Of settings in which GDPO minus `over` has one of these verdicts."""
    return sum(joint(name, over) in expected for name in settings())


def alike(over: str) -> int:
    """Of settings in which the mean difference matters under no optimiser."""
    pairs = zip(*(_means(optimizer, over) for optimizer in OPTIMIZERS), strict=True)
    return sum(max(map(abs, pair)) < MATTERS for pair in pairs)


def at_least(optimizer: str, over: str) -> int:
    """Of settings in which the mean difference is at least what matters."""
    return sum(mean >= MATTERS for mean in _means(optimizer, over))


def largest(optimizer: str, over: str) -> str:
    """The mean difference that is furthest from 0."""
    return signed(max(_means(optimizer, over), key=abs))


def half_width(optimizer: str) -> str:
    """The mean half width of the intervals of GDPO minus GRPO."""
    gains = [gain(optimizer, name) for name in settings()]
    return f"{fmean(one.half_width for one in gains if any(one.values)):.3f}"


def largest_t() -> float:
    """The standard errors of half an interval of eight draws."""
    return float(stats.t.ppf((1 + gain("adam", settings()[0]).level) / 2, 7))


def _means(optimizer: str, over: str, names: Sequence[str] = ()) -> list[float]:
    return [gain(optimizer, name, over).mean for name in names or settings()]
