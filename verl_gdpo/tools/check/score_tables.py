"""Tables of a dry run: the rewards of each data source, and those of one prompt's responses."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.samples import BatchRows, is_number, value_or_error
from verl_gdpo.algorithm.settings import GdpoSettings, RewardTerm
from verl_gdpo.algorithm.zero import Floats, Ints
from verl_gdpo.terminal import render
from verl_gdpo.tools.check.dry_run import FIRST_STEP, DryRun
from verl_gdpo.tools.check.sample_responses import RIGHT

NEVER_VARIES = "NEVER VARIES"
UNUSED = NOT_SUMMED, NOT_TRAINED, NEVER_APPLIES = (
    "not in the sum",
    "not trained on",
    "never applies",
)
HEADER = ("reward", "weight", "counts if", "min", "max", "variance", "")  # the last is a remark
LEFT = (0, 2, 6)  # columns with words
Line = tuple[str, ...]  # cells of a table


@dataclass
class Tables:
    """The tables of a dry run; those of our rewards are computed as the training does.

    Without `settings`, the run trains on the scores of verl's own managers.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """

    run: DryRun
    settings: GdpoSettings | None

    def __post_init__(self) -> None:
        self.group_B: Ints = np.array([sample.row for sample in self.run.samples])
        self.places: dict[str, list[int]] = {}  # of the samples of each data source
        for place, sample in enumerate(self.run.samples):
            self.places.setdefault(sample.source, []).append(place)
        self.unused, self.terms = NOT_SUMMED, dict[str, RewardTerm]()
        if self.settings is None:
            score_B1 = _numbers(self.run.scores)[:, None]
            self.rewards = RewardMatrix({"score": 1.0}, score_B1, np.ones_like(score_B1, np.bool_))
            self.unused = NOT_TRAINED
        else:
            self.rewards = RewardMatrix.of(_rows(self.run), self.settings)
            self.terms |= self.settings.rewards or {}
        self.lines = {source: [*self._lines(here)] for source, here in self.places.items()}

    def __iter__(self) -> Iterator[str]:
        for source, lines in self.lines.items():
            title = f"data_source {source!r}, {len(self.places[source])} responses:"
            yield f"{title}\n{render(HEADER, lines, LEFT)}"
        shown_BK = np.where(self.rewards.present_BK, self.rewards.values_BK, np.nan)
        of_prompt = [
            (sample.kind, *(f"{value:.3f}".replace("nan", "-") for value in values))
            for sample, values in zip(self.run.samples, shown_BK.tolist(), strict=True)
            if sample.row == 0
        ]
        prompt = self.run.samples[0].label.partition(", response")[0]
        yield f"{prompt}\n{render(('response', *self.rewards.weights), of_prompt)}"

    def same_everywhere(self) -> list[str]:
        """A remark for each reward that is the same for all responses of a data source."""
        return [
            f"data_source {source!r}: {line[0]} is the same for all made-up responses"
            for source, lines in self.lines.items()
            for line in lines
            if line[-1] == NEVER_VARIES
        ]

    def without_signal(self, sources: Collection[str]) -> list[str]:
        """A sentence for each of these data sources in which all that is trained on is the same.

        Only where a right response was tried: wrong ones may all get the lowest reward.
        """
        sentences = []
        for source in self.lines.keys() & {*sources}:
            lines = self.lines[source]  # a weight is the second cell, and "0" if it is none
            used = [line for line in lines if line[-1] not in UNUSED and line[1] != "0"]
            kinds = [self.run.samples[place].kind for place in self.places[source]]
            if RIGHT in kinds and all(line[-1] == NEVER_VARIES for line in used):
                # the lowest value, which is the highest too
                low = HEADER.index("min")
                values = ", ".join(f"{line[0]} is {float(line[low]):g}" for line in used)
                sentences.append(
                    f"data_source {source!r}: {values} for each of {len(kinds)} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return sentences

    def _lines(self, here: Sequence[int]) -> Iterator[Line]:
        """What is trained on, and what was returned beside it."""
        infos = self._infos(here)
        for column, (name, weight) in enumerate(self.rewards.weights.items()):
            present_B = self.rewards.present_BK[here, column]
            values = self.rewards.values_BK[here, column][present_B]
            if self.settings is None:  # verl's managers repeat a bare number as "acc"
                infos = {k: v for k, v in infos.items() if not np.array_equal(v, values)}
            elif name not in infos:
                continue
            mark = _mark(values, self.group_B[here][present_B])
            condition = _condition(self.terms.get(name, RewardTerm()))
            yield (name, f"{weight:g}", condition, *_statistics(values), mark)
        for name, values in infos.items():
            if name not in self.rewards.weights:
                yield (name, "-", "", *_statistics(values), self.unused)

    def _infos(self, here: Sequence[int]) -> Mapping[str, Floats]:
        """{name: numbers} of what was returned for these samples beside a score."""
        infos = [self.run.infos[i] for i in here]
        names = dict.fromkeys(name for info in infos for name in info if name != "score")
        return {name: _numbers(info.get(name) for info in infos) for name in names}


def unused_rewards(run: DryRun, settings: GdpoSettings | None) -> list[str]:
    """A remark on numbers that the scorers return, while the settings name other rewards."""
    if settings is None or settings.rewards is None:
        return []
    returned = dict.fromkeys(
        name for info in run.infos for name, value in info.items() if is_number(value)
    )
    unused = [name for name in returned if name not in ("score", *settings.names)]
    named = f"algorithm.gdpo.rewards names {', '.join(settings.rewards)} alone"
    return [f"not used: {', '.join(unused)}; {named}"] if unused else []


def _rows(run: DryRun) -> BatchRows:
    rows = BatchRows.from_keys(
        keys=[f"{sample.row}_{number}_0" for number, sample in enumerate(run.samples)],
        infos=run.infos,
        sources=[sample.source for sample in run.samples],
        is_padding=[False] * len(run.samples),
        step=FIRST_STEP,
    )
    return replace(rows, label=lambda row: run.samples[row].label)


def _condition(term: RewardTerm) -> str:
    if term.when is None:
        return ""
    return f"{term.when.reward} >= {term.when.at_least:g}, else {term.otherwise}"


def _numbers(values: Iterable[Any]) -> Floats:
    """Return the numbers among the values; a scorer may also return text, which is not a reward."""
    numbers = []
    for value in values:
        try:
            numbers.append(value_or_error(value))
        except ValueError:
            continue
    return np.array([value for value in numbers if value is not None])


def _statistics(values: Floats) -> Line:
    statistics = (values.min(), values.max(), values.var()) if len(values) else ()
    return tuple(f"{value:.3f}" for value in statistics) or ("-", "-", "-")


def _mark(values: Floats, groups: npt.NDArray[np.int64]) -> str:
    if not len(values):
        return NEVER_APPLIES
    if values.min() == values.max():
        return NEVER_VARIES
    spreads = [np.ptp(values[groups == group]) for group in set(groups.tolist())]
    return "" if max(spreads) > 0 else "VARIES ONLY BETWEEN PROMPTS"
