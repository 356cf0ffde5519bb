"""Looks at everything of a configuration that can be looked at before a run starts."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks import verl_questions
from verl_gdpo.hooks.attention import choose
from verl_gdpo.hooks.configuration import settings_of_run, uses_gdpo_manager
from verl_gdpo.hooks.reward_workers import runs_gdpo_manager
from verl_gdpo.tools.check import data_files, machine, rules
from verl_gdpo.tools.check.data_files import DataFile
from verl_gdpo.tools.check.dry_run import score_rows
from verl_gdpo.tools.check.output import Output, message_of
from verl_gdpo.tools.check.score_tables import ScoreTables


def look(output: Output, config: Any, options: argparse.Namespace) -> None:
    """Ask everything that can still be asked after a problem."""
    output.problems += rules.unusable_numbers(config)
    if output.problems:
        return
    if not options.elsewhere:
        output.refuse(machine.what_is_missing, config)
        output.warn(machine.check_gpus, config)
    training, validation = (_files(output, config, key) for key in ("train_files", "val_files"))
    if training:
        rows = sum(file.table.num_rows for file in training)
        output.remark(data_files.count_steps, config, rows)
    sources = {s for file in (*(training or []), *(validation or [])) for s in file.sources}
    if training and validation:
        output.warn(data_files.shared_prompts, config, training, validation)
    lacks = output.ask(machine.what_scorers_miss, config, sources)
    output.say(lacks, is_warning=True)
    plan = output.ask(make_plan, config, training or [])
    output.say(plan[1] if plan else [])
    output.warn(rules.hardly_meant, config)
    output.refuse(rules.broken_rules, config)
    environment = output.ask(machine.check_environment, config)
    if environment is None:
        return
    output.remark(choose, config)
    output.refuse(rules.unknown_names, config)
    output.refuse(machine.missing_models, config)
    output.remark(verl_questions.what_validation_prints, config)
    output.ask(verl_questions.make_rollout_config_and_dataset_class, config)
    if plan and (trainer := output.ask(check_trainer, config)):
        output.say(f"{environment}, {trainer}")
    _say_what_is_too_long(output, config, training or [], validation or [])
    if lacks is None or plan is None or training is None or validation is None:
        return  # each response would fail, for the same reason
    output.ask(_try_rewards, output, config, plan[0], training, validation, options)


def _files(output: Output, config: Any, key: str) -> list[DataFile] | None:
    """Return the files under `data.KEY`; none if verl fetches them, None if one cannot be used."""
    try:
        files = data_files.read_files(config, key)
    except Exception as error:
        output.problems.append(message_of(error))
        return None
    if files is None:
        output.say(f"data.{key}: not checked, because verl or your dataset class fetches it")
    for file in files or []:
        output.say(f"data.{key}: {file.table.num_rows} rows in {file.path}")
    return files or []


def make_plan(config: Any, training: Sequence[DataFile]) -> tuple[GdpoSettings | None, list[str]]:
    """Return the settings, None where verl-gdpo has no part in the run, and what to say of them.

    The settings have the bounds that the scorers of the training rows declare.

    Raises:
        ValueError: a setting cannot work; the message says why and what to set instead.
    """
    sources = dict.fromkeys(source for file in training for source in file.sources)
    has_manager = uses_gdpo_manager(config) or _has_subclass_of_ours(config)
    settings = settings_of_run(config, sources or None, has_manager=has_manager)
    names = (
        f"adv_estimator={config.algorithm.adv_estimator}, "
        f"reward_manager={config.reward.reward_manager.name}"
    )
    if settings is None:
        remark = (
            f"{names}: both are verl's own, so verl-gdpo has no part in this run, which trains on "
            "one score of each response. For GDPO: algorithm.adv_estimator=gdpo "
            "reward.reward_manager.name=gdpo"
        )
        return None, [remark]
    shown = [f.name for f in fields(settings) if f.repr and f.name != "rewards"]
    return settings, [names, ", ".join(f"{key}={getattr(settings, key)}" for key in shown)]


def _has_subclass_of_ours(config: Any) -> bool:
    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False


def check_trainer(config: Any) -> str:
    """Return the trainer's name; raise ValueError if it refuses the configuration."""
    if not config.trainer.get("use_v1", False):
        if OmegaConf.select(config, "algorithm.filter_groups.enable"):
            raise ValueError(
                "algorithm.filter_groups.enable=True with trainer.use_v1=False: verl's legacy "
                "trainer does not filter. Set trainer.use_v1=True, or filter_groups.enable=False"
            )
        return "legacy trainer"
    mode = config.trainer.v1.trainer_mode
    try:
        verl_questions.make_v1_trainer(config)
    except Exception as error:
        raise ValueError(f"trainer.v1.trainer_mode={mode}: {message_of(error)}") from error
    return f"trainer {mode}"


def _say_what_is_too_long(
    output: Output, config: Any, training: Sequence[DataFile], validation: Sequence[DataFile]
) -> None:
    files = {"train_files": training, "val_files": validation}
    lengths = output.ask(data_files.measure_prompts, config, [*training, *validation])
    if lengths == {} and (training or validation):
        remark = "prompts are not counted in tokens, because the tokenizer is not on this machine"
        output.say(remark, is_warning=True)
    for key, of_key in files.items() if lengths else ():
        output.warn(data_files.long_prompts, config, key, of_key, lengths)


def _try_rewards(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    training: Sequence[DataFile],
    validation: Sequence[DataFile],
    options: argparse.Namespace,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    rows = data_files.pick_rows(training, validation, options.rows)
    if not rows:
        output.say("there are no rows, so no reward was tried", is_warning=True)
        return
    run = score_rows(config, rows, options.seconds)
    if run.problems and config.reward.reward_model.enable:
        remark = "without the reward model's server, no reward could be tried"
        output.say([f"{remark}: {problem}" for problem in run.problems], is_warning=True)
        return
    output.problems += run.problems
    if run.problems:
        return
    output.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    tables = ScoreTables(run, settings)
    sources = {source for file in training for source in file.sources}
    if not options.allow_flat and not rules.validates_only(config):
        output.problems += tables.without_signal(sources)
    output.say(tables.same_everywhere(), is_warning=True)
    for text in tables:
        output.show(f"\n{text}")
    output.show("")
