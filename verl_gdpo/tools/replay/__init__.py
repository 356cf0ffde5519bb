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
from verl_gdpo.tools.replay.comparison import (
    OF_SCORE,
    Group,
    Replay,
    StepAdvantages,
    StepReport,
)
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
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
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
    """Return the steps that `FIRST:LAST` stands for, with both; a missing one sets no limit.

    >>> step_range("7:9"), step_range("7")
    (range(7, 10), range(7, 8))

    Raises:
        ValueError: FIRST or LAST is no whole number.
    """
    first, colon, last = text.partition(":")
    if not colon:
        return range(int(first), int(first) + 1)
    start = int(first) if first else 0
    end = int(last) + 1 if last else sys.maxsize
    return range(start, end)


def _run(arguments: argparse.Namespace) -> int:
    """Replay a dump, print what differs, and return the exit code."""
    scorer = None
    if arguments.scorer:
        scorer = Scorer.of(arguments.scorer, arguments.data_source)
    steps = arguments.steps
    if steps is None:
        steps = range(sys.maxsize)
    complete, incomplete = dump_files(arguments.folder)
    files = [file for file in complete if int(file.stem) in steps]
    left_out = [file for file in incomplete if int(file.stem) in steps]
    if not files:
        raise ValueError(f"--steps: no dump of these in {arguments.folder}")

    path = arguments.config or config_of_run(arguments.folder)
    is_ours = has_rewards(files[0])
    if scorer is None and not is_ours:
        raise ValueError(f"{files[0]}: {SUMMED}")
    own = _own(path, files, scorer, "gdpo" if is_ours else "grpo")
    if scorer is not None:
        scorer = scorer.with_options_of(own.run)
    is_about_a_reward = any(key_of(each).startswith(OF_A_REWARD) for each in arguments.overrides)
    if scorer is None and is_about_a_reward:
        own = replace(own, dumped=dumped_rewards(files[0]))

    alternatives = choose(own, arguments.arm, arguments.overrides)
    replay = Replay(own, alternatives, arguments.top, scorer).read(files)
    is_reproduced = _print(replay, path, left_out)
    return 0 if is_reproduced else 1


def _own(path: Path | None, files: Sequence[Path], scorer: Scorer | None, estimator: str) -> Arm:
    """Return the run's own settings.

    Args:
        path: the file with the run's configuration; None if there is none.
        files: the dumps that are replayed.
        scorer: whose rewards replace those of the dump.
        estimator: the one of a run without a configuration.
    """
    if path is None:
        return Arm("run", {"adv_estimator": estimator}, {})
    own = read_run(path, data_sources(files))
    if scorer is not None:
        # The bounds that the run's scorers declare are not those of another scorer.
        return replace(own, declared={})
    return own


def choose(own: Arm, names: Sequence[str], overrides: Sequence[str]) -> list[Arm]:
    """Return the alternatives that the command line asks for; see `EPILOG`.

    Raises:
        ValueError: an arm or a setting is unknown, or training would refuse it.
    """
    if overrides and not names:
        return [own.changed("changed", overrides)]
    if not names:
        default = {"gdpo": ["grpo"], "grpo": ["gdpo"]}
        names = default.get(own.estimator, ["gdpo", "grpo"])
    arms = [own.as_arm(name) for name in names]
    if overrides:
        return [arm.changed(arm.name, overrides) for arm in arms]
    return arms


