"""Recomputes the advantages in a run's dump, under its own and under other settings.

verl-gdpo replay DIR [--arm NAME ...] [key=value ...]
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import numpy as np

from verl_gdpo.algorithm.zero import SAME_STD
from verl_gdpo.terminal import printable, render, shorten, width_of
from verl_gdpo.tools.advice import TITLE, Evidence, describe
from verl_gdpo.tools.replay.arms import OF_A_REWARD, Arm, key_of, read_run, shown_arms
from verl_gdpo.tools.replay.comparison import OF_SCORE, Group, Replay, StepReport
from verl_gdpo.tools.run_folder.dump_reader import (
    HOW,
    SUMMED,
    WRITING,
    Scorer,
    data_sources,
    dump_files,
    dumped_rewards,
    has_rewards,
)
from verl_gdpo.tools.run_folder.folder import config_of_run

MIN_RESPONSE = 24  # a response gets at least this many columns
LINES = 12  # a table over steps has at most this many lines; a line may join several steps
EPILOG = """\
`key=value` are overrides of the training command, and what training would refuse is refused. With
--arm, they change each arm, and else the run's own settings. An arm keeps the run's rewards,
weights, conditions and eps. By default, a gdpo run is compared with grpo, and a grpo run with gdpo.
A weight for one reward leaves the other rewards as they are. In training, a run that names one
reward leaves out the others: replay prints the line with all of them.

  verl-gdpo replay runs/my_run algorithm.gdpo.rewards.format=0.2
  verl-gdpo replay runs/my_run --arm grpo --arm gdpo_token
  verl-gdpo replay runs/my_run '++algorithm.gdpo.rewards={format: 0.2, correctness: 1.0}'
  verl-gdpo replay ROLLOUT_DATA_DIR --scorer my_rewards.py:compute_score --arm gdpo

The exit code is 1 if the run's own settings do not reproduce the logged advantages."""
HEADER = ("step", "samples", "correlation", "distance", "no signal", "tied pairs", "spread")
LEGEND = f"""\
a | b        a is of the advantages that are compared with, b of the arm above the table
correlation  of the two advantages of each sample
distance     mean |difference| of the two, each divided by its spread, because scales differ.
             Groups without a signal in both do not count in the spread
no signal    share of the groups in which every advantage is 0
tied pairs   share of the pairs of a group with different rewards, but the same advantage
spread       standard deviation of a step's advantages
Advantages are the same, or 0, up to {SAME_STD:g} of their step's spread. A line for several steps
holds means over the steps, weighted by their samples."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # the terminal may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except ValueError as error:
        # Several mistakes of the settings have a line each.
        lines = [printable(line) for line in str(error).splitlines()]
        print("verl-gdpo replay:", "\n".join(lines), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo replay",
        description="Recompute the advantages of a dump and show where they differ.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a run's folder, its rollouts/, or one dump")
    add("overrides", nargs="*", metavar="key=value", help="other settings; see below")
    add("--config", type=Path, help="the run's configuration, if it is not in DIR")
    add("--scorer", metavar="NAME", help=f"scores the samples again: {HOW}")
    add("--data-source", metavar="NAME", help="of rows without one, for --scorer")
    arms = f"one of {', '.join(shown_arms())}"
    add("--arm", action="append", default=[], metavar="NAME", help=arms)
    add("--steps", type=step_range, metavar="FIRST:LAST", help="these steps only; or one step")
    add("--top", type=int, default=3, help="number of groups to show for each alternative (3)")
    return parser


def step_range(text: str) -> range:
    first, colon, last = text.partition(":")
    return range(int(first or 0), 1 + (int(last or sys.maxsize - 1) if colon else int(first)))


def _run(arguments: argparse.Namespace) -> int:
    scorer = arguments.scorer and Scorer.of(arguments.scorer, arguments.data_source)
    steps = arguments.steps or range(sys.maxsize)
    files, unfinished = dump_files(arguments.folder)
    files = [file for file in files if int(file.stem) in steps]
    if not files:
        raise ValueError(f"--steps: no dump of these in {arguments.folder}")
    path = arguments.config or config_of_run(arguments.folder)
    if scorer is None and not has_rewards(files[0]):
        raise ValueError(f"{files[0]}: {SUMMED}")
    own = _own(path, files, scorer, "gdpo" if has_rewards(files[0]) else "grpo")
    if scorer is None and any(key_of(each).startswith(OF_A_REWARD) for each in arguments.overrides):
        own = replace(own, dumped=dumped_rewards(files[0]))
    alternatives = choose(own, arguments.arm, arguments.overrides)
    replay = Replay(own, alternatives, arguments.top, scorer).read(files)
    is_reproduced = _print(replay, path, [dump for dump in unfinished if int(dump.stem) in steps])
    return 0 if is_reproduced else 1


def _own(path: Path | None, files: Sequence[Path], scorer: Scorer | None, estimator: str) -> Arm:
    """The run's own settings; bounds are those of its scorers, not of another one."""
    if path is None:
        return Arm("run", {"adv_estimator": estimator}, {})
    own = read_run(path, data_sources(files))
    return replace(own, declared={}) if scorer else own


def choose(own: Arm, names: Sequence[str], overrides: Sequence[str]) -> list[Arm]:
    """Return the alternatives that the command line asks for; see `EPILOG`.

    Raises:
        ValueError: an arm or a setting is unknown, or training would refuse it.
    """
    if overrides and not names:
        return [own.changed("changed", overrides)]
    default = {"gdpo": ["grpo"], "grpo": ["gdpo"]}.get(own.estimator, ["gdpo", "grpo"])
    arms = [own.as_arm(name) for name in names or default]
    return [arm.changed(arm.name, overrides) if overrides else arm for arm in arms]


