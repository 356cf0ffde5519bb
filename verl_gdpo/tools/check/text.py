"""Makes tables of a dry run: the rewards of each data source, and the advantages of one prompt."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.batch.rows import RewardRows
from verl_gdpo.batch.values import is_number, value_or_error
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.settings.reward_terms import RewardTerm
from verl_gdpo.terminal import render, width_of
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.advice.step import look
from verl_gdpo.tools.advice.text import of_made_up_responses
from verl_gdpo.tools.check.dry_run import FIRST_STEP, DryRun
from verl_gdpo.tools.check.findings import WIDTH
from verl_gdpo.tools.check.responses import WORDS

Floats = npt.NDArray[np.float64]

HEADER = ("reward", "weight", "counts if", "min", "max", "variance", "")
LEFT = (0, 2, 6)


def describe(run: DryRun, settings: GdpoSettings) -> Iterator[str]:
    """Yield the tables, which the functions of the training compute.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """
    rows = RewardRows.from_keys(
        keys=[f"{sample.row}_{number}_0" for number, sample in enumerate(run.samples)],
        infos=run.infos,
        sources=[sample.source for sample in run.samples],
        is_padding=[False] * len(run.samples),
        step=FIRST_STEP,
    )
    rows = replace(rows, label=lambda row: run.samples[row].label)
    rewards = RewardMatrix.of(rows, settings)
    for source in dict.fromkeys(rows.sources):
        is_here_B = np.array([other == source for other in rows.sources])
        table = render(HEADER, list(_reward_lines(run, rewards, settings, is_here_B)), LEFT)
        yield f"data_source {source!r}, {is_here_B.sum()} responses:\n{table}"
    groups = [str(sample.row) for sample in run.samples]
    yield of_made_up_responses(Evidence([look(rewards, rows.counted_B, groups)], settings))
    yield _example(run, rows, rewards, settings)


def describe_scores(run: DryRun) -> Iterator[str]:
    """Yield a table for each data source: the score that verl trains on, and what is beside it.

    The last table has the score of each response to the first row.
    """
    groups_B = np.array([sample.row for sample in run.samples])
    sources = [sample.source for sample in run.samples]
    for source in dict.fromkeys(sources):
        here = [i for i, other in enumerate(sources) if other == source]
        scores = _numbers(run.scores[i] for i in here)
        lines = [("score", *_range(scores), _mark(scores, groups_B[here]))]
        infos = [run.infos[i] for i in here]
        for name in dict.fromkeys(name for info in infos for name in info if name != "score"):
            values = _numbers(info.get(name) for info in infos)
            if not np.array_equal(values, scores):  # verl's managers repeat a bare number as "acc"
                lines.append((name, *_range(values), "not trained on"))
        table = render(("", "min", "max", "variance", ""), lines, (0, 4))
        yield f"data_source {source!r}, {len(here)} responses:\n{table}"
    pairs = zip(run.samples, run.scores, strict=True)
    shown = [(sample.kind, f"{float(score):.3f}") for sample, score in pairs if sample.row == 0]
    yield f"{_prompt(run)}\n{render(('response', 'score'), shown)}"


def _prompt(run: DryRun) -> str:
    return run.samples[0].label.partition(", response")[0]


def unused_rewards(run: DryRun, settings: GdpoSettings) -> list[str]:
    """Numbers that the scorers return, while the settings name other rewards."""
    returned = dict.fromkeys(
        name for info in run.infos for name, value in info.items() if is_number(value)
    )
    unused = [name for name in returned if name not in ("score", *settings.names)]
    return unused if settings.rewards is not None else []


def _reward_lines(
    run: DryRun, rewards: RewardMatrix, settings: GdpoSettings, is_here_B: npt.NDArray[np.bool_]
) -> Iterator[tuple[str, ...]]:
    here = [info for info, is_here in zip(run.infos, is_here_B, strict=True) if is_here]
    groups_B = np.array([sample.row for sample in run.samples])[is_here_B]
    names = dict.fromkeys(name for info in here for name in info if name != "score")
    for column, (name, weight) in enumerate(rewards.weights.items()):
        if name in names:
            term = (settings.rewards or {}).get(name, RewardTerm())
            present_B = rewards.present_BK[is_here_B, column]
            values = rewards.values_BK[is_here_B, column][present_B]
            cells = (name, f"{weight:g}", _condition(term))
            yield (*cells, *_range(values), _mark(values, groups_B[present_B]))
    for name in names:
        if name not in rewards.weights:
            values = _numbers(info.get(name) for info in here)
            yield (name, "-", "", *_range(values), "not in the sum")


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


def _range(values: Floats) -> tuple[str, str, str]:
    if not len(values):
        return "-", "-", "-"
    return f"{values.min():.3f}", f"{values.max():.3f}", f"{values.var():.3f}"


def _mark(values: Floats, groups: npt.NDArray[np.int64]) -> str:
    if not len(values):
        return "never applies"
    if values.min() == values.max():
        return "NEVER VARIES"
    spreads = [np.ptp(values[groups == group]) for group in set(groups.tolist())]
    return "" if max(spreads) > 0 else "VARIES ONLY BETWEEN PROMPTS"


def _example(run: DryRun, rows: RewardRows, rewards: RewardMatrix, settings: GdpoSettings) -> str:
    """Return a table with the samples of the first row."""
    groups = [str(sample.row) for sample in run.samples]
    lengths = [len(WORDS.encode(sample.response)) for sample in run.samples]
    gdpo, grpo = (
        scalars_of(rewards, rows.counted_B, groups, each, torch.tensor(lengths))
        for each in (settings, verl_grpo_settings(settings))
    )
    shown = [i for i, sample in enumerate(run.samples) if sample.row == 0]
    columns = {
        name: [f"{rewards.values_BK[i, k]:.3f}" if rewards.present_BK[i, k] else "-" for i in shown]
        for k, name in enumerate(rewards.weights)
    }
    columns |= {
        name: [f"{float(column[i]):.3f}" for i in shown]
        for name, column in (("S", gdpo.S_B), ("gdpo", gdpo.A_B), ("grpo", grpo.A_B))
    }
    kinds = [run.samples[i].kind for i in shown]
    return (
        f"{_prompt(run)}, normalised with all {len(run.samples)} responses as the batch\n"
        "(S: the combined normalised rewards; gdpo: the advantage under these settings; grpo: the "
        f"advantage of GRPO)\n{_fitting(kinds, columns)}"
    )


def _fitting(kinds: Sequence[str], columns: Mapping[str, Sequence[str]]) -> str:
    """Return the table with as many rewards as fit into `WIDTH`."""
    *rewards, S, gdpo, grpo = columns
    for count in range(len(rewards), -1, -1):
        header = [*rewards[:count], S, gdpo, grpo]
        lines = [
            (kind, *cells)
            for kind, *cells in zip(kinds, *(columns[name] for name in header), strict=True)
        ]
        table = render(("response", *header), lines)
        if max(map(width_of, table.splitlines())) <= WIDTH:
            break
    left_out = len(rewards) - count
    return f"{table}\n({left_out} more rewards do not fit)" if left_out else table
