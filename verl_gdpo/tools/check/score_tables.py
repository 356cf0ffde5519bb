"""Tables of a dry run: the rewards of each data source, and the advantages of one prompt."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.batch.rows import RewardRows, is_number, value_or_error
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.settings.reward_terms import RewardTerm
from verl_gdpo.terminal import render
from verl_gdpo.tools.advice import of_made_up_responses
from verl_gdpo.tools.advice.evidence import Evidence, look
from verl_gdpo.tools.check.dry_run import FIRST_STEP, WORDS, DryRun

Floats = npt.NDArray[np.float64]

NEVER_VARIES = "NEVER VARIES"


@dataclass(frozen=True)
class _Line:
    """One reward of a data source, or the score of verl's own managers."""

    name: str
    values: Floats
    mark: str
    weight: str = ""
    condition: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        if not len(self.values):
            return "-", "-", "-", self.mark
        statistics = (self.values.min(), self.values.max(), self.values.var())
        return *(f"{value:.3f}" for value in statistics), self.mark


def describe(run: DryRun, settings: GdpoSettings | None) -> Iterator[str]:
    """Yield the tables; those of our rewards are computed by the functions of the training.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """
    header: tuple[str, ...] = ("min", "max", "variance", "")
    for source, lines in _lines_of_sources(run, settings).items():
        if settings is None:
            table = render(("", *header), [(line.name, *line.cells) for line in lines], (0, 4))
        else:
            rows = [(line.name, line.weight, line.condition, *line.cells) for line in lines]
            table = render(("reward", "weight", "counts if", *header), rows, (0, 2, 6))
        count = sum(sample.source == source for sample in run.samples)
        yield f"data_source {source!r}, {count} responses:\n{table}"
    if settings is not None:
        rows_B, rewards = _matrix(run, settings)
        seen = look(rewards, rows_B.counted_B, _groups(run).astype(str))
        yield of_made_up_responses(Evidence([seen], settings))
        yield _example(run, rows_B, rewards, settings)
        return
    pairs = zip(run.samples, run.scores, strict=True)
    shown = [(sample.kind, f"{float(score):.3f}") for sample, score in pairs if sample.row == 0]
    yield f"{_prompt(run)}\n{render(('response', 'score'), shown)}"


def same_everywhere(run: DryRun, settings: GdpoSettings | None) -> list[str]:
    """A remark for each reward that is the same for all responses of a data source."""
    return [
        f"data_source {source!r}: {line.name} is the same for all made-up responses"
        for source, lines in _lines_of_sources(run, settings).items()
        for line in lines
        if line.mark == NEVER_VARIES
    ]


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


def _lines_of_sources(run: DryRun, settings: GdpoSettings | None) -> dict[str, list[_Line]]:
    sources = [sample.source for sample in run.samples]
    places = {
        source: [i for i, other in enumerate(sources) if other == source]
        for source in dict.fromkeys(sources)
    }
    if settings is None:
        return {source: [*_score_lines(run, here)] for source, here in places.items()}
    rewards = _matrix(run, settings)[1]
    return {
        source: [*_reward_lines(run, rewards, settings, here)] for source, here in places.items()
    }


def _matrix(run: DryRun, settings: GdpoSettings) -> tuple[RewardRows, RewardMatrix]:
    rows = RewardRows.from_keys(
        keys=[f"{sample.row}_{number}_0" for number, sample in enumerate(run.samples)],
        infos=run.infos,
        sources=[sample.source for sample in run.samples],
        is_padding=[False] * len(run.samples),
        step=FIRST_STEP,
    )
    rows = replace(rows, label=lambda row: run.samples[row].label)
    return rows, RewardMatrix.of(rows, settings)


def _groups(run: DryRun) -> npt.NDArray[np.int64]:
    return np.array([sample.row for sample in run.samples])


def _score_lines(run: DryRun, here: Sequence[int]) -> Iterator[_Line]:
    """The score that verl trains on, and what is beside it."""
    scores = _numbers(run.scores[i] for i in here)
    yield _Line("score", scores, _mark(scores, _groups(run)[here]))
    infos = [run.infos[i] for i in here]
    for name in dict.fromkeys(name for info in infos for name in info if name != "score"):
        values = _numbers(info.get(name) for info in infos)
        if not np.array_equal(values, scores):  # verl's managers repeat a bare number as "acc"
            yield _Line(name, values, "not trained on")


def _reward_lines(
    run: DryRun, rewards: RewardMatrix, settings: GdpoSettings, here: Sequence[int]
) -> Iterator[_Line]:
    infos, groups_B = [run.infos[i] for i in here], _groups(run)[here]
    names = dict.fromkeys(name for info in infos for name in info if name != "score")
    for column, (name, weight) in enumerate(rewards.weights.items()):
        if name in names:
            term = (settings.rewards or {}).get(name, RewardTerm())
            present_B = rewards.present_BK[here, column]
            values = rewards.values_BK[here, column][present_B]
            mark = _mark(values, groups_B[present_B])
            yield _Line(name, values, mark, f"{weight:g}", _condition(term))
    for name in names:
        if name not in rewards.weights:
            yield _Line(name, _numbers(info.get(name) for info in infos), "not in the sum", "-")


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


def _mark(values: Floats, groups: npt.NDArray[np.int64]) -> str:
    if not len(values):
        return "never applies"
    if values.min() == values.max():
        return NEVER_VARIES
    spreads = [np.ptp(values[groups == group]) for group in set(groups.tolist())]
    return "" if max(spreads) > 0 else "VARIES ONLY BETWEEN PROMPTS"


def _prompt(run: DryRun) -> str:
    return run.samples[0].label.partition(", response")[0]


def _example(run: DryRun, rows: RewardRows, rewards: RewardMatrix, settings: GdpoSettings) -> str:
    """Return a table with the samples of the first row."""
    lengths = torch.tensor([len(WORDS.encode(sample.response)) for sample in run.samples])
    gdpo, grpo = (
        scalars_of(rewards, rows.counted_B, _groups(run), each, lengths)
        for each in (settings, verl_grpo_settings(settings))
    )
    header = ("response", *rewards.weights, "S", "gdpo", "grpo")
    shown = [i for i, sample in enumerate(run.samples) if sample.row == 0]
    lines = [
        (
            run.samples[i].kind,
            *(
                f"{value:.3f}" if is_there else "-"
                for value, is_there in zip(rewards.values_BK[i], rewards.present_BK[i], strict=True)
            ),
            *(f"{float(column[i]):.3f}" for column in (gdpo.S_B, gdpo.A_B, grpo.A_B)),
        )
        for i in shown
    ]
    return (
        f"{_prompt(run)}, normalised with all {len(run.samples)} responses as the batch\n"
        "(S: the combined normalised rewards; gdpo: the advantage under these settings; grpo: the "
        f"advantage of GRPO)\n{render(header, lines)}"
    )
