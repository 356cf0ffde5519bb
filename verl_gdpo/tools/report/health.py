"""The first line of the page: healthy, look at this, or broken, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl_gdpo.run.console import ASKED
from verl_gdpo.run.findings import findings
from verl_gdpo.run.folder import SCORE
from verl_gdpo.run.starts import TIME_LIMIT_EXIT, starts_of
from verl_gdpo.tools.report.arms import RunsOfArm, ends_apart
from verl_gdpo.tools.report.charts import Chart, chart_of
from verl_gdpo.tools.report.runs import Run

LEVELS = BROKEN, LOOK, NOTE, HEALTHY = "broken", "look at this", "note", "healthy"
# topics of findings that end what a training is for, as long as they hold
BREAKS = ("no number", "gradient", "entropy", "aborted", "collapse")
ENOUGH = 20  # steps, for most rules
# exit codes of what somebody asked for: a time limit, or one of the signals that ask
WANTED = (TIME_LIMIT_EXIT, *(128 + number for number in ASKED))


@dataclass(frozen=True)
class Remark:
    """One thing that a reader should know; `chart` shows it, from step `first` to `last`."""

    level: str
    text: str
    advice: str = ""
    chart: str = ""
    first: int = 0
    last: int = 0
    is_over: bool = False


def all_remarks(arms: Sequence[RunsOfArm], charts: Sequence[Chart]) -> list[Remark]:
    """What is said of the runs, the worst first."""
    runs = [run for arm in arms for run in arm.runs]
    remarks = [*_of_arms(arms)]
    for run in runs:
        remarks += _of_run(run, charts, f"{run.name}: " if len(runs) > 1 else "")
    return sorted(remarks, key=lambda remark: LEVELS.index(remark.level))


def verdict(remarks: Sequence[Remark], arms: Sequence[RunsOfArm]) -> tuple[str, str]:
    """(level, why)."""
    serious = [remark for remark in remarks if remark.level in (BROKEN, LOOK)]
    if serious:
        more = f"; {len(serious) - 1} more below" if serious[1:] else ""
        return serious[0].level, serious[0].text + more
    runs = [run for arm in arms for run in arm.runs]
    steps = min(run.last_step for run in runs)
    few = "" if steps >= ENOUGH else ", which are too few for most rules"
    unchecked = [run.name for run in runs if not named_rewards(run)]
    more = f"; without the metrics of verl-gdpo, no rule on each reward sees {', '.join(unchecked)}"
    return HEALTHY, f"no rule finds anything in {steps} steps{few}" + (more if unchecked else "")


def _of_run(run: Run, charts: Sequence[Chart], who: str) -> Iterator[Remark]:
    starts = starts_of(run.folder) if run.folder.is_dir() else []
    end = starts[-1].end if starts else {}
    if code := end.get("exit_code"):
        level = LOOK if code in WANTED else BROKEN
        yield Remark(level, f"{who}the training stopped at step {run.last_step}: {end.get('why')}")
    for finding in findings(run.metrics):
        breaks = finding.topic.startswith(BREAKS) and not finding.is_over
        chart = chart_of(finding, charts)
        yield Remark(
            BROKEN if breaks else LOOK,
            who + finding.what,
            finding.advice,
            chart.id if chart else "",
            finding.first,
            finding.last,
            finding.is_over,
        )


def _of_arms(arms: Sequence[RunsOfArm]) -> Iterator[Remark]:
    """What to know before two lines are compared."""
    alone = [arm.name for arm in arms if len(arm.runs) == 1]
    if len(arms) > 1 and alone:
        who = "One run per arm" if len(alone) == len(arms) else f"One run of {', '.join(alone)}"
        yield Remark(NOTE, f"{who}: differences may be chance")
    if apart := ends_apart(arms):
        ends_at = "; ".join(
            f"{arm.name} at {', '.join(map(str, sorted({run.last_step for run in arm.runs})))}"
            for arm in arms
        )
        yield Remark(
            LOOK,
            f"the runs end at different steps ({ends_at})",
            f"Results and differences are{apart}; the lines go on beyond it, over fewer runs",
        )


def named_rewards(run: Run) -> list[str]:
    """The rewards in the metrics of training, which only verl-gdpo logs one by one."""
    return [name for name in run.trained if name != SCORE]
