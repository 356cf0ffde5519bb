"""From run folders to everything that the page shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_gdpo.batch.rows import RewardError
from verl_gdpo.run.dump_reader import dump_files
from verl_gdpo.run.findings import findings
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.advice.text import Description, describe
from verl_gdpo.tools.report.charts import length, rewards, validation
from verl_gdpo.tools.report.examples import ExampleGroup, example_groups, settings_of
from verl_gdpo.tools.report.intervals import table_of_differences
from verl_gdpo.tools.report.page import Page
from verl_gdpo.tools.report.runs import RunsOfArm, read_arms
from verl_gdpo.tools.report.signal_charts import collapse, influence
from verl_gdpo.tools.report.tables import differences, results, runs, warnings


def build_page(folders: Sequence[Path]) -> Page:
    """Read the runs and put the page together.

    Raises:
        ValueError: a folder is no run's; see `read_arms`.
    """
    arms = read_arms(folders)
    names = ", ".join(arm.name for arm in arms)
    single = len(arms) == 1 and len(arms[0].runs) == 1
    title = f"Run {folders[0].resolve().name}" if single else f"Comparison: {names}"
    tables = (results(arms), table_of_differences(arms), runs(arms), differences(arms))
    return Page(
        title=title,
        several=any(len(arm.runs) > 1 for arm in arms),
        warnings=warnings(arms),
        findings=[
            (run.folder.resolve().name, finding)
            for arm in arms
            for run in arm.runs
            for finding in findings(run.metrics)
        ],
        tables=[table for table in tables if table],
        sections=[
            rewards(arms),
            validation(arms),
            length(arms),
            collapse(arms),
            influence(arms),
        ],
        examples={arm.name: _examples(arm) for arm in arms},
        advice={arm.name: _advice(arm) for arm in arms},
    )


def _advice(arm: RunsOfArm) -> Description | str:
    """Of the arm's first run; or why there is none."""
    run = arm.runs[0]
    try:
        settings = replace(settings_of(run), bounds=run.bounds)
        return describe(Evidence.of_dumps(dump_files(run.folder)[0], settings))
    except (ValueError, RewardError) as error:
        return str(error)


def _examples(arm: RunsOfArm) -> list[ExampleGroup] | str:
    """Of the arm's first run; or why there are none."""
    try:
        return example_groups(arm.runs[0])
    except (ValueError, RewardError) as error:
        return str(error)
