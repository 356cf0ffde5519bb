"""Looks at everything of a configuration that can be looked at before a run starts."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks import verl_questions
from verl_gdpo.hooks.attention import choose
from verl_gdpo.hooks.configuration import settings_of_run, uses_gdpo_manager
from verl_gdpo.hooks.reward_workers import runs_gdpo_manager
from verl_gdpo.tools.check import data_files, machine, on_gpus, ray_start, rules
from verl_gdpo.tools.check.data_files import DataFile
from verl_gdpo.tools.check.dry_run import score_rows
from verl_gdpo.tools.check.output import WARNING, Output, message_of
from verl_gdpo.tools.check.score_tables import Tables, unused_rewards


class Plan(NamedTuple):
    settings: GdpoSettings | None  # None where verl-gdpo has no part in the run
    remarks: Sequence[str]


def look(output: Output, config: Any, options: argparse.Namespace) -> None:
    """Ask everything that can still be asked after a problem."""
    output.problems += rules.unusable_numbers(config)
    if output.problems:
        return
    if not options.elsewhere:
        _look_at_machine(output, config)
    training, validation = (_files(output, config, key) for key in ("train_files", "val_files"))
    if training:
        rows = sum(file.table.num_rows for file in training)
        output.remark(data_files.count_steps, config, rows)
    sources = {s for file in (*(training or []), *(validation or [])) for s in file.sources}
    if training and validation:
        output.warn(data_files.shared_prompts, config, training, validation)
    lacks = output.warn(machine.what_scorers_miss, config, sources)
    plan = output.ask(make_plan, config, training or [])
    output.say(plan.remarks if plan else [])
    output.warn(rules.hardly_meant, config)
    output.refuse(rules.broken_rules, config)
    environment = output.ask(machine.check_environment, config)
    if environment is None:
        return
    output.warn(machine.what_may_replace_verl)
    output.remark(choose, config)
    output.refuse(rules.unknown_names, config)
    output.refuse(machine.missing_models, config)
    output.remark(validate, config)
    if plan and (trainer := output.ask(check_trainer, config)):
        output.say(f"{environment}, {trainer}")
    _say_what_is_too_long(output, config, training or [], validation or [])
    if lacks is None or plan is None or training is None or validation is None:
        return  # each response would fail, for the same reason
    output.ask(_try_rewards, output, config, plan.settings, training, validation, options)


def _look_at_machine(output: Output, config: Any) -> None:
    output.problems += ray_start.what_ray_refuses(config) + machine.what_is_missing(config)
    if address := ray_start.other_nodes(config):
        output.say(f"GPUs and memory: not checked on the nodes of the cluster at {address}")
    else:
        count, *doubts = output.ask(on_gpus.check_gpus, config) or [""]
        output.say([count] if count else [])
        output.say(doubts, WARNING)


def _files(output: Output, config: Any, key: str) -> list[DataFile] | None:
    """Return the files under `data.KEY`; none if verl fetches them, None if one cannot be used."""
    before = len(output.problems)
    files = output.ask(data_files.read_files, config, key)
    if len(output.problems) > before:
        return None
    if files is None:
        output.say(f"data.{key}: not checked, because verl or your dataset class fetches it")
    for file in files or []:
        output.say(f"data.{key}: {file.table.num_rows} rows in {file.path}")
    return files or []


def make_plan(config: Any, training: Sequence[DataFile]) -> Plan:
    """Return the settings and what to say of them.

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
        return Plan(None, [remark])
    shown = [f.name for f in fields(settings) if f.repr and f.name != "rewards"]
    return Plan(settings, [names, ", ".join(f"{key}={getattr(settings, key)}" for key in shown)])


def _has_subclass_of_ours(config: Any) -> bool:
    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False


def validate(config: Any) -> list[str]:
    """Run verl's own validation and return the lines that it prints.

    Raises:
        Exception: the exception of verl for a wrong configuration.
    """
    printed = verl_questions.what_validation_prints(config)
    verl_questions.make_rollout_config_and_dataset_class(config)
    return printed


def check_trainer(config: Any) -> str:
    """Return the trainer's name; raise ValueError if it refuses the configuration."""
    filter_groups = OmegaConf.select(config, "algorithm.filter_groups")
    filters = bool(filter_groups and filter_groups.enable)
    if not config.trainer.get("use_v1", False):
        if filters:
            raise ValueError(
                "algorithm.filter_groups.enable=True with trainer.use_v1=False: verl's legacy "
                "trainer does not filter. Set trainer.use_v1=True, or filter_groups.enable=False"
            )
        return "legacy trainer"
    if filters and not filter_groups.metric:
        raise ValueError(
            "algorithm.filter_groups.enable=True with metric=null, which verl refuses. Set "
            "algorithm.filter_groups.metric=score; with adv_estimator=gdpo, this is its own rule"
        )
    mode = config.trainer.v1.trainer_mode
    try:
        verl_questions.make_v1_trainer(config)
    except Exception as error:
        raise ValueError(f"trainer.v1.trainer_mode={mode}: {message_of(error)}") from error
    return f"trainer {mode}"


def _say_what_is_too_long(
    output: Output, config: Any, training: Sequence[DataFile], validation: Sequence[DataFile]
) -> None:
    output.refuse(machine.too_few_positions, config)
    lengths = output.ask(data_files.measure_prompts, config, [*training, *validation])
    if lengths is None:
        return
    if lengths.of and lengths.unit != "tokens":
        remark = "prompts are counted in words, because the tokenizer is not on this machine"
        output.say(remark, WARNING)
    for key, files in (("train_files", training), ("val_files", validation)):
        output.warn(data_files.long_prompts, config, key, files, lengths)


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
        output.say("there are no rows, so no reward was tried", WARNING)
        return
    run = score_rows(config, rows, options.seconds)
    if run.problems and config.reward.reward_model.enable:
        remark = "without the reward model's server, no reward could be tried"
        output.say([f"{remark}: {problem}" for problem in run.problems], WARNING)
        return
    output.problems += run.problems
    if run.problems:
        return
    output.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    output.say(unused_rewards(run, settings), WARNING)
    tables = Tables(run, settings)
    sources = {source for file in training for source in file.sources}
    if not options.allow_flat and not rules.validates_only(config):
        output.problems += tables.without_signal(sources)
    output.say(tables.same_everywhere(), WARNING)
    for text in tables:
        output.show(f"\n{text}")
    output.show("")
