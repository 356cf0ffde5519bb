"""The page about some runs: one HTML file that needs nothing else."""

import base64
import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from verl_gdpo import __version__
from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.atomic import replace_together
from verl_gdpo.tools.advice import (
    CAPTION,
    FIRST_STEPS,
    HEADER,
    LEGEND,
    TITLE,
    WEIGHTS,
    Description,
    Evidence,
    describe,
)
from verl_gdpo.tools.report.charts import Chart, Section, as_data, chart_of, sections
from verl_gdpo.tools.report.colours import ON_BLACK, ON_WHITE, variables
from verl_gdpo.tools.report.examples import ExampleGroup, example_groups, read_step, settings_of
from verl_gdpo.tools.report.runs import (
    Run,
    RunsOfArm,
    last_common_step,
    read_arms,
    without_stopped,
)
from verl_gdpo.tools.report.tables import Table, differing_keys, results, table_of_differences
from verl_gdpo.tools.run.starts import RecordedStart, starts_of
from verl_gdpo.tools.run_folder.dump_reader import Scorer
from verl_gdpo.tools.run_folder.findings import findings

T = TypeVar("T")
CHARACTERS = 1500  # of one text
ENOUGH = 30  # logged steps, for most rules
MANAGER = "reward.reward_manager.name=gdpo"


class Remark(NamedTuple):
    """One thing that a reader should know; `chart` shows it, from step `first` to `last`."""

    text: str
    advice: str = ""
    chart: str = ""
    first: int = 0
    last: int = 0
    is_over: bool = False


class Wording(NamedTuple):
    """The words around the advice."""

    title: str
    caption: str
    header: Sequence[str]
    legend: str
    weights: str


@dataclass(frozen=True)
class Page:
    title: str
    headline: str
    arms: Sequence[RunsOfArm]
    remarks: Sequence[Remark]
    sections: Sequence[Section]  # the first one is the first screen
    advice: Mapping[str, Description | str]  # of the first run of each arm, or why there is none
    tables: Sequence[Table]
    examples: Mapping[str, Sequence[ExampleGroup] | str]  # by arm; a text says why there are none
    replay_line: str = ""  # a command to paste; "" where no run has what it needs
    end: int = 0  # the step of the numbers in legends and results


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
    if len(members) == 1:
        title = members[0].name
    else:
        title = ", ".join(arm.name for arm in arms)
    page_sections = sections(arms)
    remarks_of_runs = all_remarks(members, _charts_of(page_sections))
    compared, stopped = without_stopped(arms)
    remarks = [Remark(text) for text in stopped.values()] + remarks_of_runs
    tables = (results(compared), table_of_differences(compared), differing_keys(arms))
    return Page(
        title=title,
        headline=headline(remarks, members),
        arms=arms,
        remarks=remarks,
        sections=page_sections,
        advice={arm.name: _or_why(_advice, arm.runs[0]) for arm in arms},
        tables=[table for table in tables if table],
        examples={arm.name: _or_why(example_groups, arm.runs[0]) for arm in arms},
        replay_line=_replay_line(members),
        end=last_common_step(compared),
    )


def _charts_of(page_sections: Sequence[Section]) -> list[Chart]:
    charts: list[Chart] = []
    for section in page_sections:
        charts += section.charts
    return charts


def _replay_line(members: Sequence[Run]) -> str:
    """Return a command that shows what twice the weight of a reward would change."""
    for run in members:
        # Other names would need the quotes of Hydra.
        names = [name for name in run.named_rewards if name.isidentifier()]
        if names and run.rollouts is not None:
            # In the run's folder, replay finds its settings too.
            is_inside = run.rollouts.is_relative_to(run.folder)
            folder = shlex.quote(str(run.folder if is_inside else run.rollouts))
            return f"verl-gdpo replay {folder} algorithm.gdpo.rewards.{names[0]}=2"
    return ""


def all_remarks(members: Sequence[Run], charts: Sequence[Chart]) -> list[Remark]:
    """What is said of the runs; what is over comes last."""
    remarks: list[Remark] = []
    for run in members:
        who = f"{run.name}: " if len(members) > 1 else ""
        remarks += _of_run(run, charts, who)
    return sorted(remarks, key=lambda remark: remark.is_over)


def _of_run(run: Run, charts: Sequence[Chart], who: str) -> Iterator[Remark]:
    """What is said of one run; each remark begins with `who`."""
    starts: list[RecordedStart] = []
    if run.folder.is_dir():
        try:
            starts = starts_of(run.folder)
        except ValueError as error:
            # A manifest is damaged. The metrics are not, so the page is written all the same.
            yield Remark(f"{who}{error}")
    if starts and starts[-1].end.get("exit_code"):
        why = starts[-1].end.get("why")
        yield Remark(f"{who}the training stopped at step {run.last_step}: {why}")
    for finding in findings(run.metrics):
        chart = chart_of(finding, charts)
        yield Remark(
            text=who + finding.what,
            advice=finding.advice,
            chart=chart.id if chart else "",
            first=finding.first,
            last=finding.last,
            is_over=finding.is_over,
        )


