"""Tries the reward functions on made-up responses, and says what their values cannot train.

`dry_run.py` makes and scores the responses; here their rewards are put into a table for each data
source.
"""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.read_settings import REWARDS
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import (
    FAILED,
    NOTES_KEY,
    ROLLOUT_FACTS,
    is_internal,
    may_be_meant,
    value_or_error,
)
from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.hooks.configuration import paid_failures, sums_first, unnamed_rewards
from verl_gdpo.scoring.function_list import (
    KEY,
    entries_of,
    is_asked,
    limited_functions,
    owner_of,
    scores_source,
    silence,
    tells_validation_apart,
    validation_settings,
)
from verl_gdpo.scoring.reward_functions import reward_functions
from verl_gdpo.terminal import render
from verl_gdpo.tools.check import asked, data_files, rules
from verl_gdpo.tools.check.data_files import DataFile, DataRow, Responses
from verl_gdpo.tools.check.dry_run import RIGHT, DryRun, score_rows
from verl_gdpo.tools.check.output import Output

NEVER_VARIES = "NEVER VARIES"
NEVER_APPLIES = "never applies"
HEADER = ("reward", "weight", "min", "max", "")  # the last is a remark
LEFT = (0, 4)  # columns with words


def try_rewards(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    training: Sequence[DataFile],
    validation: Sequence[DataFile],
    options: argparse.Namespace,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    is_apart = tells_validation_apart(config)
    rows = data_files.pick_rows(training, [] if is_apart else validation, options.rows)
    of_validation: list[DataRow] = []
    if is_apart and validation:
        picked = data_files.pick_rows(validation, [], options.rows)
        of_validation = [replace(row, is_validation=True) for row in picked]
    if not rows:
        output.warnings.append("there are no rows, so no reward was tried")
        return
    silent = [] if options.ask_judge else limited_functions(config)
    if silent:
        if not options.elsewhere:
            reward_functions(config)  # raises if a judge's package or key is not here
        output.warnings.append(f"not called: {silent}, which may ask a service (--ask-judge)")
    more = data_files.read_responses(options.responses, training) if options.responses else []
    if silent:
        rows = [row for row in rows if _is_scored(row, config, silent)]
        of_validation = [row for row in of_validation if _is_scored(row, config, silent)]
        more = [(row, text) for row, text in more if row is None or _is_scored(row, config, silent)]
        silence(config, silent)
    if of_validation:
        _try_rewards_of_validation(output, config, settings, of_validation, options)
    if not rows:
        return
    run = _score_with_each_function(config, rows, options.seconds, more)
    if run.problems and config.reward.reward_model.enable:
        remark = "without the reward model's server, no reward could be tried"
        output.warnings += [f"{remark}: {problem}" for problem in run.problems]
        return
    output.problems += run.problems
    if not run.samples:
        return
    output.note(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    output.warnings += _failures(run)
    output.problems += asked.what_filters_lack(config, run.infos)
    tables = ScoreTables(run, settings)
    if settings is not None:
        problems, remarks = tables.paid_failures(config, settings)
        output.problems += problems
        output.warnings += remarks
        output.warnings += tables.conditions_never_met(settings)
    sources = {source for file in training for source in file.sources}
    if not options.allow_flat and not rules.validates_only(config):
        output.problems += tables.without_signal(sources)
        output.problems += tables.cancelling(sources, config.algorithm.adv_estimator)
    output.warnings += tables.same_everywhere()
    output.warnings += tables.other_the_second_time()
    output.warnings += tables.dropped(entries_of(config), silent)
    if settings is not None:
        columns = run.rows().columns
        output.warn(unnamed_rewards, config, settings, columns)
    for text in tables:
        output.show(f"\n{text}")
    output.show("")


def _try_rewards_of_validation(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    rows: Sequence[DataRow],
    options: argparse.Namespace,
) -> None:
    """Score rows of a validation, where it has other functions than the training."""
    run = _score_with_each_function(config, rows, options.seconds, [])
    output.problems += run.problems
    if not run.samples:
        return
    output.note(f"{len(rows)} rows of the validation scored, with functions of their own")
    output.warnings += _failures(run)
    if settings is not None:
        tables = ScoreTables(run, validation_settings(config, settings))
        for text in tables:
            output.show(f"\nvalidation, {text}")


def _score_with_each_function(
    config: Any, rows: Sequence[DataRow], seconds: float, more: Responses
) -> DryRun:
    """Score the rows, and once more without the functions of the list that fail.

    The first function that fails on a sample ends the sample, and hides how others fail on it.
    """
    run = score_rows(config, rows, seconds, more)
    problems = list(run.problems)
    failed: list[str] = []
    while True:
        told = [name for name in entries_of(config) if name not in failed]
        failing = [name for name in told if any(f"{KEY}.{name}: " in text for text in problems)]
        if not failing:
            return replace(run, problems=problems)
        failed += failing
        rows = [row for row in rows if _is_scored(row, config, failed)]
        if not rows:
            return replace(run, problems=problems)
        more = [(row, text) for row, text in more if row is None or row in rows]
        config = deepcopy(config)
        silence(config, failed)
        problems += score_rows(config, rows, seconds, more).problems


def _is_scored(row: DataRow, config: Any, silent: Collection[str]) -> bool:
    """Return whether a function of the list that is not silent scores a row."""
    for name, entry in entries_of(config).items():
        if name in silent or not is_asked(entry, is_validation=row.is_validation):
            continue
        if scores_source(entry, row.source):
            return True
    return False


def _failures(run: DryRun) -> list[str]:
    """A remark for each function of the list that failed, which its `on_error` lets pass."""
    failures: Counter[str] = Counter()
    for info in run.infos:
        for note, value in (info.get(NOTES_KEY) or {}).items():
            if note.startswith(FAILED) and value:
                failures[note.removeprefix(FAILED)] += 1
    return [
        f"{KEY}.{name} failed for {count} of {len(run.infos)} made-up responses (-v shows why); a "
        "run ends if more than algorithm.gdpo.max_failed of a step fail"
        for name, count in failures.items()
    ]


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
            self.rewards = RewardMatrix.of(run.rows(), settings)
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

    def other_the_second_time(self) -> list[str]:
        """A remark if a response got another reward when it was scored a second time."""
        assert self.run.again is not None
        first = {}
        for sample, info, score in zip(
            self.run.samples, self.run.infos, self.run.scores, strict=True
        ):
            first[sample] = self._trained_on(info, score)
        again = self.run.again
        changes = []
        for sample, info, score in zip(again.samples, again.infos, again.scores, strict=True):
            now = self._trained_on(info, score)
            # A source that failed the first time has been told.
            for name, value in first.get(sample, now).items():
                if value != now[name]:
                    changes.append(
                        f"{sample.label}: {name} was {value}, and {now[name]} when the reward "
                        f"function got the same response again"
                    )
        if not self.run.problems:
            changes += [f"when scored a second time, {problem}" for problem in again.problems]
        if not changes:
            return []
        return [
            f"{changes[0]}. It depends on earlier calls or on chance: verl calls it in several "
            "processes, each of which has a memory of its own"
        ]

    def _trained_on(self, info: Mapping[str, Any], score: Any) -> dict[str, Any]:
        """Return {reward: value} of a sample, without those of weight 0."""
        if self.settings is None:
            return {"score": score}
        return {name: info.get(name) for name, weight in self.rewards.weights.items() if weight}

    def paid_failures(self, config: Any, settings: GdpoSettings) -> tuple[list[str], list[str]]:
        """Return problems and remarks of conditions that are better failed, by these values."""
        problems: list[str] = []
        remarks: list[str] = []
        known = {paid.reward for paid in paid_failures(config, settings)}
        if self.rewards.raw is None:
            return problems, remarks
        is_summed = sums_first(config.algorithm.adv_estimator, settings)
        for paid in paid_in_batch(self.rewards.raw, self.run.rows(), settings, is_summed=is_summed):
            if paid.is_default:
                problems.append(paid.message)
            elif paid.reward not in known:  # else the bounds have told it
                remarks.append(paid.message)
        return problems, remarks

    def dropped(self, functions: Collection[str] = (), silent: Collection[str] = ()) -> list[str]:
        """A remark for each name that is no reward in any response, although it looks like one.

        Args:
            functions: the names of the list's functions.
            silent: those of them that were not called.
        """
        if self.settings is None or self.settings.rewards is not None:
            return []
        known = {*self.rewards.weights, *self.settings.bounds, *ROLLOUT_FACTS, "score"}
        values = {name: value for info in self.run.infos for name, value in info.items()}
        remarks = []
        for name, value in values.items():
            if name in known or is_internal(name) or owner_of(name, functions) in silent:
                continue
            if value is None or may_be_meant(value):
                remarks.append(
                    f"{name!r} is {value!r}, and no number in any response, so it is no reward. "
                    "Return a float, or leave it out"
                )
        return remarks

    def without_signal(self, sources: Collection[str]) -> list[str]:
        """A sentence for each of these data sources in which all that is trained on is the same.

        Only where a right response was tried: wrong ones may all get the lowest reward.
        """
        sentences = []
        for source in self.lines.keys() & {*sources}:
            used = [x for x in self.lines[source] if x.weight and x.remark != NEVER_APPLIES]
            never_varies = all(line.remark == NEVER_VARIES for line in used)
            if never_varies and self._has_right_response(source):
                values = ", ".join(f"{line.reward} is {line.low:g}" for line in used)
                count = len(self.places[source])
                sentences.append(
                    f"data_source {source!r}: {values} for each of {count} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return sentences

    def cancelling(self, sources: Collection[str], adv_estimator: str) -> list[str]:
        """A sentence for each of these data sources in which rewards vary, and add up to nothing.

        So do a reward and its opposite, such as {"right": r, "wrong": 1 - r}.
        """
        if self.settings is None or adv_estimator not in ("gdpo", "grpo"):
            return []
        # The step over the batch cannot bring back what is 0 in each group.
        settings = replace(self.settings, batch_norm="none")
        if sums_first(adv_estimator, settings):
            settings = replace(settings, group_norm="summed")
        group_B = np.array([sample.row for sample in self.run.samples])
        counted_B = np.ones(len(group_B), np.bool_)
        is_0_B = scalars_of(self.rewards, counted_B, group_B, settings).S_B.numpy() == 0
        sentences = []
        for source in self.lines.keys() & {*sources}:
            here = self.places[source]
            varying = [x.reward for x in self.lines[source] if x.weight and not x.remark]
            if varying and self._has_right_response(source) and is_0_B[here].all():
                sentences.append(
                    f"data_source {source!r}: the rewards {', '.join(varying)} vary, and with "
                    f"their weights they cancel in each of {len(here)} made-up responses, so "
                    "nothing would be trained. Leave one of them out, or weigh them differently. "
                    "If real responses differ: --allow-flat"
                )
        return sentences

    def conditions_never_met(self, settings: GdpoSettings) -> list[str]:
        """A remark for each condition that no made-up response meets, right ones included."""
        remarks: list[str] = []
        if self.rewards.raw is None:
            return remarks
        has_right_N = []
        for place in self.rewards.raw.samples:
            has_right_N.append(self._has_right_response(self.run.samples[place].source))
        for name, term in settings.terms.items():
            if term.when is None:
                continue
            values_N = self.rewards.raw.values[term.when.reward][has_right_N]
            values = values_N[~np.isnan(values_N)]
            if len(values) and values.max() < term.when.at_least:
                remarks.append(
                    f"{REWARDS}.{name}: no made-up response has {term.when.reward!r} of at least "
                    f"{term.when.at_least:g}, right ones included; the highest is "
                    f"{values.max():g}. So {name!r} would count for no response"
                )
        return remarks

    def _has_right_response(self, source: str) -> bool:
        return any(self.run.samples[place].kind == RIGHT for place in self.places[source])

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
        names = dict.fromkeys(name for info in infos for name in info)
        return {
            name: _numbers(info.get(name) for info in infos)
            for name in names
            if name != "score" and not is_internal(name)
        }


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
