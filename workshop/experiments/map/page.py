"""What the template of docs/evidence.md asks for, of the map.

They say the words, and the data the numbers. A sentence names the verdicts that it is true for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from workshop.experiments.differences import Difference, signed
from workshop.experiments.map.compare import MATTERS, OPTIMIZERS, VERDICTS, gain, joint, settings


def text(setting: str, over: str, *expected: str, arm: str = "gdpo") -> str:
    """A difference under both optimisers, and checked: what both say together.

    Raises:
        ValueError: the data have another verdict, so the sentence has to be written anew.
    """
    if {*expected} - {*VERDICTS}:
        raise ValueError(f"evidence.md.jinja expects {expected}; verdicts are {VERDICTS}")
    said = joint(setting, over, arm)
    both = " / ".join(of_one(gain(name, setting, over, arm)) for name in OPTIMIZERS)
    if expected and said not in expected:
        raise ValueError(
            f"evidence.md.jinja says {expected} of {setting}: {arm} minus {over}; the data say "
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


def small(setting: str) -> str:
    """GDPO minus GRPO of the small reward, under both optimisers."""
    return " / ".join(gain(name, setting, field="small").text() for name in OPTIMIZERS)


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


def alike(over: str) -> int:
    """Of settings in which the mean difference matters under no optimiser."""
    pairs = zip(*(_means(optimizer, over) for optimizer in OPTIMIZERS), strict=True)
    return sum(max(map(abs, pair)) < MATTERS for pair in pairs)


def all_settings() -> Iterator[str]:
    """A line for each setting: GDPO minus GRPO, and minus rescaled GRPO."""
    for name in settings():
        for over in ("grpo", "grpo_range"):
            yield f"{name} | {over} | {text(name, over)} | {joint(name, over)}"


def _means(optimizer: str, over: str, names: Sequence[str] = ()) -> list[float]:
    return [gain(optimizer, name, over).mean for name in names or settings()]
