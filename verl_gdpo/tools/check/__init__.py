"""Says whether a training configuration can work, before anything starts: no Ray, no GPU, no model.

verl-gdpo check [--config-dir FOLDER] [--config-name train] [--rows 8] [key=value ...]

The overrides are those of the training run. Everything that can be found wrong independently is
listed; the exit code is 1 then.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import verl_gdpo
from verl_gdpo.settings.algorithm import GdpoSettings, settings_of_run, uses_gdpo_manager
from verl_gdpo.tools.check.data import DataFile, count_steps, pick_rows, read_files
from verl_gdpo.tools.check.machine import (
    check_device,
    check_model,
    check_temporary_folder,
    what_scorers_miss,
)
from verl_gdpo.tools.check.report import Report, message_of
from verl_gdpo.tools.recipes import FOLDER


def compose_config(config_dir: Path, config_name: str, overrides: list[str]) -> Any:
    """The configuration that `verl.trainer.main_ppo --config-dir ... --config-name ...` sees."""
    with initialize_config_dir(str(config_dir.resolve()), version_base=None):
        verls = "hydra.searchpath=[pkg://verl.trainer.config]"
        config = compose(config_name, overrides=[verls, *overrides])
    OmegaConf.to_container(config, resolve=True)  # as verl does, but only after it started Ray
    return config


def check_environment(config: Any) -> str:
    """Whether verl has us, and what it needs for this trainer, in this Python."""
    try:
        from verl_gdpo.verl_hooks import for_check as verls
    except Exception as error:
        raise ValueError(f"verl cannot be imported: {message_of(error)}") from error
    plugin = sys.modules.get("verl_gdpo.plugin")
    if plugin is None:
        chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        raise ValueError(
            f"verl {verls.VERSION} did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS={chosen}, "
            f"VERL_USE_EXTERNAL_MODULES={os.environ.get('VERL_USE_EXTERNAL_MODULES')}. Set the "
            "latter to verl_gdpo.plugin, or name verl_gdpo in the former"
        )
    try:
        verls.import_parts(config)
    except ImportError as error:
        raise ValueError(
            f"{error.name} cannot be imported: {error}. verl's default trainer needs "
            "TransferQueue, fastapi, uvicorn and cachetools, which verl does not install; "
            "verl-gdpo does"
        ) from error
    if plugin.refusals:
        raise ValueError("verl-gdpo refuses to run: " + "; ".join(plugin.refusals))
    check_device(config.trainer.device)
    return f"verl {verls.VERSION}, verl-gdpo {verl_gdpo.__version__}"


def check_verls_rules(config: Any, _environment: str) -> list[str]:
    """verl's own validation; returns what it prints."""
    from verl_gdpo.verl_hooks.for_check import what_validation_prints

    return what_validation_prints(config)


def check_settings(config: Any, training: Sequence[DataFile]) -> GdpoSettings:
    """The settings, with the bounds that the scorers of the training rows declare."""
    sources = {source for file in training for source in file.sources}
    is_v1 = config.trainer.get("use_v1", False)
    has_manager = uses_gdpo_manager(config) or (is_v1 and _has_subclass_of_ours(config))
    settings = settings_of_run(config, sources or None, has_manager=has_manager)
    if settings is None:
        raise ValueError(
            "neither algorithm.adv_estimator nor reward.reward_manager.name is gdpo, so verl-gdpo "
            f"takes no part: got {config.algorithm.adv_estimator}, "
            f"{config.reward.reward_manager.name}"
        )
    if not is_v1:
        _check_weights_without_steps(settings)
    return settings


def _has_subclass_of_ours(config: Any) -> bool:
    from verl_gdpo.verl_hooks.reward_manager import runs_gdpo_manager

    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run, which makes the manager, says why it cannot be made
        return False


def _check_weights_without_steps(settings: GdpoSettings) -> None:
    for name, term in (settings.rewards or {}).items():
        try:
            term.weight_at(None)
        except ValueError as error:
            raise ValueError(f"algorithm.gdpo.rewards.{name}: {error}") from error


def check_trainer(config: Any, _settings: GdpoSettings, _environment: str) -> str:
    """Whether verl's trainer of this mode is ours, and accepts the configuration."""
    if not config.trainer.get("use_v1", False):
        return _check_legacy_trainer(config)
    from verl_gdpo.verl_hooks.for_check import make_v1_trainer

    _check_filter(config)
    mode = config.trainer.v1.trainer_mode
    try:
        make_v1_trainer(config)
    except Exception as error:
        raise ValueError(f"trainer.v1.trainer_mode={mode}: {message_of(error)}") from error
    return f"trainer {mode}"


