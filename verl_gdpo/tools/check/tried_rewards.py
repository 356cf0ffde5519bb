"""Tries the reward functions on made-up responses, and says what their values cannot train.

`made_up_responses.py` makes the responses, `dry_run.py` scores them, and `reward_tables.py` looks
at their rewards.
"""

import argparse
from collections import Counter
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import FAILED, NOTES_KEY
from verl_gdpo.hooks.configuration import unnamed_rewards
from verl_gdpo.scoring.function_list import (
    KEY,
    entries_of,
    is_asked,
    limited_functions,
    scores_source,
    silence,
    tells_validation_apart,
    validation_settings,
)
from verl_gdpo.scoring.reward_functions import check_judges, reward_functions
from verl_gdpo.tools.check import asked, data_files, rules
from verl_gdpo.tools.check.data_files import DataFile, DataRow, Responses
from verl_gdpo.tools.check.dry_run import DryRun, score_rows
from verl_gdpo.tools.check.output import Output
from verl_gdpo.tools.check.reward_tables import RewardTables


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
        if options.elsewhere:
            check_judges(config)
        else:
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
    if not run.problems and not is_apart:
        # A function may look for a field that only the training rows have.
        unlike = data_files.rows_with_other_fields(training, validation)
        unlike = [row for row in unlike if not silent or _is_scored(row, config, silent)]
        if unlike:
            output.problems += score_rows(config, unlike, options.seconds, []).problems
    if not run.samples:
        return
    output.note(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    output.warnings += _failures(run)
    output.problems += asked.what_filters_lack(config, run.infos, silent)
    untold = []
    for name, entry in entries_of(config).items():
        is_untold = name in silent or entry["group"]
        if is_untold and is_asked(entry, is_validation=False):
            untold.append(name)
    tables = RewardTables(run, settings, untold)
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
        tables = RewardTables(run, validation_settings(config, settings))
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