def _print(replay: Replay, path: Path | None, left_out: Sequence[Path]) -> bool:
    """Print all of it; return whether the run's settings reproduce the logged advantages."""
    samples = sum(len(step.columns[replay.reference].A_B) for step in replay.steps)
    source = f"the run's settings are in {path}"
    if path is None:
        source = "no configuration of the run was found, so the defaults are used"
    steps = "1 step" if len(replay.steps) == 1 else f"{len(replay.steps)} steps"
    print(f"{steps}, {samples:,} samples; {source}")
    for dump in left_out:
        print(f"Step {dump.stem} is left out, because {dump} has no end: {WRITING}.")
    for arm in (replay.own, *replay.alternatives):
        print(f"{arm.name}: {printable(str(arm))}")
    is_reproduced, sentence = _reproduced(replay)
    print(printable(sentence))
    if replay.scorer:
        print(replay.rescored)
    width = shutil.get_terminal_size((120, 40)).columns
    evidence = Evidence(replay.evidence, replay.own.settings)
    print(f"\n== {TITLE} ==\n\n{describe(evidence, replay.own.run)}")
    for arm in replay.alternatives:
        print(f"\n== {arm.name} ==\n\n{step_table(replay.steps, arm.name)}")
        groups = replay.most_different.get(arm.name, [])
        if groups:
            print(f"\nWhere {replay.reference} and {arm.name} differ most:")
        for group in groups:
            print(f"\n{group_table(group, width)}")
    print(f"\n{LEGEND}")
    return is_reproduced


def _reproduced(replay: Replay) -> tuple[bool, str]:
    """Return whether the run's settings reproduce the logged advantages, and a sentence on it."""
    worst, estimator = replay.worst, replay.own.estimator
    if replay.reference == OF_SCORE:
        return True, "The dump has no advantages: compared with verl's grpo on the dumped score."
    if worst is None:
        why = "--scorer has other rewards" if replay.scorer else f"adv_estimator={estimator}"
        return True, f"The logged advantages are not recomputed ({why}), but taken as they are."
    text = f"largest |difference| {worst.difference:.2g} over {replay.row_count:,} rows"
    if worst.part <= 1:
        return True, f"The run's settings reproduce the logged advantages: {text}."
    return False, (
        f"WARNING: the run's settings do not reproduce the logged advantages: {text} (float32 "
        f"allows {worst.allowed:.2g}), at step {worst.step}, {worst.uid}. Is it the run's "
        "configuration (--config), was it resumed with another, or is algorithm.use_kl_in_reward "
        "set?"
    )


def group_table(group: Group, width: int) -> str:
    """Return a table of a group's rewards, advantages and beginnings of responses."""
    names = list(dict.fromkeys(name for row in group.rows for name in row["rewards"]))
    header = ["#", *names, *group.advantages, "response"]
    rows = []
    for i, row in enumerate(group.rows):
        rewards = [_value(row["rewards"].get(name)) for name in names]
        # + 0.0 makes -0.0 positive
        advantages = [f"{round(of[i], 3) + 0.0:.3f}" for of in group.advantages.values()]
        rows.append([str(i), *rewards, *advantages, ""])
    left = width - width_of(render(header, rows).splitlines()[1]) + len("response")
    for row, line in zip(group.rows, rows, strict=True):
        line[-1] = shorten(str(row.get("output", "")), max(left, MIN_RESPONSE))
    distances = ", ".join(f"{name} {value:.2f}" for name, value in group.distance.items())
    title = f"step {group.step}, group {printable(group.id)}; distance: {distances}"
    return f"{title}\n{render(header, rows, left=(len(header) - 1,))}"


def _value(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)


def step_table(steps: Sequence[StepReport], name: str) -> str:
    """Return a table of `name` against the reference; the last line is for all steps."""
    parts = np.array_split(np.arange(len(steps)), min(len(steps), LINES))
    rows = [_step_row([steps[i] for i in part], name) for part in parts]
    if len(steps) > 1:
        rows.append(["all", *_step_row(steps, name)[1:]])
    return render(HEADER, rows)


def _step_row(steps: Sequence[StepReport], name: str) -> list[str]:
    """Return a table row with the means over the steps, weighted by their samples."""
    pairs = [(next(iter(step.columns.values())), step.columns[name]) for step in steps]
    sizes = [len(reference.A_B) for reference, _ in pairs]

    def both(attribute: str, show: Callable[[float], str]) -> str:
        sides = ([getattr(pair[i], attribute) for pair in pairs] for i in (0, 1))
        return " | ".join(_mean(values, sizes, show) for values in sides)

    return [
        "-".join(map(str, sorted({steps[0].number, steps[-1].number}))),
        f"{sum(sizes):,}",
        _mean([a.correlation(b) for a, b in pairs], sizes, "{:.3f}".format),
        _mean([float(a.distance_B(b).mean()) for a, b in pairs], sizes, "{:.3f}".format),
        both("silent_groups", "{:.1%}".format),
        both("tied_pairs", "{:.1%}".format),
        both("std", "{:.2f}".format),
    ]


def _mean(
    values: Iterable[float | None], sizes: Sequence[int], show: Callable[[float], str]
) -> str:
    """Return the mean of the values that are not None, weighted by their sizes."""
    there = [(v, n) for v, n in zip(values, sizes, strict=True) if v is not None]
    return show(sum(v * n for v, n in there) / sum(n for _, n in there)) if there else "-"
