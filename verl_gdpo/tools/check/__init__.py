"""Checks whether a training configuration can work, without Ray or a model.

verl-gdpo check [--rows 8] [what stands behind `python -m verl.trainer.main_ppo`]

The arguments are those of the training command: `key=value`, and Hydra's --config-dir and
--config-name. The command lists all problems that it can find at once. The exit code is 1 if there
are problems.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from verl_gdpo.tools.check.compose import add_config_arguments, compose_given
from verl_gdpo.tools.check.data import DataFile, pick_rows, read_files
from verl_gdpo.tools.check.findings import Findings
from verl_gdpo.tools.check.later_refusals import what_verl_refuses
from verl_gdpo.tools.check.machine import (
    check_gpus,
    check_temporary_folder,
    missing_files,
    missing_models,
    missing_packages,
    missing_trackers,
    unusable_folders,
    what_scorers_miss,
)
from verl_gdpo.tools.check.number_keys import unusable_numbers
from verl_gdpo.tools.check.plan import Plan, make_plan
from verl_gdpo.tools.check.prompts import long_prompts
from verl_gdpo.tools.check.quiet import others_kept_away
from verl_gdpo.tools.check.steps import count_steps, what_else_to_know, why_nothing_is_trained
from verl_gdpo.tools.check.verls_rules import (
    check_environment,
    check_trainer,
    trains_critic,
    validate,
)


def check_data(findings: Findings, config: Any) -> list[list[DataFile]] | None:
    """Return the training and the validation files; None if one of them cannot be used."""
    found = [_check_files(findings, config, key) for key in ("train_files", "val_files")]
    if found[0]:
        rows = sum(file.table.num_rows for file in found[0])
        for remark in findings.ask(count_steps, config, rows) or []:
            findings.say(remark)
    return None if None in found else found  # type: ignore[return-value]


def _check_files(findings: Findings, config: Any, key: str) -> list[DataFile] | None:
    """Return the files under `data.KEY`; none if verl fetches them, None if one cannot be used."""
    before = len(findings.problems)
    files = findings.ask(read_files, config, key)
    if len(findings.problems) > before:
        return None
    if files is None:
        findings.say(f"data.{key}: not checked, because verl or your dataset class fetches it")
    for file in files or []:
        findings.say(f"data.{key}: {file.table.num_rows} rows in {file.path}")
    return files or []


def try_rewards(
    findings: Findings,
    config: Any,
    plan: Plan,
    files: list[list[DataFile]],
    options: argparse.Namespace,
    _environment: str,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    from verl_gdpo.tools.check.dry_run import score_rows
    from verl_gdpo.tools.check.text import describe, describe_scores, unused_rewards

    training, validation = files
    rows = pick_rows(training, validation, options.rows)
    if not rows:
        findings.say("there are no rows, so no reward was tried")
        return
    run = score_rows(config, rows, options.seconds)
    if run.problems and config.reward.reward_model.enable:
        for problem in run.problems:
            findings.say(f"without the reward model's server, no reward could be tried: {problem}")
        return
    findings.problems += run.problems
    if run.problems:
        return
    findings.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    if plan.settings is None:
        tables = describe_scores(run)
    else:
        tables = describe(run, plan.settings)
        if unused := unused_rewards(run, plan.settings):
            findings.say(
                f"not used: {', '.join(unused)}; algorithm.gdpo.rewards names "
                f"{', '.join(plan.settings.rewards or ())} alone"
            )
    for text in tables:
        findings.show(f"\n{text}")
    findings.show("")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl-gdpo check", description=__doc__.splitlines()[0])
    add_config_arguments(parser)
    parser.add_argument(
        "--elsewhere", action="store_true", help="the run will be on another machine, with GPUs"
    )
    parser.add_argument("--rows", type=int, default=8, help="number of rows to try the rewards on")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit for one scoring")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what verl and others print meanwhile"
    )
    options = parser.parse_args(argv)
    with others_kept_away(options.verbose) as quiet:
        findings = Findings(quiet.out)
        _ask_all(findings, options)
        if not findings.problems:
            findings.say("no problem found")
    for problem in findings.problems:
        print(f"check: {problem}", file=sys.stderr)
    if findings.problems and quiet.has_kept:
        print("(-v shows what verl and others printed meanwhile)", file=sys.stderr)
    return 1 if findings.problems else 0


def _ask_all(findings: Findings, options: argparse.Namespace) -> None:
    config = findings.ask(compose_given, options)
    if config is None:
        return
    findings.problems += unusable_numbers(config)
    if findings.problems:
        return
    findings.ask(check_temporary_folder)
    findings.problems += why_nothing_is_trained(config)
    if not options.elsewhere:
        for missing in (missing_packages, missing_trackers, missing_files, unusable_folders):
            findings.problems += missing(config)
        for remark in findings.ask(check_gpus, config) or []:
            findings.say(remark)
    files = check_data(findings, config)
    sources = {source for group in files or [] for file in group for source in file.sources}
    lacks = findings.ask(what_scorers_miss, config, sources)
    for lack in lacks or []:
        findings.say(lack)
    plan = findings.ask(make_plan, config, files[0] if files else [])
    for remark in [*(plan.remarks if plan else []), *what_else_to_know(config)]:
        findings.say(remark)
    environment = _ask_verl(findings, config, plan)
    for key, group in zip(("train_files", "val_files"), files or [], strict=False):
        for remark in findings.ask(long_prompts, config, key, group) or []:
            findings.say(remark)
    if lacks is not None:  # else each response would fail, for the same reason
        findings.ask(try_rewards, findings, config, plan, files, options, environment)


def _ask_verl(findings: Findings, config: Any, plan: Plan | None) -> str | None:
    """Let verl judge the configuration, and return the versions."""
    environment = findings.ask(check_environment, config)
    findings.problems += findings.ask(what_verl_refuses, config, environment) or []
    critic = findings.ask(trains_critic, config, environment)
    findings.problems += missing_models(config, bool(critic))
    for remark in findings.ask(validate, config, environment) or []:
        findings.say(remark)
    trainer = findings.ask(check_trainer, config, plan, environment)
    if environment and trainer:
        findings.say(f"{environment}, {trainer}")
    return environment
