"""Checks whether a training configuration can work. It starts no Ray, and loads no model.

verl-gdpo check [OPTIONS] [what stands behind `python -m verl.trainer.main_ppo`]

The arguments are those of the training command: `key=value`, and Hydra's --config-dir and
--config-name. The command lists all problems that it can find at once. The exit code is 1 if there
are problems.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run, uses_gdpo_manager
from verl_gdpo.tools.check import data_files, gpus, machine, rules
from verl_gdpo.tools.check.data_files import DataFile
from verl_gdpo.tools.check.output import WARNING, Output, others_kept_away
from verl_gdpo.tools.compose import add_config_arguments, compose_given

# the end of --help, and a list in docs/check.md
NOT_CHECKED = """\
- the rewards of real responses: the made-up ones may be of a form that your function does not know
- a reward model, a judge or a sandbox service under load; those of a reward model are not tried
- the model's weights, and whether the rollout engine can run this model
- whether memory suffices: for FSDP, what a GPU needs is computed and not measured, and only said
- the nodes of a Ray cluster that runs; the start of the run compares their files of verl-gdpo
- the GPUs of a rollout with nodes of its own (`separate_async` and the like)
- files that verl fetches, your own dataset class, pictures, and more than 1,000 prompts of a file
- what your tools and agent loops do: only their names and files are looked at
- how fast the run is, and whether it learns"""


class Plan(NamedTuple):
    settings: GdpoSettings | None  # None where verl-gdpo has no part in the run
    said: Sequence[str]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo check",
        description=__doc__.splitlines()[0],
        epilog=f"It does not check:\n{NOT_CHECKED}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--elsewhere", action="store_true", help="the run will be on another machine, with GPUs"
    )
    parser.add_argument("--rows", type=int, default=8, help="number of rows to try the rewards on")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="how long to wait for the next answer of the reward function (default: 60)",
    )
    parser.add_argument(
        "--allow-flat",
        action="store_true",
        help="the rewards may be the same for all made-up responses",
    )
    parser.add_argument(
        "--brief", action="store_true", help="print six lines, and all only if there is a problem"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what verl and others print meanwhile"
    )
    options = parser.parse_intermixed_args(argv)  # as Hydra takes them
    with others_kept_away(options.verbose) as quiet:
        output = Output(quiet.out, options.brief)
        _look(output, options)
        output.finish()
    for problem in dict.fromkeys(output.problems):  # verl and we may say the same
        print(f"check: {problem}", file=sys.stderr)
    if output.problems and quiet.has_kept:
        print("(-v shows what verl and others printed meanwhile)", file=sys.stderr)
    return 1 if output.problems else 0


def _look(output: Output, options: argparse.Namespace) -> None:
    """Ask everything that can still be asked after a problem."""
    config = output.ask(compose_given, options)
    if config is None:
        return
    output.problems += rules.unusable_numbers(config)
    if output.problems:
        return
    if not options.elsewhere:
        output.problems += machine.what_is_missing(config)
        if address := machine.other_nodes(config):
            output.say(f"GPUs and memory: not checked on the nodes of the cluster at {address}")
        else:
            said = output.ask(gpus.check_gpus, config) or []
            output.say(said[:1])
            output.say(said[1:], WARNING)
    training, validation = (_files(output, config, key) for key in ("train_files", "val_files"))
    if training:
        rows = sum(file.table.num_rows for file in training)
        output.say(output.ask(data_files.count_steps, config, rows) or [])
    sources = {s for file in (*(training or []), *(validation or [])) for s in file.sources}
    if training and validation:
        shared = output.ask(data_files.shared_prompts, config, training, validation)
        output.say(shared or [], WARNING)
    lacks = output.ask(machine.what_scorers_miss, config, sources)
    output.say(lacks or [], WARNING)
    plan = output.ask(make_plan, config, training or [])
    output.say(plan.said if plan else [])
    output.say(rules.hardly_meant(config), WARNING)
    output.problems += output.ask(rules.broken_rules, config) or []
    environment = output.ask(machine.check_environment, config)
    if environment is None:
        return
    output.say(machine.what_may_replace_verl(), WARNING)
    output.say(output.ask(_attention, config) or [])
    output.problems += output.ask(rules.unknown_names, config) or []
    output.problems += output.ask(machine.missing_models, config) or []
    output.say(output.ask(rules.validate, config) or [])
    if plan and (trainer := output.ask(rules.check_trainer, config)):
        output.say(f"{environment}, {trainer}")
    _say_what_is_too_long(output, config, training or [], validation or [])
    if lacks is None or plan is None or training is None or validation is None:
        return  # each response would fail, for the same reason
    output.ask(_try_rewards, output, config, plan.settings, training, validation, options)


def _say_what_is_too_long(
    output: Output, config: Any, training: Sequence[DataFile], validation: Sequence[DataFile]
) -> None:
    output.problems += output.ask(machine.too_few_positions, config) or []
    lengths = output.ask(data_files.measure_prompts, config, [*training, *validation])
    if lengths is None:
        return
    if lengths.of and lengths.unit != "tokens":
        said = "prompts are counted in words, because the tokenizer is not on this machine"
        output.say(said, WARNING)
    for key, files in (("train_files", training), ("val_files", validation)):
        output.say(output.ask(data_files.long_prompts, config, key, files, lengths) or [], WARNING)


def _attention(config: Any) -> list[str]:
    """What `attention=auto` stands for here; raise ValueError if it does not go with the rest."""
    from verl_gdpo.hooks.attention import choose

    said = choose(config)
    return [said] if said else []


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
    named = (
        f"adv_estimator={config.algorithm.adv_estimator}, "
        f"reward_manager={config.reward.reward_manager.name}"
    )
    if settings is None:
        said = (
            f"{named}: both are verl's own, so verl-gdpo has no part in this run, which trains on "
            "one score of each response. For GDPO: algorithm.adv_estimator=gdpo "
            "reward.reward_manager.name=gdpo"
        )
        return Plan(None, [said])
    shown = [f.name for f in fields(settings) if f.repr and f.name != "rewards"]
    return Plan(settings, [named, ", ".join(f"{key}={getattr(settings, key)}" for key in shown)])


def _has_subclass_of_ours(config: Any) -> bool:
    from verl_gdpo.hooks.reward_workers import runs_gdpo_manager

    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False


def _try_rewards(
    output: Output,
    config: Any,
    settings: GdpoSettings | None,
    training: Sequence[DataFile],
    validation: Sequence[DataFile],
    options: argparse.Namespace,
) -> None:
    """Score made-up responses with the reward functions, and print the results."""
    from verl_gdpo.tools.check.dry_run import score_rows
    from verl_gdpo.tools.check.score_tables import Tables, unused_rewards

    rows = data_files.pick_rows(training, validation, options.rows)
    if not rows:
        output.say("there are no rows, so no reward was tried", WARNING)
        return
    run = score_rows(config, rows, options.seconds, lambda news: output.show(f"check: {news}"))
    if run.problems and config.reward.reward_model.enable:
        said = "without the reward model's server, no reward could be tried"
        output.say([f"{said}: {problem}" for problem in run.problems], WARNING)
        return
    output.problems += run.problems
    if run.problems:
        return
    output.say(f"{len(rows)} rows scored with {len(run.samples)} made-up responses")
    output.say(unused_rewards(run, settings), WARNING)
    tables = Tables(run, settings)
    trained = {source for file in training for source in file.sources}
    flat = [] if rules.validates_only(config) else tables.without_signal(trained)
    if not options.allow_flat:
        output.problems += flat
    output.say(tables.same_everywhere(), WARNING)
    for text in tables:
        output.show(f"\n{text}")
    output.show("")
