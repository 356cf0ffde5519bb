"""Checks whether a training configuration can work, without Ray or a model.

verl-gdpo check [--config-dir FOLDER] [--config-name train] [--rows 8] [key=value ...]

The overrides are those of the training run. The command lists all problems that it can find at
once. The exit code is 1 if there are problems.
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
from verl_gdpo.settings.reward_terms import hint
from verl_gdpo.tools.check.data import DataFile, count_steps, pick_rows, read_files
from verl_gdpo.tools.check.findings import Findings, message_of
from verl_gdpo.tools.check.machine import (
    check_device,
    check_gpus,
    check_model,
    check_temporary_folder,
    missing_packages,
    what_scorers_miss,
)
from verl_gdpo.tools.check.prompts import long_prompts
from verl_gdpo.tools.recipes import FOLDER


def compose_config(config_dir: Path, config_name: str, overrides: list[str]) -> Any:
    """Return the configuration that `verl.trainer.main_ppo` would get with these arguments."""
    with initialize_config_dir(str(config_dir.resolve()), version_base=None):
        verls = "hydra.searchpath=[pkg://verl.trainer.config]"
        config = compose(config_name, overrides=[verls, *overrides])
    OmegaConf.to_container(config, resolve=True)  # verl does this too, but only after Ray started
    return config


def check_environment(config: Any) -> str:
    """Return the versions; raise ValueError if verl does not load us, or lacks a dependency."""
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
    """Run verl's own validation and return the lines that it prints.

    Raises:
        ValueError: the estimator is one that verl looks up in vain, at the first step.
    """
    from verl_gdpo.verl_hooks.for_check import known_estimators, what_validation_prints

    name, known = str(config.algorithm.adv_estimator), known_estimators()
    if name not in known:
        raise ValueError(f"algorithm.adv_estimator={name}: unknown to verl{hint(name, known)}")
    return what_validation_prints(config)


def check_settings(config: Any, training: Sequence[DataFile]) -> GdpoSettings:
    """Return the settings, with the bounds that the scorers of the training rows declare."""
    sources = {source for file in training for source in file.sources}
    is_v1 = config.trainer.get("use_v1", False)
    has_manager = uses_gdpo_manager(config) or (is_v1 and _has_subclass_of_ours(config))
    settings = settings_of_run(config, sources or None, has_manager=has_manager)
    if settings is None:
        raise ValueError(
            "neither algorithm.adv_estimator nor reward.reward_manager.name is gdpo, so verl-gdpo "
            f"would do nothing: got {config.algorithm.adv_estimator}, "
            f"{config.reward.reward_manager.name}"
        )
    if not is_v1:
        _check_weights_without_steps(settings)
    return settings


def _has_subclass_of_ours(config: Any) -> bool:
    from verl_gdpo.verl_hooks.reward_manager import runs_gdpo_manager

    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False


def _check_weights_without_steps(settings: GdpoSettings) -> None:
    for name, term in (settings.rewards or {}).items():
        try:
            term.weight_at(None)
        except ValueError as error:
            raise ValueError(f"algorithm.gdpo.rewards.{name}: {error}") from error


def check_trainer(config: Any, _settings: GdpoSettings, _environment: str) -> str:
    """Return the trainer's name; raise ValueError if it refuses the configuration."""
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
    settings: GdpoSettings,
    files: list[list[DataFile]],
    options: argparse.Namespace,
    _environment: str,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    from verl_gdpo.tools.check.dry_run import score_rows
    from verl_gdpo.tools.check.text import describe, unused_rewards

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
    if not run.problems:
        findings.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
        if unused := unused_rewards(run, settings):
            findings.say(
                f"not used: {', '.join(unused)}; algorithm.gdpo.rewards names "
                f"{', '.join(settings.rewards or ())} alone"
            )
        for text in describe(run, settings):
            print(f"\n{text}")
        print()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl-gdpo check", description=__doc__.splitlines()[0])
    parser.add_argument("--config-dir", type=Path, default=FOLDER, help="default: our recipes")
    parser.add_argument("--config-name", default="train")
    parser.add_argument(
        "--elsewhere", action="store_true", help="the run will be on another machine, with GPUs"
    )
    parser.add_argument("--rows", type=int, default=8, help="number of rows to try the rewards on")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit for one scoring")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    findings = Findings()
    logging.disable(logging.INFO)  # verl and our trainer would log what the report prints
    try:
        _ask_all(findings, options)
    finally:
        logging.disable(logging.NOTSET)
    for problem in findings.problems:
        print(f"check: {problem}", file=sys.stderr)
    return 1 if findings.problems else 0


def _ask_all(findings: Findings, options: argparse.Namespace) -> None:
    config = findings.ask(
        compose_config, options.config_dir, options.config_name, options.overrides
    )
    if config is None:
        return
    findings.ask(check_temporary_folder)
    findings.ask(check_model, config)
    if not options.elsewhere:
        findings.problems += missing_packages(config)
        for remark in findings.ask(check_gpus, config) or []:
            findings.say(remark)
    files = check_data(findings, config)
    sources = {source for group in files or [] for file in group for source in file.sources}
    lacks = findings.ask(what_scorers_miss, config, sources)
    for lack in lacks or []:
        findings.say(lack)
    settings = findings.ask(check_settings, config, files[0] if files else [])
    if settings is not None:
        findings.say(
            f"adv_estimator={config.algorithm.adv_estimator}, "
            f"reward_manager={config.reward.reward_manager.name}"
        )
        named = [f"{f.name}={getattr(settings, f.name)}" for f in fields(settings)]
        findings.say(", ".join(text for text in named if not text.startswith("rewards=")))
    environment = findings.ask(check_environment, config)
    for remark in findings.ask(check_verls_rules, config, environment) or []:
        findings.say(remark)
    for key, group in zip(("train_files", "val_files"), files or [], strict=False):
        for remark in findings.ask(long_prompts, config, key, group) or []:
            findings.say(remark)
    trainer = findings.ask(check_trainer, config, settings, environment)
    if environment and trainer:
        findings.say(f"{environment}, {trainer}")
    if lacks is not None:  # else each response would fail, for the same reason
        findings.ask(try_rewards, findings, config, settings, files, options, environment)
