"""Arms of runs for a report, without files."""

from pathlib import Path

from verl_gdpo.tools.report.runs import Run, RunsOfArm


def made_arm(name, *metrics_of_runs, configs=None):
    """An arm with a run for each {step: {metric: value}}."""
    configs = configs or [None] * len(metrics_of_runs)
    numbered = enumerate(zip(metrics_of_runs, configs, strict=True))
    return RunsOfArm(name, [Run(Path(f"{name}{i}"), *given) for i, given in numbered])
