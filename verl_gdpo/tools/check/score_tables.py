"""The table of a dry run: what each reward gives in each data source."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.samples import BatchRows, value_or_error
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.terminal import render
from verl_gdpo.tools.check.dry_run import FIRST_STEP, RIGHT, DryRun

NEVER_VARIES, NEVER_APPLIES = "NEVER VARIES", "never applies"
HEADER = ("reward", "weight", "min", "max", "")  # the last is a remark
LEFT = (0, 4)  # columns with words


class RewardLine(NamedTuple):
    reward: str
    weight: float | None  # None for what is not trained on
    low: float
    high: float
    remark: str

    @property
    def cells(self) -> tuple[str, ...]:
        weight = "-" if self.weight is None else f"{self.weight:g}"
        ends = (f"{end:.3f}".replace("nan", "-") for end in (self.low, self.high))
        return (self.reward, weight, *ends, self.remark)


class ScoreTables:
    """A table for each data source; its rewards are computed as the training does.

    Without `settings`, the run trains on the scores of verl's own managers.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """

    def __init__(self, run: DryRun, settings: GdpoSettings | None) -> None:
        self.run, self.settings = run, settings
        self.places: dict[str, list[int]] = {}  # of the samples of each data source
        for place, sample in enumerate(run.samples):
            self.places.setdefault(sample.source, []).append(place)
        if settings is None:
            score_B1 = _numbers(run.scores)[:, None]
            self.rewards = RewardMatrix({"score": 1.0}, score_B1, np.ones_like(score_B1, np.bool_))
        else:
            self.rewards = RewardMatrix.of(_rows(run), settings)
        self.lines = {source: [*self._lines(here)] for source, here in self.places.items()}

    def __iter__(self) -> Iterator[str]:
        for source, lines in self.lines.items():
            title = f"data_source {source!r}, {len(self.places[source])} responses:"
            yield f"{title}\n{render(HEADER, [line.cells for line in lines], LEFT)}"

    def same_everywhere(self) -> list[str]:
        """A remark for each reward that is the same for all responses of a data source."""
        return [
            f"data_source {source!r}: {line.reward} is the same for all made-up responses"
            for source, lines in self.lines.items()
            for line in lines
            if line.remark == NEVER_VARIES
        ]

    def without_signal(self, sources: Collection[str]) -> list[str]:
        """A sentence for each of these data sources in which all that is trained on is the same.

        Only where a right response was tried: wrong ones may all get the lowest reward.
        """
        sentences = []
        for source in self.lines.keys() & {*sources}:
            used = [x for x in self.lines[source] if x.weight and x.remark != NEVER_APPLIES]
            kinds = [self.run.samples[place].kind for place in self.places[source]]
            if RIGHT in kinds and all(line.remark == NEVER_VARIES for line in used):
                values = ", ".join(f"{line.reward} is {line.low:g}" for line in used)
                sentences.append(
                    f"data_source {source!r}: {values} for each of {len(kinds)} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return sentences

    def _lines(self, here: Sequence[int]) -> Iterator[RewardLine]:
        """What is trained on, and what was returned beside it."""
        infos = self._infos(here)
        groups = np.array([self.run.samples[place].row for place in here])
        for column, (name, weight) in enumerate(self.rewards.weights.items()):
            present_B = self.rewards.present_BK[here, column]
            values = self.rewards.values_BK[here, column][present_B]
            if self.settings is None:  # verl's managers repeat a bare number as "acc"
                infos = {k: v for k, v in infos.items() if not np.array_equal(v, values)}
            elif name not in infos:
                continue
            yield RewardLine(name, weight, *_ends(values), _remark(values, groups[present_B]))
        unused = "not trained on" if self.settings is None else "not in the sum"
        for name, values in infos.items():
            if name not in self.rewards.weights:
                yield RewardLine(name, None, *_ends(values), unused)

    def _infos(self, here: Sequence[int]) -> Mapping[str, Floats]:
        """{name: numbers} of what was returned for these samples beside a score."""
        infos = [self.run.infos[i] for i in here]
        names = dict.fromkeys(name for info in infos for name in info if name != "score")
        return {name: _numbers(info.get(name) for info in infos) for name in names}


def _rows(run: DryRun) -> BatchRows:
    rows = BatchRows.from_keys(
        keys=[f"{sample.row}_{number}_0" for number, sample in enumerate(run.samples)],
        infos=run.infos,
        sources=[sample.source for sample in run.samples],
        is_padding=[False] * len(run.samples),
        step=FIRST_STEP,
    )
    return replace(rows, label=lambda row: run.samples[row].label)


def _numbers(values: Iterable[Any]) -> Floats:
    """Return the numbers among the values; a scorer may also return text, which is not a reward."""
    numbers = []
    for value in values:
        try:
            numbers.append(value_or_error(value))
        except ValueError:
            continue
    return np.array([value for value in numbers if value is not None])


def _ends(values: Floats) -> tuple[float, float]:
    return (values.min(), values.max()) if len(values) else (np.nan, np.nan)


def _remark(values: Floats, groups: Any) -> str:
    if not len(values):
        return NEVER_APPLIES
    if values.min() == values.max():
        return NEVER_VARIES
    varies = any(np.ptp(values[groups == group]) > 0 for group in np.unique(groups))
    return "" if varies else "VARIES ONLY BETWEEN PROMPTS"