def headline(remarks: Sequence[Remark], members: Sequence[Run]) -> str:
    """How many problems were found, and in what they were looked for."""
    steps = _steps_of(members)
    if remarks:
        return _count_problems(remarks, steps)
    text = f"No problem found in {steps}"
    if min(map(_count_steps, members)) < ENOUGH:
        text += f"; most rules need {ENOUGH}"
    unchecked = ", ".join(run.name for run in members if not run.named_rewards)
    if unchecked:
        text += f". The rewards of {unchecked} were not looked at one by one: that needs {MANAGER}"
    return text


def _count_problems(remarks: Sequence[Remark], steps: str) -> str:
    count = "1 problem" if len(remarks) == 1 else f"{len(remarks)} problems"
    text = f"{count} found in {steps}"
    over = sum(remark.is_over for remark in remarks)
    if over == 1:
        text += ", of which 1 is over"
    elif over > 1:
        text += f", of which {over} are over"
    return text


def _steps_of(members: Sequence[Run]) -> str:
    """How many steps there are, as in "60 steps" or "2 runs of 10 to 11 steps"."""
    fewest = min(map(_count_steps, members))
    most = max(map(_count_steps, members))
    text = f"{fewest} to {most}" if fewest < most else str(most)
    text += " step" if most == 1 else " steps"
    if len(members) == 1:
        return text
    return f"{len(members)} runs of {text}"


def _count_steps(run: Run) -> int:
    return sum(step > 0 for step in run.metrics)


def _advice(run: Run) -> Description:
    settings = settings_of(run)
    steps = [read_step(file, run, settings).rewards for file in run.dumps()[:FIRST_STEPS]]
    return describe(Evidence(steps, settings), run.config)


def _or_why(make: Callable[[Run], T], run: Run) -> T | str:
    """What is made of a run's dumps, or why it is not."""
    try:
        return make(run)
    except (ValueError, RewardError) as error:
        return str(error)


def write(page: Page, out: Path) -> Path:
    """Write `out/index.html`, and return its path; a page that is there stays whole until then.

    Raises:
        OSError: the file cannot be written there.
    """
    template = _environment().from_string(_file("page.html.jinja"))
    script = _file("uplot/uPlot.iife.min.js") + "\n" + _file("page.js")
    style = _file("uplot/uPlot.min.css") + "\n" + _looks() + "\n" + _file("page.css")
    text = template.render(
        page=page,
        data=as_data(_charts_of(page.sections), page.end),
        script=Markup(script),
        sum=_sum_of(script),
        style=Markup(style),
        version=__version__,
        advice=Wording(title=TITLE, caption=CAPTION, header=HEADER, legend=LEGEND, weights=WEIGHTS),
    )
    index = out / "index.html"
    with replace_together(index) as (temporary,):
        # A response may hold half a surrogate pair, which UTF-8 cannot write.
        temporary.write_text(text, encoding="utf-8", errors="replace")
    return index


def _environment() -> Environment:
    """What renders the template: texts are escaped, and a name that is not there raises."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "signed": signed,
        "end": prompt_end,
        "start": response_start,
        "with_interval": with_interval,
    }
    return environment


def _sum_of(script: str) -> str:
    """SHA-256 of the script, which the page's policy names.

    So a browser runs nothing else, whatever a run's texts hold.
    """
    digest = hashlib.sha256(script.encode()).digest()
    return base64.b64encode(digest).decode()


def _looks() -> str:
    """The colours of the lines, for a light and a dark screen."""
    light = f":root {{ {variables(ON_WHITE)} }}"
    dark = f":root {{ {variables(ON_BLACK)} }}"
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"


def with_interval(cell: str) -> Markup:
    """A share with its interval, which is not broken over lines."""
    share, bracket, interval = cell.partition(" [")
    if not bracket:
        return escape(cell)
    return Markup('{} <span class="interval">[{}</span>').format(share, interval)


def _file(name: str) -> str:
    return (files("verl_gdpo.tools.report") / name).read_text(encoding="utf-8")


def signed(value: float, digits: int = 2) -> str:
    """`+0.87`, and 0 without a sign."""
    rounded = round(value, digits)
    if rounded == 0:
        return f"{0:.{digits}f}"
    return f"{rounded:+.{digits}f}"


def prompt_end(text: str) -> str:
    """The last `CHARACTERS` of a prompt: before them there may be pages of tools."""
    cut = len(text) - CHARACTERS
    if cut <= 0:
        return text
    return f"[{cut} more characters before] {text[cut:]}"


def response_start(text: str) -> str:
    """The first `CHARACTERS` of a response."""
    cut = len(text) - CHARACTERS
    if cut <= 0:
        return text
    return f"{text[:CHARACTERS]} [{cut} more characters]"
