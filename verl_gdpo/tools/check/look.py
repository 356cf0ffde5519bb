"""Looks at everything of a configuration that can be looked at before a run starts."""

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from omegaconf import OmegaConf

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import (
    FAILED,
    NOTES_KEY,
    ROLLOUT_FACTS,
    is_internal,
    may_be_meant,
    value_or_error,
)
from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.configuration import (
    mistakes_beside_the_settings,
    noted,
    paid_failures,
    settings_and_mistakes_of_run,
    sums_first,
    unnamed_rewards,
    unread_settings,
)
from verl_gdpo.hooks.unread_keys import find_unread_keys, texts_in
from verl_gdpo.scoring.function_list import (
    KEY,
    check_sources,
    entries_of,
    is_asked,
    limited_functions,
    owner_of,
    scores_source,
    silence,
    tells_validation_apart,
    validation_settings,
)
from verl_gdpo.scoring.reward_functions import reward_functions
from verl_gdpo.terminal import render
from verl_gdpo.tools import compose
from verl_gdpo.tools.check import (
    asked,
    asked_again,
    data_files,
    good_responses,
    joined_files,
    machine,
    prompts,
    rules,
    template_calls,
    verl_questions,
)
from verl_gdpo.tools.check.data_files import DataFile, DataRow, Responses
from verl_gdpo.tools.check.dry_run import RIGHT, DryRun, score_rows
from verl_gdpo.tools.check.mended import lacks_a_function, without_mistakes
from verl_gdpo.tools.check.output import Output
from verl_gdpo.tools.check.refused_overrides import why_refused, with_meant
from verl_gdpo.tools.run import attention, precision

T = TypeVar("T")

NEVER_VARIES, NEVER_APPLIES = "NEVER VARIES", "never applies"
HEADER = ("reward", "weight", "min", "max", "")  # the last is a remark
LEFT = (0, 4)  # columns with words


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
    _say_what_verl_answers(output, mended, steps, options.elsewhere)
    trainer = _asked_again(output, rules.check_trainer, mended, defaults)
    if trainer is not None:
        output.note(f"{environment}, {trainer}")
    rows = data_files.pick_rows(training or [], validation or [], options.rows)
    of_run = _prompts_of_run(output, config, rows)
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
    output.ask(_try_rewards, output, mended, settings, training or [], validation or [], options)


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
    output: Output, config: Any, steps: int | None, is_elsewhere: bool
) -> None:
    """Ask verl's own code what it makes of the configuration."""
    answers = output.ask(asked.ask_verl, config, steps, is_elsewhere)
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
    for key, of_key in files.items():
        output.warn(data_files.hardly_useful_rows, config, key, of_key)
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


