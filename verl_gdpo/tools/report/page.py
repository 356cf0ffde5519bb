"""The page about some runs: one HTML file that needs nothing else."""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from verl_gdpo import __version__
from verl_gdpo.algorithm.samples import RewardError
from verl_gdpo.run.folder import gaps
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.tools.advice import TITLE, describe
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.report.arms import RunsOfArm, read_arms
from verl_gdpo.tools.report.charts import Section, as_data, sections
from verl_gdpo.tools.report.examples import ExampleGroup, example_groups, settings_of
from verl_gdpo.tools.report.health import Remark, all_remarks, verdict
from verl_gdpo.tools.report.intervals import table_of_differences
from verl_gdpo.tools.report.runs import Run
from verl_gdpo.tools.report.tables import Table, differences, inputs, results, runs, starts

T = TypeVar("T")
TEXTS = 400_000  # characters of all examples of a page
CHARACTERS = 2500  # of one text, where there are few
FEWEST_CHARACTERS = 200


@dataclass(frozen=True)
class Page:
    title: str
    arms: Sequence[RunsOfArm]
    level: str
    why: str
    remarks: Sequence[Remark]
    sections: Sequence[Section]  # the first one is the first screen
    advice: Mapping[str, str]  # {sentence: the arms of whose first runs it is true}
    tables: Sequence[Table]
    examples: Mapping[str, Sequence[ExampleGroup] | str]  # by arm; a text says why there are none
    made_of: Sequence[Table]
    gaps: Sequence[str]


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
    members = [run for arm in arms for run in arm.runs]
    page_sections = sections(arms)
    remarks = all_remarks(arms, [chart for section in page_sections for chart in section.charts])
    level, why = verdict(remarks, arms)
    tables = results(arms), table_of_differences(arms), differences(arms)
    made_of = inputs(arms), runs(arms), starts(arms)
    return Page(
        title=members[0].name if len(members) == 1 else ", ".join(arm.name for arm in arms),
        arms=arms,
        level=level,
        why=why,
        remarks=remarks,
        sections=page_sections,
        advice=_advice(arms),
        tables=[table for table in tables if table],
        examples={arm.name: _or_why(example_groups, arm.runs[0]) for arm in arms},
        made_of=[table for table in made_of if table],
        gaps=[f"{run.name}: {gap}" for run in members for gap in gaps(run.metrics)],
    )


def _advice(arms: Sequence[RunsOfArm]) -> dict[str, str]:
    """What GDPO would change, or why it is not known."""
    arms_of: dict[str, list[str]] = {}
    for arm in arms:
        advice = _or_why(_sentences, arm.runs[0])
        for sentence in [advice] if isinstance(advice, str) else advice:
            arms_of.setdefault(sentence, []).append(arm.name)
    return {sentence: ", ".join(names) for sentence, names in arms_of.items()}


def _sentences(run: Run) -> list[str]:
    return [describe(Evidence.of_dumps(run.dumps(), settings_of(run), run.scorer)).advice]


def _or_why(make: Callable[[Run], T], run: Run) -> T | str:
    """What is made of a run's dumps, or why it is not."""
    try:
        return make(run)
    except (ValueError, RewardError) as error:
        return str(error)


def write(page: Page, out: Path) -> Path:
    """Write `out/index.html`, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    texts = [groups for groups in page.examples.values() if not isinstance(groups, str)]
    count = sum(len(group.rollouts) + 2 for groups in texts for group in groups)
    most = min(max(TEXTS // max(count, 1), FEWEST_CHARACTERS), CHARACTERS)
    environment.filters |= {"signed": signed, "with_code": with_code}
    environment.filters |= {"end": lambda text: prompt_end(text, most)}
    environment.filters |= {"start": lambda text: response_start(text, most)}
    script = _file("uplot/uPlot.iife.min.js") + "\n" + _file("page.js")
    text = environment.from_string(_file("page.html.jinja")).render(
        page=page,
        data=as_data([chart for section in page.sections for chart in section.charts]),
        script=Markup(script),
        # nothing else runs, whatever a run's texts hold
        sum=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_file("uplot/uPlot.min.css") + "\n" + _file("page.css")),
        version=__version__,
        advice_title=TITLE,
    )
    index = out / "index.html"
    # a response may hold half a surrogate pair
    index.write_text(text, encoding="utf-8", errors="replace")
    return index


def _file(name: str) -> str:
    return (files("verl_gdpo.tools.report") / name).read_text(encoding="utf-8")


def signed(value: float, digits: int = 2) -> str:
    """`+0.87`, and 0 without a sign."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def with_code(text: str) -> Markup:
    """What is between backticks as code; the text is escaped."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def prompt_end(text: str, most: int = CHARACTERS) -> str:
    """Its end: before it there may be pages of tools."""
    cut = len(text) - most
    return f"[{cut} more characters before] {text[cut:]}" if cut > 0 else text


def response_start(text: str, most: int = CHARACTERS) -> str:
    cut = len(text) - most
    return f"{text[:most]} [{cut} more characters]" if cut > 0 else text