def _print(replay: Replay, path: Path | None, left_out: Sequence[Path]) -> bool:
    """Print all of it; return whether the run's settings reproduce the logged advantages."""
    samples = sum(step.sample_count for step in replay.steps)
    source = f"the run's settings are in {path}"
    if path is None:
        source = "no configuration of the run was found, so the defaults are used"
    steps = f"{len(replay.steps)} steps"
    if len(replay.steps) == 1:
        steps = "1 step"
    print(f"{steps}, {samples:,} samples; {source}")
    for dump in left_out:
        print(f"Step {dump.stem} is left out, because {dump} has no end: {WRITING}.")
    print(f"{replay.own.name}: {printable(str(replay.own))}")
    for arm in replay.alternatives:
        print(f"{arm.name}: {printable(str(arm))}")
    is_reproduced, sentence = _reproduced(replay)
    print(printable(sentence))
    if replay.scorer:
        if replay.scorer.options:
            options = printable(str(dict(replay.scorer.options)))
            print(f"--scorer has the options of the run's configuration: {options}")
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
    worst = replay.worst
    if replay.reference == OF_SCORE:
        return True, "The dump has no advantages: compared with verl's grpo on the dumped score."
    if worst is None:
        why = f"adv_estimator={replay.own.estimator}"
        if replay.scorer:
            why = "--scorer has other rewards"
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
    """Return a table of a group's rewards, advantages and beginnings of responses.

    Args:
        width: of the terminal, in characters; responses fill what is left of it.
    """
    names: dict[str, None] = {}
    for row in group.rows:
        names.update(dict.fromkeys(row["rewards"]))
    header = ["#"]
    header.extend(names)
    header.extend(group.advantages)
    header.append("response")
    lines = []
    for i, row in enumerate(group.rows):
        line = [str(i)]
        for name in names:
            line.append(_value(row["rewards"].get(name)))
        for advantages in group.advantages.values():
            # + 0.0 makes -0.0 positive
            line.append(f"{round(advantages[i], 3) + 0.0:.3f}")
        line.append("")
        lines.append(line)

    # Only a table without responses says how much room it leaves for them.
    ruler = render(header, lines).splitlines()[1]
    left = width - width_of(ruler) + len("response")
    for row, line in zip(group.rows, lines, strict=True):
        line[-1] = shorten(str(row.get("output", "")), max(left, MIN_RESPONSE))
    distances = ", ".join(f"{name} {value:.2f}" for name, value in group.distance.items())
    title = f"step {group.step}, group {printable(group.id)}; distance: {distances}"
    return f"{title}\n{render(header, lines, left=(len(header) - 1,))}"


def _value(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:.3g}"
    if value is None:
        return "-"
    return str(value)


def step_table(steps: Sequence[StepReport], name: str) -> str:
    """Return a table of `name` against the reference; the last line is for all steps."""
    parts = np.array_split(np.arange(len(steps)), min(len(steps), LINES))
    rows = []
    for part in parts:
        joined = [steps[i] for i in part]
        rows.append(_step_row(_numbers_of(joined), joined, name))
    if len(steps) > 1:
        rows.append(_step_row("all", steps, name))
    return render(HEADER, rows)


def _numbers_of(steps: Sequence[StepReport]) -> str:
    """Return the number of a step, or the first and the last one of several."""
    first, last = steps[0].number, steps[-1].number
    if first == last:
        return str(first)
    return f"{first}-{last}"


def _step_row(title: str, steps: Sequence[StepReport], name: str) -> list[str]:
    """Return a table row with the means over the steps, weighted by their samples."""
    sizes = [step.sample_count for step in steps]
    references = [step.reference for step in steps]
    others = [step.columns[name] for step in steps]
    correlations = []
    distances = []
    for reference, other in zip(references, others, strict=True):
        correlations.append(reference.correlation(other))
        distances.append(float(reference.distance_B(other).mean()))

    def both(
        value_of: Callable[[StepAdvantages], float | None], show: Callable[[float], str]
    ) -> str:
        of_reference = _mean(map(value_of, references), sizes, show)
        of_other = _mean(map(value_of, others), sizes, show)
        return f"{of_reference} | {of_other}"

    return [
        title,
        f"{sum(sizes):,}",
        _mean(correlations, sizes, "{:.3f}".format),
        _mean(distances, sizes, "{:.3f}".format),
        both(lambda column: column.silent_groups, "{:.1%}".format),
        both(lambda column: column.tied_pairs, "{:.1%}".format),
        both(lambda column: column.std, "{:.2f}".format),
    ]


def _mean(
    values: Iterable[float | None], sizes: Sequence[int], show: Callable[[float], str]
) -> str:
    """Return the mean of the values that are not None, weighted by their sizes."""
    known = [(value, n) for value, n in zip(values, sizes, strict=True) if value is not None]
    if not known:
        return "-"
    total = sum(value * n for value, n in known)
    return show(total / sum(n for _, n in known))
