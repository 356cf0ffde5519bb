"""The colours of the report and of the pictures in docs/: one table, in which GDPO is always blue.

A look is a number, which has a colour and dashes. After the last colour the first one comes again
with other dashes. The colours of a table are told apart in grey.
"""

from collections.abc import Mapping

ON_WHITE = ("#003C65", "#E27101", "#A01E71", "#000000", "#008559", "#34005A")
ON_BLACK = ("#9DC6FF", "#AD5500", "#FB79C3", "#FFFFFF", "#079C69", "#F2DAFF")
# {estimator: the look that nothing else has}
OF_ESTIMATOR = {"gdpo": 0, "grpo": 1}


def free_look(number: int) -> int:
    """Return a look for the reward or arm of a number, in the colour of no estimator."""
    free_colours = len(ON_WHITE) - len(OF_ESTIMATOR)
    times_around, place = divmod(number, free_colours)
    return len(OF_ESTIMATOR) + place + len(ON_WHITE) * times_around


def looks_of(estimator_of: Mapping[str, str]) -> dict[str, int]:
    """Return a look for each arm.

    Of several arms of one estimator, one has its colour: that of the estimator's name, or else the
    first. The others have free looks, as arms of other estimators have.

    Args:
        estimator_of: {arm: its estimator}, in the order of the arms.

    >>> looks_of({"grpo_by_range": "grpo", "grpo": "grpo", "gdpo": "gdpo"})
    {'grpo_by_range': 2, 'grpo': 1, 'gdpo': 0}
    """
    owner_of: dict[str, str] = {}
    for arm, estimator in estimator_of.items():
        if arm == estimator or estimator not in owner_of:
            owner_of[estimator] = arm
    looks: dict[str, int] = {}
    others = 0
    for arm, estimator in estimator_of.items():
        if estimator in OF_ESTIMATOR and owner_of[estimator] == arm:
            looks[arm] = OF_ESTIMATOR[estimator]
        else:
            looks[arm] = free_look(others)
            others += 1
    return looks


def variables(colours: tuple[str, ...]) -> str:
    """Return the variables of CSS that the page's script reads."""
    return " ".join(f"--look-{number}: {colour};" for number, colour in enumerate(colours))
