"""The look of the pictures in the documents: told apart in grey, on white that any page bears."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from verl_gdpo.tools.report.colours import ON_WHITE, looks_of


class Look(NamedTuple):
    ink: str = "#1f2328"
    quiet: str = "#d0d5db"
    background: str = "#ffffff"
    colours: Sequence[str] = ON_WHITE


LOOK = Look()


def colours_of(arms: Iterable[str]) -> dict[str, str]:
    """The colour of each arm. An estimator has the one that it has in the report."""
    looks = looks_of({arm: arm.lower() for arm in arms})
    return {arm: LOOK.colours[look] for arm, look in looks.items()}


# matplotlib's settings
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": LOOK.ink,
    "axes.facecolor": LOOK.background,
    "axes.labelcolor": LOOK.ink,
    "axes.edgecolor": LOOK.quiet,
    "xtick.labelcolor": LOOK.ink,
    "ytick.labelcolor": LOOK.ink,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
}