def _check_filter(config: Any) -> None:
    wanted = OmegaConf.select(config, "algorithm.filter_groups")
    if wanted and wanted.enable and not wanted.metric:
        raise ValueError(
            "algorithm.filter_groups.enable=True with metric=null, which verl refuses. Set "
            "algorithm.filter_groups.metric=score; adv_estimator=gdpo filters by its own rule"
        )


def _check_legacy_trainer(config: Any) -> str:
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        raise ValueError(
            "algorithm.filter_groups.enable=True with trainer.use_v1=False: verl's legacy trainer "
            "does not filter. Set trainer.use_v1=True, or filter_groups.enable=False"
        )
    return "legacy trainer"


def check_data(report: Report, config: Any) -> list[list[DataFile]] | None:
    """Training and validation files; None where one of them could not be used."""
    found: list[list[DataFile] | None] = []
    for key in ("train_files", "val_files"):
        before = len(report.problems)
        files = report.ask(read_files, config, key)
        if len(report.problems) > before:
            found.append(None)
            continue
        if files is None:
            report.say(f"data.{key}: not looked at, because verl fetches it, or a class of yours")
        for file in files or []:
            report.say(f"data.{key}: {file.table.num_rows} rows in {file.path}")
        found.append(files or [])
    if found[0]:
        rows = sum(file.table.num_rows for file in found[0])
        for remark in report.ask(count_steps, config, rows) or []:
            report.say(remark)
    return None if None in found else found  # type: ignore[return-value]


def try_rewards(
    report: Report,
    config: Any,
    settings: GdpoSettings,
    files: list[list[DataFile]],
    options: argparse.Namespace,
    _environment: str,
) -> None:
    """The dry run: what the reward functions return for made-up responses."""
    from verl_gdpo.tools.check.dry_run import score_rows
    from verl_gdpo.tools.check.text import describe

    training, validation = files
    rows = pick_rows(training, validation, options.rows)
    if not rows:
        report.say("no rows at hand, so no reward was tried")
        return
    run = score_rows(config, rows, options.seconds)
    if run.problems and config.reward.reward_model.enable:
        for problem in run.problems:
            report.say(f"without the reward model's server, no reward could be tried: {problem}")
        return
    report.problems += run.problems
    if not run.problems:
        report.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
        for text in describe(run, settings):
            print(f"\n{text}")
        print()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl-gdpo check", description=__doc__.splitlines()[0])
    parser.add_argument("--config-dir", type=Path, default=FOLDER, help="default: our recipes")
    parser.add_argument("--config-name", default="train")
    parser.add_argument("--rows", type=int, default=8, help="rows to try the rewards on")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of one scoring")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    report = Report()
    logging.disable(logging.INFO)  # verl and our trainer say there what is said here
    try:
        _ask_all(report, options)
    finally:
        logging.disable(logging.NOTSET)
    for problem in report.problems:
        print(f"check: {problem}", file=sys.stderr)
    return 1 if report.problems else 0


def _ask_all(report: Report, options: argparse.Namespace) -> None:
    config = report.ask(compose_config, options.config_dir, options.config_name, options.overrides)
    if config is None:
        return
    report.ask(check_temporary_folder)
    report.ask(check_model, config)
    files = check_data(report, config)
    sources = {source for group in files or [] for file in group for source in file.sources}
    for lack in report.ask(what_scorers_miss, config, sources) or []:
        report.say(lack)
    settings = report.ask(check_settings, config, files[0] if files else [])
    if settings is not None:
        report.say(
            f"adv_estimator={config.algorithm.adv_estimator}, "
            f"reward_manager={config.reward.reward_manager.name}"
        )
        named = [f"{f.name}={getattr(settings, f.name)}" for f in fields(settings)]
        report.say(", ".join(text for text in named if not text.startswith("rewards=")))
    environment = report.ask(check_environment, config)
    for remark in report.ask(check_verls_rules, config, environment) or []:
        report.say(remark)
    trainer = report.ask(check_trainer, config, settings, environment)
    if environment and trainer:
        report.say(f"{environment}, {trainer}")
    report.ask(try_rewards, report, config, settings, files, options, environment)
