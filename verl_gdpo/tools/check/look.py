"""Looks at everything of a configuration that can be looked at before a run starts."""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from omegaconf import OmegaConf

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.configuration import (
    mistakes_beside_the_settings,
    noted,
    settings_and_mistakes_of_run,
    unread_settings,
)
from verl_gdpo.hooks.unread_keys import find_unread_keys, texts_in
from verl_gdpo.scoring.function_list import KEY, check_sources
from verl_gdpo.tools import compose
from verl_gdpo.tools.check import (
    asked,
    asked_again,
    columns,
    data_files,
    good_responses,
    joined_files,
    machine,
    media,
    messages,
    prompts,
    rules,
    template_calls,
    verl_questions,
)
from verl_gdpo.tools.check.data_files import DataFile, DataRow
from verl_gdpo.tools.check.mended import lacks_a_function, without_mistakes
from verl_gdpo.tools.check.output import Output
from verl_gdpo.tools.check.refused_overrides import why_refused, with_meant
from verl_gdpo.tools.check.tried_rewards import try_rewards
from verl_gdpo.tools.run import attention, precision

T = TypeVar("T")


def look(
    output: Output, config: Any, refused: Mapping[str, str], options: argparse.Namespace
) -> None:
    """Ask everything that can still be asked after a problem.

    Args:
        refused: {override that Hydra refuses: its message}; the configuration is without them.
    """
    output.problems += why_refused(config, refused)
    config = with_meant(config, refused)
    if options.elsewhere:
        values = OmegaConf.to_container(config, resolve=False)
        output.modules_elsewhere = _packages_named(values)
    defaults = compose.compose_config(None, compose.PLAIN, [])
    not_taken: list[str] = []
    unread = output.ask(find_unread_keys, config)
    if unread is not None:
        output.problems += unread.refusals
        output.warnings += unread.warnings
        not_taken = unread.not_taken
    # What follows from a wrong value is no problem of its own.
    wrong = rules.unusable_values(config, defaults)
    for key, expected in wrong.items():
        output.problems.append(f"{key}={OmegaConf.select(config, key)}: {expected}")
    first = len(output.problems)
    first_warning = len(output.warnings)
    _look(output, rules.with_defaults(config, defaults, [*wrong, *not_taken]), defaults, options)
    output.problems[first:] = _without(output.problems[first:], wrong)
    output.warnings[first_warning:] = _without(output.warnings[first_warning:], wrong)


def _without(texts: Sequence[str], keys: Iterable[str]) -> list[str]:
    """Return the texts that have none of these keys."""
    return [text for text in texts if not any(key in text for key in keys)]


def _look(output: Output, config: Any, defaults: Any, options: argparse.Namespace) -> None:
    if not options.elsewhere:
        output.refuse(machine.what_ray_refuses, config)
        output.refuse(machine.missing_packages, config)
        output.refuse(machine.missing_trackers, config)
        output.refuse(machine.little_space, config)
        output.ask(machine.check_gpus, config)
    output.refuse(machine.refused_environment, config)
    training = _files(output, config, "train_files")
    validation = _files(output, config, "val_files")
    steps = _steps(output, config, training or [])
    trained = {source for file in training or [] for source in file.sources}
    validated = {source for file in validation or [] for source in file.sources}
    if training and validation:
        shared = output.ask(data_files.shared_prompts, config, training, validation)
        equal, near = shared or ("", "")
        if equal:
            output.warnings.append(equal)
        output.note(near)
    lacks = output.ask(machine.what_scorers_miss, config, trained | validated)
    if lacks is not None:
        output.problems += lacks.problems
        output.warnings += lacks.warnings
    mended = config
    settings = None
    # Only where all files could be read, all data sources are known.
    sources = None
    if training and validation:
        sources = (trained, validated)
    plan = output.ask(Plan.of, config, trained, sources)
    if plan is not None:
        output.problems += plan.mistakes
        output.warnings += plan.warnings
        output.note(plan.remarks)
        mended, settings = plan.without_mistakes(config)
    if settings is not None:
        if steps is not None:
            output.ask(rules.weights_end, settings, steps)
        output.warn(rules.paid_failures, mended, settings)
    output.warn(_unread_settings, config)
    output.warn(rules.hardly_meant, config)
    output.refuse(rules.broken_rules, config)
    environment = output.ask(machine.check_environment, config)
    if environment is None:
        return
    output.note(output.ask(attention.choose, config))
    output.note(output.ask(precision.choose, mended))
    output.refuse(rules.unknown_names, config)
    for question in (
        verl_questions.what_validation_prints,
        verl_questions.make_rollout_config,
        verl_questions.make_optimizer,
    ):
        output.note(_asked_again(output, question, mended, defaults))
    _say_what_verl_answers(output, mended, steps, options)
    trainer = _asked_again(output, rules.check_trainer, mended, defaults)
    if trainer is not None:
        output.note(f"{environment}, {trainer}")
    rows = data_files.pick_rows(training or [], validation or [], options.rows)
    of_run = _prompts_of_run(output, config, rows)
    output.warn(template_calls.unused_tools, config, rows)
    files = {"train_files": training or [], "val_files": validation or []}
    _say_what_rows_lack(output, config, files, of_run)
    # A scorer that cannot score here fails for each response, for the same reason.
    if lacks is None or lacks.problems or plan is None:
        return
    if lacks_a_function(mended, config):
        output.warnings.append(f"no reward was tried: no function of {KEY} is without mistake")
        return
    if of_run is not None:
        output.ask(_send_good_responses, output, mended, of_run, rows)
    output.ask(try_rewards, output, mended, settings, training or [], validation or [], options)


