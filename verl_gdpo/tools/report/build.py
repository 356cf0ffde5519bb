"""From run folders to everything that the page shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl_gdpo.batch.rows import RewardError
from verl_gdpo.run.dump_reader import dumps_to_read
from verl_gdpo.run.findings import findings
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.advice.text import Description, describe
from verl_gdpo.tools.report.charts import length, rewards, validation
from verl_gdpo.tools.report.examples import ExampleGroup, example_groups, settings_of
from verl_gdpo.tools.report.inputs import inputs, named_rewards
from verl_gdpo.tools.report.intervals import table_of_differences
from verl_gdpo.tools.report.page import Page
from verl_gdpo.tools.report.runs import RunsOfArm, read_arms
from verl_gdpo.tools.report.sections import without_empty_charts
from verl_gdpo.tools.report.signal_charts import collapse, influence, saturation
from verl_gdpo.tools.report.tables import differences, results, runs, starts, warnings
from verl_gdpo.tools.report.what_if import weights, what_if_of_arms


def build_page(
    sources: Sequence[Path | str],
    configs: Sequence[Path] = (),
    rollouts: Sequence[Path] = (),
    scorer: Scorer | None = None,
) -> Page:
    """Read the runs and put the page together; `read_arms` says what the arguments are.

    Raises:
        ValueError: a run cannot be read; see `read_arms`.
    """
    arms = read_arms(sources, configs, rollouts, scorer)
    names = ", ".join(arm.name for arm in arms)
    single = len(arms) == 1 and len(arms[0].runs) == 1
    title = f"Run {arms[0].runs[0].name}" if single else f"Comparison: {names}"
    tables = (
        results(arms),
        table_of_differences(arms),
        runs(arms),
        differences(arms),
        starts(arms),
        inputs(arms),
    )
    what_if = what_if_of_arms(arms)
    sections = [
        rewards(arms),
        validation(arms),
        influence(arms),
        saturation(arms),
        weights(arms, what_if),
        length(arms, what_if),
        collapse(arms),
    ]
    return Page(
        title=title,
        several=any(len(arm.runs) > 1 for arm in arms),
        warnings=warnings(arms),
        findings=[
            (run.name, finding)
            for arm in arms
            for run in arm.runs
            for finding in findings(run.metrics)
        ],
        unchecked=[run.name for arm in arms for run in arm.runs if not named_rewards(run)],
        tables=[table for table in tables if table],
        sections=[*map(without_empty_charts, sections)],
        examples={arm.name: _examples(arm) for arm in arms},
        advice={arm.name: _advice(arm) for arm in arms},
    )


def _advice(arm: RunsOfArm) -> Description | str:
    """Of the arm's first run; or why there is none."""
    run = arm.runs[0]
    try:
        settings = replace(settings_of(run), bounds=run.bounds)
        return describe(Evidence.of_dumps(dumps_to_read(run.dumps()), settings, run.scorer))
    except (ValueError, RewardError) as error:
        return str(error)


def _examples(arm: RunsOfArm) -> list[ExampleGroup] | str:
    """Of the arm's first run; or why there are none."""
    try:
        return example_groups(arm.runs[0])
    except (ValueError, RewardError) as error:
        return str(error)
