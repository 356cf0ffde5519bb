"""Tables of a dry run: the rewards of each data source, and the advantages of one prompt."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.advantages import Floats, Ints, scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.batch.rows import RewardRows, is_number, value_or_error
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.settings.reward_terms import RewardTerm
from verl_gdpo.terminal import render
from verl_gdpo.tools.check.dry_run import FIRST_STEP, DryRun
from verl_gdpo.tools.check.made_up import RIGHT, WORDS

NEVER_VARIES = "NEVER VARIES"
UNUSED = NOT_SUMMED, NOT_TRAINED, NEVER_APPLIES = (
    "not in the sum",
    "not trained on",
    "never applies",
)
STATISTICS = ("min", "max", "variance", "")  # the last is a remark
Line = tuple[str, ...]  # cells of a table
LEFT = {5: (0, 4), 7: (0, 2, 6)}  # {columns of a table: those with words}


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
        self.prompt = self.run.samples[0].label.partition(", response")[0]
        self.places: dict[str, list[int]] = {}  # of the samples of each data source
        for place, sample in enumerate(self.run.samples):
            self.places.setdefault(sample.source, []).append(place)
        self.header: Line = ("", *STATISTICS)
        lines_of = self._score_lines
        if self.settings is not None:
            self.header = ("reward", "weight", "counts if", *STATISTICS)
            self.rows, lines_of = _rows(self.run), self._reward_lines
            self.rewards = RewardMatrix.of(self.rows, self.settings)
        self.lines = {source: [*lines_of(here)] for source, here in self.places.items()}

    def __iter__(self) -> Iterator[str]:
        for source, lines in self.lines.items():
            title = f"data_source {source!r}, {len(self.places[source])} responses:"
            yield f"{title}\n{render(self.header, lines, LEFT[len(self.header)])}"
        if self.settings is not None:
            yield self._example(self.settings)
            return
        pairs = zip(self.run.samples, self.run.scores, strict=True)
        shown = [(sample.kind, f"{float(score):.3f}") for sample, score in pairs if sample.row == 0]
        yield f"{self.prompt}\n{render(('response', 'score'), shown)}"

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
        found = []
        for source in self.lines.keys() & {*sources}:
            lines = self.lines[source]  # a weight is the second cell, and "0" if it is none
            used = [line for line in lines if line[-1] not in UNUSED and line[1] != "0"]
            kinds = [self.run.samples[place].kind for place in self.places[source]]
            if RIGHT in kinds and all(line[-1] == NEVER_VARIES for line in used):
                # the lowest value, which is the highest too
                low = self.header.index(STATISTICS[0])
                said = ", ".join(f"{line[0]} is {float(line[low]):g}" for line in used)
                found.append(
                    f"data_source {source!r}: {said} for each of {len(kinds)} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return found

    def _score_lines(self, here: Sequence[int]) -> Iterator[Line]:
        """The score that verl trains on, and what is beside it."""
        scores, infos = _numbers(self.run.scores[i] for i in here), self._infos(here)
        yield ("score", *_statistics(scores), _mark(scores, self.group_B[here]))
        for name, values in infos.items():
            if not np.array_equal(values, scores):  # verl's managers repeat a bare number as "acc"
                yield (name, *_statistics(values), NOT_TRAINED)

    def _reward_lines(self, here: Sequence[int]) -> Iterator[Line]:
        infos, terms = self._infos(here), (self.settings and self.settings.rewards) or {}
        for column, (name, weight) in enumerate(self.rewards.weights.items()):
            if name in infos:
                present_B = self.rewards.present_BK[here, column]
                values = self.rewards.values_BK[here, column][present_B]
                mark = _mark(values, self.group_B[here][present_B])
                said = _condition(terms.get(name, RewardTerm()))
                yield (name, f"{weight:g}", said, *_statistics(values), mark)
        for name, values in infos.items():
            if name not in self.rewards.weights:
                yield (name, "-", "", *_statistics(values), NOT_SUMMED)

    def _infos(self, here: Sequence[int]) -> dict[str, Floats]:
        """{name: numbers} of what was returned for these samples beside a score."""
        infos = [self.run.infos[i] for i in here]
        names = dict.fromkeys(name for info in infos for name in info if name != "score")
        return {name: _numbers(info.get(name) for info in infos) for name in names}

    def _example(self, settings: GdpoSettings) -> str:
        """Return a table with the samples of the first row."""
        samples, rewards = self.run.samples, self.rewards
        lengths = torch.tensor([len(WORDS.encode(sample.response)) for sample in samples])
        gdpo, grpo = (
            scalars_of(rewards, self.rows.counted_B, self.group_B, each, lengths)
            for each in (settings, verl_grpo_settings(settings))
        )
        shown_BK = np.where(rewards.present_BK, rewards.values_BK, np.nan)
        columns = [*shown_BK.T, *(x.numpy() for x in (gdpo.S_B, gdpo.A_B, grpo.A_B))]
        lines = [
            (samples[i].kind, *(f"{column[i]:.3f}".replace("nan", "-") for column in columns))
            for i in np.flatnonzero(self.group_B == 0).tolist()
        ]
        table = render(("response", *rewards.weights, "S", "gdpo", "grpo"), lines)
        return (
            f"{self.prompt}, normalised with all {len(samples)} responses as the batch\n"
            "(S: the combined normalised rewards; gdpo: the advantage under these settings; grpo: "
            f"the advantage of GRPO)\n{table}"
        )


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


def _rows(run: DryRun) -> RewardRows:
    rows = RewardRows.from_keys(
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
    found = []
    for value in values:
        try:
            found.append(value_or_error(value))
        except ValueError:
            continue
    return np.array([value for value in found if value is not None])


def _statistics(values: Floats) -> Line:
    found = (values.min(), values.max(), values.var()) if len(values) else ()
    return tuple(f"{value:.3f}" for value in found) or ("-", "-", "-")


def _mark(values: Floats, groups: npt.NDArray[np.int64]) -> str:
    if not len(values):
        return NEVER_APPLIES
    if values.min() == values.max():
        return NEVER_VARIES
    spreads = [np.ptp(values[groups == group]) for group in set(groups.tolist())]
    return "" if max(spreads) > 0 else "VARIES ONLY BETWEEN PROMPTS"
