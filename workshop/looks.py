"""The look of the pictures in the documents: told apart in grey, on white that any page bears."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Look(NamedTuple):
    ink: str = "#1f2328"
    quiet: str = "#d0d5db"
    background: str = "#ffffff"
    colours: Sequence[str] = ("#003C65", "#E27101", "#A01E71", "#000000", "#008559", "#34005A")


LOOK = Look()

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