def _asked_again(
    output: Output, question: Callable[[Any], T], config: Any, defaults: Any
) -> T | None:
    """Return the result of a question that stops at its first mistake, and keep all problems."""
    result, mistakes = asked_again.refusals(question, config, defaults)
    for mistake in mistakes:
        output.keep(mistake)
    return result


def _steps(output: Output, config: Any, training: Sequence[DataFile]) -> int | None:
    """Return the number of training steps; None if nobody can count them, or there are none."""
    row_count = sum(file.table.num_rows for file in training)
    if not row_count:
        return None
    steps = output.ask(machine.count_steps, config, row_count)
    if steps is None:
        return None
    output.problems += steps.problems
    output.warnings += steps.warnings
    output.note(steps.remarks)
    return steps.total


def _packages_named(configuration: Any) -> frozenset[str]:
    """Return the package of each text that may name a module: that of `torchao.optim`."""
    packages = set()
    for text in texts_in(configuration):
        packages.add(text.removeprefix("pkg://").replace("/", ".").partition(".")[0])
    return frozenset(packages)


def _say_what_verl_answers(
    output: Output, config: Any, steps: int | None, options: argparse.Namespace
) -> None:
    """Ask verl's own code what it makes of the configuration."""
    given = {override.lstrip("+").partition("=")[0] for override in options.overrides}
    answers = output.ask(asked.ask_verl, config, steps, options.elsewhere, given)
    if answers is not None:
        output.problems += answers.problems
        output.warnings += answers.warnings
        output.note(answers.notes)


def _files(output: Output, config: Any, key: str) -> list[DataFile] | None:
    """Return the files under `data.KEY`; none if verl fetches them, None if one cannot be used."""
    files = output.ask(data_files.read_files, config, key)
    if files == []:
        output.note(f"data.{key}: not checked, because verl or your dataset class fetches it")
    for file in files or []:
        output.note(f"data.{key}: {file.table.num_rows} rows in {file.path}")
    if files:
        output.refuse(joined_files.what_cannot_be_joined, key, files)
        output.warn(joined_files.columns_that_a_file_lacks, key, files)
    return files


# The data sources of the training rows, and of the validation rows.
Sources = tuple[Collection[str], Collection[str]]