def _try_rewards(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    training: Sequence[DataFile],
    validation: Sequence[DataFile],
    options: argparse.Namespace,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    is_apart = tells_validation_apart(config)
    rows = data_files.pick_rows(training, [] if is_apart else validation, options.rows)
    of_validation: list[DataRow] = []
    if is_apart and validation:
        picked = data_files.pick_rows(validation, [], options.rows)
        of_validation = [replace(row, is_validation=True) for row in picked]
    if not rows:
        output.warnings.append("there are no rows, so no reward was tried")
        return
    silent = [] if options.ask_judge else limited_functions(config)
    if silent:
        if not options.elsewhere:
            reward_functions(config)  # raises if a judge's package or key is not here
        output.warnings.append(f"not called: {silent}, which may ask a service (--ask-judge)")
    more = data_files.read_responses(options.responses, training) if options.responses else []
    if silent:
        rows = [row for row in rows if _is_scored(row, config, silent)]
        of_validation = [row for row in of_validation if _is_scored(row, config, silent)]
        more = [(row, text) for row, text in more if row is None or _is_scored(row, config, silent)]
        silence(config, silent)
    if of_validation:
        _try_rewards_of_validation(output, config, settings, of_validation, options)
    if not rows:
        return
    run = _score_with_each_function(config, rows, options.seconds, more)
    if run.problems and config.reward.reward_model.enable:
        remark = "without the reward model's server, no reward could be tried"
        output.warnings += [f"{remark}: {problem}" for problem in run.problems]
        return
    output.problems += run.problems
    if not run.samples:
        return
    output.note(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    output.warnings += _failures(run)
    output.problems += asked.what_filters_lack(config, run.infos)
    tables = ScoreTables(run, settings)
    if settings is not None:
        problems, remarks = tables.paid_failures(config, settings)
        output.problems += problems
        output.warnings += remarks
    sources = {source for file in training for source in file.sources}
    if not options.allow_flat and not rules.validates_only(config):
        output.problems += tables.without_signal(sources)
    output.warnings += tables.same_everywhere()
    output.warnings += tables.dropped(entries_of(config), silent)
    if settings is not None:
        columns = run.rows().columns
        output.warn(unnamed_rewards, config, settings, columns)
    for text in tables:
        output.show(f"\n{text}")
    output.show("")


def _try_rewards_of_validation(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    rows: Sequence[DataRow],
    options: argparse.Namespace,
) -> None:
    """Score rows of a validation, where it has other functions than the training."""
    run = _score_with_each_function(config, rows, options.seconds, [])
    output.problems += run.problems
    if not run.samples:
        return
    output.note(f"{len(rows)} rows of the validation scored, with functions of their own")
    output.warnings += _failures(run)
    if settings is not None:
        tables = ScoreTables(run, validation_settings(config, settings))
        for text in tables:
            output.show(f"\nvalidation, {text}")


def _score_with_each_function(
    config: Any, rows: Sequence[DataRow], seconds: float, more: Responses
) -> DryRun:
    """Score the rows, and once more without the functions of the list that fail.

    The first function that fails on a sample ends the sample, and hides how others fail on it.
    """
    run = score_rows(config, rows, seconds, more)
    problems = list(run.problems)
    failed: list[str] = []
    while True:
        told = [name for name in entries_of(config) if name not in failed]
        failing = [name for name in told if any(f"{KEY}.{name}: " in text for text in problems)]
        if not failing:
            return replace(run, problems=problems)
        failed += failing
        rows = [row for row in rows if _is_scored(row, config, failed)]
        if not rows:
            return replace(run, problems=problems)
        more = [(row, text) for row, text in more if row is None or row in rows]
        config = deepcopy(config)
        silence(config, failed)
        problems += score_rows(config, rows, seconds, more).problems


def _is_scored(row: DataRow, config: Any, silent: Collection[str]) -> bool:
    """Return whether a function of the list that is not silent scores a row."""
    for name, entry in entries_of(config).items():
        if name in silent or not is_asked(entry, is_validation=row.is_validation):
            continue
        if scores_source(entry, row.source):
            return True
    return False


def _failures(run: DryRun) -> list[str]:
    """A remark for each function of the list that failed, which its `on_error` lets pass."""
    failures: Counter[str] = Counter()
    for info in run.infos:
        for note, value in (info.get(NOTES_KEY) or {}).items():
            if note.startswith(FAILED) and value:
                failures[note.removeprefix(FAILED)] += 1
    return [
        f"{KEY}.{name} failed for {count} of {len(run.infos)} made-up responses (-v shows why); a "
        "run ends if more than algorithm.gdpo.max_failed of a step fail"
        for name, count in failures.items()
    ]


class RewardLine(NamedTuple):
    reward: str
    weight: float | None  # None for what is not trained on
    low: float
    high: float
    remark: str

    @property
    def cells(self) -> tuple[str, ...]:
        weight = "-" if self.weight is None else f"{self.weight:g}"
        ends = (f"{end:.3f}".replace("nan", "-") for end in (self.low, self.high))
        return (self.reward, weight, *ends, self.remark)


class ScoreTables:
    """A table for each data source; its rewards are computed as the training does.

    Without `settings`, the run trains on the scores of verl's own managers.

    Raises:
        RewardError: the scorers' results do not make a matrix of rewards; see `RewardMatrix.of`.
    """

    def __init__(self, run: DryRun, settings: GdpoSettings | None) -> None:
        self.run, self.settings = run, settings
        self.places: dict[str, list[int]] = {}  # of the samples of each data source
        for place, sample in enumerate(run.samples):
            self.places.setdefault(sample.source, []).append(place)
        if settings is None:
            score_B1 = _numbers(run.scores)[:, None]
            self.rewards = RewardMatrix({"score": 1.0}, score_B1, np.ones_like(score_B1, np.bool_))
        else:
            self.rewards = RewardMatrix.of(run.rows(), settings)
        self.lines = {source: [*self._lines(here)] for source, here in self.places.items()}

    def __iter__(self) -> Iterator[str]:
        for source, lines in self.lines.items():
            title = f"data_source {source!r}, {len(self.places[source])} responses:"
            yield f"{title}\n{render(HEADER, [line.cells for line in lines], LEFT)}"

    def same_everywhere(self) -> list[str]:
        """A remark for each reward that is the same for all responses of a data source."""
        return [
            f"data_source {source!r}: {line.reward} is the same for all made-up responses"
            for source, lines in self.lines.items()
            for line in lines
            if line.remark == NEVER_VARIES
        ]

    def paid_failures(self, config: Any, settings: GdpoSettings) -> tuple[list[str], list[str]]:
        """Return problems and remarks of conditions that are better failed, by these values."""
        problems: list[str] = []
        remarks: list[str] = []
        known = {paid.reward for paid in paid_failures(config, settings)}
        if self.rewards.raw is None:
            return problems, remarks
        is_summed = sums_first(config.algorithm.adv_estimator, settings)
        for paid in paid_in_batch(self.rewards.raw, self.run.rows(), settings, is_summed=is_summed):
            if paid.is_default:
                problems.append(paid.message)
            elif paid.reward not in known:  # else the bounds have told it
                remarks.append(paid.message)
        return problems, remarks

    def dropped(self, functions: Collection[str] = (), silent: Collection[str] = ()) -> list[str]:
        """A remark for each name that is no reward in any response, although it looks like one.

        Args:
            functions: the names of the list's functions.
            silent: those of them that were not called.
        """
        if self.settings is None or self.settings.rewards is not None:
            return []
        known = {*self.rewards.weights, *self.settings.bounds, *ROLLOUT_FACTS, "score"}
        values = {name: value for info in self.run.infos for name, value in info.items()}
        remarks = []
        for name, value in values.items():
            if name in known or is_internal(name) or owner_of(name, functions) in silent:
                continue
            if value is None or may_be_meant(value):
                remarks.append(
                    f"{name!r} is {value!r}, and no number in any response, so it is no reward. "
                    "Return a float, or leave it out"
                )
        return remarks

    def without_signal(self, sources: Collection[str]) -> list[str]:
        """A sentence for each of these data sources in which all that is trained on is the same.

        Only where a right response was tried: wrong ones may all get the lowest reward.
        """
        sentences = []
        for source in self.lines.keys() & {*sources}:
            used = [x for x in self.lines[source] if x.weight and x.remark != NEVER_APPLIES]
            kinds = [self.run.samples[place].kind for place in self.places[source]]
            if RIGHT in kinds and all(line.remark == NEVER_VARIES for line in used):
                values = ", ".join(f"{line.reward} is {line.low:g}" for line in used)
                sentences.append(
                    f"data_source {source!r}: {values} for each of {len(kinds)} made-up responses, "
                    "also for the right ones, so nothing would be trained. If the reward function "
                    "only knows answers of another form: --allow-flat"
                )
        return sentences

    def _lines(self, here: Sequence[int]) -> Iterator[RewardLine]:
        """What is trained on, and what was returned beside it."""
        infos = self._infos(here)
        groups = np.array([self.run.samples[place].row for place in here])
        for column, (name, weight) in enumerate(self.rewards.weights.items()):
            present_B = self.rewards.present_BK[here, column]
            values = self.rewards.values_BK[here, column][present_B]
            if self.settings is None:  # verl's managers repeat a bare number as "acc"
                infos = {k: v for k, v in infos.items() if not np.array_equal(v, values)}
            elif name not in infos:
                continue
            yield RewardLine(name, weight, *_ends(values), _remark(values, groups[present_B]))
        unused = "not trained on" if self.settings is None else "not in the sum"
        for name, values in infos.items():
            if name not in self.rewards.weights:
                yield RewardLine(name, None, *_ends(values), unused)

    def _infos(self, here: Sequence[int]) -> Mapping[str, Floats]:
        """{name: numbers} of what was returned for these samples beside a score."""
        infos = [self.run.infos[i] for i in here]
        names = dict.fromkeys(name for info in infos for name in info)
        return {
            name: _numbers(info.get(name) for info in infos)
            for name in names
            if name != "score" and not is_internal(name)
        }


def _numbers(values: Iterable[Any]) -> Floats:
    """Return the numbers among the values; a scorer may also return text, which is not a reward."""
    numbers = []
    for value in values:
        try:
            numbers.append(value_or_error(value))
        except ValueError:
            continue
    return np.array([value for value in numbers if value is not None])


def _ends(values: Floats) -> tuple[float, float]:
    return (values.min(), values.max()) if len(values) else (np.nan, np.nan)


def _remark(values: Floats, groups: Any) -> str:
    if not len(values):
        return NEVER_APPLIES
    if values.min() == values.max():
        return NEVER_VARIES
    varies = any(np.ptp(values[groups == group]) > 0 for group in np.unique(groups))
    return "" if varies else "VARIES ONLY BETWEEN PROMPTS"
