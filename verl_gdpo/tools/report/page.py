"""The page about some runs: one HTML file that needs nothing else, and a PNG for each chart."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from verl_gdpo import __version__
from verl_gdpo.batch.rows import RewardError
from verl_gdpo.run.dump_reader import dumps_to_read
from verl_gdpo.run.findings import Finding, findings
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.tools.advice import HEADER, LEGEND, TITLE, Description, describe
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.plots import draw
from verl_gdpo.tools.report.charts import collapse, influence, length, rewards, saturation
from verl_gdpo.tools.report.examples import (
    KINDS,
    MEANING,
    ExampleGroup,
    example_groups,
    settings_of,
)
from verl_gdpo.tools.report.intervals import table_of_differences
from verl_gdpo.tools.report.runs import RunsOfArm, read_arms
from verl_gdpo.tools.report.sections import Chart, Section, Table, without_empty_charts
from verl_gdpo.tools.report.tables import (
    differences,
    inputs,
    named_rewards,
    results,
    runs,
    starts,
    warnings,
)

PROMPT_CHARACTERS = 1200  # its end is shown: before it there may be pages of tools
RESPONSE_CHARACTERS = 2500  # its start
FINDINGS_SHOWN = 4  # the others can be opened, so that the questions stay on the first screen


@dataclass(frozen=True)
class Page:
    title: str
    several: bool  # runs of an arm, so that there are bands to explain
    warnings: Sequence[str]
    findings: Sequence[tuple[str, Finding]]  # with the name of the run
    unchecked: Sequence[str]  # names of runs without the metrics that most findings need
    tables: Sequence[Table]
    sections: Sequence[Section]
    examples: Mapping[str, Sequence[ExampleGroup] | str]  # by arm; a text says why there are none
    advice: Mapping[str, Description | str]  # the same


def build_page(
    sources: Sequence[Path | str],
    configs: Sequence[Path] = (),
    rollouts: Sequence[Path] = (),
    scorer: Scorer | None = None,
    arm_of: Mapping[Path | str, str] = MappingProxyType({}),
) -> Page:
    """Read the runs and put the page together; `read_arms` says what the arguments are.

    Raises:
        ValueError: a run cannot be read; see `read_arms`.
    """
    arms = read_arms(sources, configs, rollouts, scorer, arm_of)
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
    sections = [make(arms) for make in (rewards, influence, saturation, length, collapse)]
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


def write(page: Page, out: Path) -> Path:
    """Write `out/index.html` and the pictures; return the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    for chart in (chart for section in page.sections for chart in section.charts):
        names[chart.name] = _file_name(chart.name, set(names.values()))
        draw([chart.panel], out / f"{names[chart.name]}.png")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"signed": signed, "prompt_end": prompt_end, "start": response_start}
    environment.filters["with_code"] = with_code
    template = (files("verl_gdpo.tools.report") / "page.html.jinja").read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        page=page,
        kinds=KINDS,
        meaning=MEANING,
        picture=_picture,
        version=__version__,
        findings_shown=FINDINGS_SHOWN,
        advice_title=TITLE,
        advice_header=HEADER,
        advice_legend=LEGEND,
    )
    index = out / "index.html"
    # a response may hold half a surrogate pair
    index.write_text(text, encoding="utf-8", errors="replace")
    return index


def signed(value: float, digits: int = 2) -> str:
    """`+0.87`, and 0 without a sign."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def with_code(text: str) -> Markup:
    """What is between backticks as code; the text is escaped."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def prompt_end(text: str) -> str:
    return _cut(text, text[-PROMPT_CHARACTERS:], "[{} more characters before] ", before=True)


def response_start(text: str) -> str:
    return _cut(text, text[:RESPONSE_CHARACTERS], " [{} more characters]", before=False)


def _cut(text: str, kept: str, note: str, before: bool) -> str:
    if len(kept) == len(text):
        return text
    said = note.format(len(text) - len(kept))
    return said + kept if before else kept + said


def _file_name(name: str, taken: set[str]) -> str:
    """A name of a file, unlike those taken; a reward may be called anything."""
    plain = re.sub(r"[^\w.-]+", "-", name)
    number, result = 1, plain
    while result in taken:
        number += 1
        result = f"{plain}-{number}"
    return result


def _picture(chart: Chart, theme: str) -> str:
    """The chart as the data of an SVG image."""
    buffer = BytesIO()
    draw([chart.panel], buffer, format="svg", theme="dark" if theme == "dark" else "light")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