@dataclass(frozen=True)
class Plan:
    """How a run counts its rewards.

    trained: the data sources of the training rows; None if they are not known.
    sources: those of all rows; None if they are not known.
    has_manager: whether the reward manager is ours.
    settings: as far as they can be read, with the bounds that the scorers of the training rows
        declare; None where verl-gdpo has no part in the run.
    mistakes: of our keys, a message each, which says what to set instead.
    warnings: of the list of reward functions.
    remarks: what to say of the settings.
    """

    trained: list[str] | None
    sources: Sources | None
    has_manager: bool
    settings: GdpoSettings | None
    mistakes: list[str]
    warnings: list[str]
    remarks: list[str]

    @classmethod
    def of(cls, config: Any, trained: Iterable[str], sources: Sources | None) -> "Plan":
        """Make it of a configuration and the data sources of its rows."""
        has_manager = _has_our_manager(config)
        plan = cls(list(trained) or None, sources, has_manager, None, [], [], [])
        settings, mistakes, warnings = plan._read(config)
        names = (
            f"adv_estimator={config.algorithm.adv_estimator}, "
            f"reward_manager={config.reward.reward_manager.name}"
        )
        remarks = []
        if settings is None:
            remarks.append(
                f"{names}: both are verl's own, so verl-gdpo has no part in this run, which trains "
                "on one score of each response. For GDPO: algorithm.adv_estimator=gdpo "
                "reward.reward_manager.name=gdpo"
            )
        # Settings with a mistake are those of no run.
        elif not mistakes:
            shown = [f.name for f in fields(settings) if f.repr and f.name != "rewards"]
            remarks.append(names)
            remarks.append(", ".join(f"{key}={getattr(settings, key)}" for key in shown))
        return replace(
            plan, settings=settings, mistakes=mistakes, warnings=warnings, remarks=remarks
        )

    def without_mistakes(self, config: Any) -> tuple[Any, GdpoSettings | None]:
        """Return the configuration without the keys that have a mistake, and its settings."""
        if not self.mistakes:
            return config, self.settings
        mended = without_mistakes(config, lambda config: self._read(config)[1])
        return mended, self._read(mended)[0]

    def _read(self, config: Any) -> tuple[GdpoSettings | None, list[str], list[str]]:
        """Return the settings of a configuration with these rows, its mistakes, and warnings."""
        settings, mistakes = settings_and_mistakes_of_run(
            config, self.trained, has_manager=self.has_manager
        )
        warnings: list[str] = []
        if settings is None:
            return None, mistakes, warnings
        mistakes += mistakes_beside_the_settings(config)
        if self.sources is not None:
            with noted(mistakes):
                warnings = check_sources(config, *self.sources)
        return settings, mistakes, warnings


def _unread_settings(config: Any) -> list[str]:
    return unread_settings(config, has_manager=_has_our_manager(config))


def _has_our_manager(config: Any) -> bool:
    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False


def _prompts_of_run(
    output: Output, config: Any, rows: Sequence[DataRow]
) -> prompts.RunPrompts | None:
    """Return what makes the prompts of a run; None after a problem, or where it is not here."""
    tokenizer = output.ask(prompts.tokenizer_of_run, config)
    if tokenizer is not None:
        return output.ask(prompts.RunPrompts.of, config, tokenizer)
    if rows:
        remark = (
            "prompts are not counted in tokens, because the tokenizer is not on this machine; nor "
            "did a response go through it and its chat template"
        )
        output.warnings.append(remark)
        output.warn(template_calls.what_llama_needs, config, rows)
    return None


def _say_what_rows_lack(
    output: Output,
    config: Any,
    files: Mapping[str, Sequence[DataFile]],
    of_run: prompts.RunPrompts | None,
) -> None:
    """Say it of the files of `data.KEY`, given {KEY: files}."""
    # The same file may be there for training and for validation.
    counted: dict[str, prompts.Lengths | None] = {}
    loops = output.ask(asked.known_loops, config)
    marks = messages.marks_of(of_run)
    for key, of_key in files.items():
        output.refuse(columns.taken_names, config, key, of_key)
        output.refuse(columns.unknown_agents, key, of_key, loops)
        output.warn(columns.unread_columns, key, of_key)
        output.warn(columns.texts_in_extra_info, key, of_key)
        output.warn(data_files.hardly_useful_rows, config, key, of_key)
        output.warn(messages.rarely_meant, config, key, of_key, marks)
        of_media = output.ask(media.look_at_media, config, key, of_key)
        if of_media is not None:
            output.problems += of_media[0]
            output.warnings += of_media[1]
        output.warn(data_files.large_rows, key, of_key)
        if of_run is None:
            continue
        for file in of_key:
            output.note(output.ask(prompts.uncounted_media, config, key, file))
            if file.path not in counted:
                counted[file.path] = output.ask(prompts.Lengths.of, of_run, file)
        lengths = [counted[file.path] for file in of_key]
        if None not in lengths:
            output.warn(prompts.unusable_prompts, config, key, of_run, lengths)
    if of_run is not None and of_run.unknown_tools:
        output.warnings.append(
            f"{', '.join(of_run.unknown_tools)}: no file here has a tool_schema of these, so "
            "their tokens are not counted in the prompts"
        )


def _send_good_responses(
    output: Output, config: Any, of_run: prompts.RunPrompts, rows: Sequence[DataRow]
) -> None:
    """Say what the run's tokenizer and chat template do with thoughts, tags and calls."""
    written = of_run.written(rows)
    output.note(output.ask(good_responses.what_templates_do, config, of_run.tokenizer, written))
    output.refuse(good_responses.lost_on_the_way, config, of_run.tokenizer, written)
    calls = output.ask(template_calls.look_at_calls, config, of_run, rows)
    if calls is None:
        return
    problems, warnings, remarks = calls
    output.problems += problems
    output.warnings += warnings
    output.note(remarks)
