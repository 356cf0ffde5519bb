"""The data of the map: what each arm earned in each draw, in one file of text."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_gdpo.atomic import replace_together
from workshop.experiments.map.arms import FIRST_ARMS
from workshop.experiments.map.draws import DRAWS, Outcome, arms_of, run_draw
from workshop.experiments.map.settings import SETTINGS

DATA = Path(__file__).parent / "data" / "outcomes.csv"
COLUMNS = ("optimizer", "setting", "arm", *Outcome._fields)
NOT_YET = "-"
OPTIMIZERS = ("one scale", "adam")  # of the page


class Key(NamedTuple):
    optimizer: str
    setting: str
    arm: str


Outcomes = Mapping[Key, Mapping[int, Outcome]]  # of each draw
Found = dict[Key, dict[int, Outcome]]


class Job(NamedTuple):
    """What one process trains at a time."""

    optimizer: str
    setting: str
    draw: int
    arms: tuple[str, ...]

    def run(self) -> dict[str, Outcome]:
        return run_draw(SETTINGS[self.setting], self.optimizer, self.draw, self.arms)


def missing(
    found: Outcomes,
    optimizers: Iterable[str] = OPTIMIZERS,
    settings: Iterable[str] = tuple(SETTINGS),
    arms: Sequence[str] = (),
    draws: int = DRAWS,
) -> Iterator[Job]:
    """What has no outcome yet: first the arms that the rules rest on, draw after draw."""
    rounds = [arms] if arms else [FIRST_ARMS, ()]
    settings, optimizers = [*settings], [*optimizers]
    given: set[tuple[str, str, int, str]] = set()
    for some in rounds:
        for draw in range(draws):
            for optimizer in optimizers:
                for name in settings:
                    left = tuple(
                        arm
                        for arm in arms_of(SETTINGS[name])
                        if (not some or arm in some)
                        and draw not in found.get(Key(optimizer, name, arm), {})
                        and (optimizer, name, draw, arm) not in given
                    )
                    given.update((optimizer, name, draw, arm) for arm in left)
                    if left:
                        yield Job(optimizer, name, draw, left)


def write(found: Outcomes, path: Path = DATA) -> None:
    """Write a line for each optimiser, setting and arm, whose lists have an entry for each draw."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_together(path) as [new], new.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(found, key=_place):
            by_draw = found[key]
            columns = (
                " ".join(
                    _text(field, by_draw[draw]) if draw in by_draw else NOT_YET
                    for draw in range(max(by_draw) + 1)
                )
                for field in Outcome._fields
            )
            writer.writerow((*key, *columns))


def _place(key: Key) -> tuple[str, int, int]:
    settings = [*SETTINGS]
    return key.optimizer, settings.index(key.setting), arms_of(SETTINGS[key.setting]).index(key.arm)


def _text(field: str, outcome: Outcome) -> str:
    value = getattr(outcome, field)
    return f"{value:.3g}" if field == "rate" else f"{value:.4f}".removeprefix("0")


def read(path: Path = DATA) -> Found:
    if not path.exists():
        return {}
    found = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            key = Key(line["optimizer"], line["setting"], line["arm"])
            columns = zip(*(line[field].split() for field in Outcome._fields), strict=True)
            found[key] = {
                draw: Outcome(*map(float, entry))
                for draw, entry in enumerate(columns)
                if NOT_YET not in entry
            }
    return found
