"""Recomputes the advantages in a run's rollout dump, under its own and under other settings.

verl-gdpo replay DIR [--arm NAME ...] [key=value ...]
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import pandas as pd

from verl_gdpo.algorithm.zero import REPRODUCED
from verl_gdpo.atomic import replace_together
from verl_gdpo.run.dump_reader import SUMMED, WRITING, data_sources, dump_files, has_rewards
from verl_gdpo.run.folder import config_of_run
from verl_gdpo.run.scorer import HOW, Scorer
from verl_gdpo.terminal import printable
from verl_gdpo.tools.advice import TITLE, describe
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.replay.arms import ARMS, Arm, read_run
from verl_gdpo.tools.replay.comparison import OF_SCORE, Replay
from verl_gdpo.tools.replay.tables import LEGEND, comparison_tables

FORMATS = (".parquet", ".json", ".jsonl")
EPILOG = """\
`key=value` are overrides of the training command. They are applied to the run's configuration as
there, and what training would refuse is refused. `++` works whether a key is set or not. With
--arm, they change each arm. Without --arm, they change the run's own settings. An arm keeps the
run's rewards, weights, conditions and eps. Without overrides and --arm, a gdpo run is compared
with the arm grpo, and a grpo run with the arm gdpo.

  verl-gdpo replay runs/my_run --arm grpo --arm gdpo_token
  verl-gdpo replay runs/my_run '++algorithm.gdpo.rewards={format: 0.2, correctness: 1.0}'
  verl-gdpo replay ROLLOUT_DATA_DIR --scorer my_rewards.py:compute_score --arm gdpo

The dumps of verl without verl-gdpo hold one summed score, and no advantages. --scorer scores them
again, and the arms are compared with what verl's grpo makes of the dumped score.

The exit code is 1 if the run's own settings do not reproduce the logged advantages."""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # the terminal may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except ValueError as error:
        print(f"replay: {printable(str(error))}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo replay",
        description="Recompute the advantages of a rollout dump and show where they differ.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a run's folder, its rollouts/, or one dump")
    add("overrides", nargs="*", metavar="key=value")
    add("--config", type=Path, help="the run's configuration, if it is not in DIR")
    add("--scorer", metavar="NAME", help=f"scores the rollouts again: {HOW}")
    add("--data-source", metavar="NAME", help="of rows without one, for --scorer")
    add(
        "--weak-sandbox", action="store_true", help="let --scorer coding run programs in a weak one"
    )
    add("--arm", action="append", default=[], metavar="NAME", help=f"one of {', '.join(ARMS)}")
    add("--steps", type=step_range, metavar="FIRST:LAST", help="these steps only; or one step")
    add("--top", type=int, default=3, help="number of groups to show for each alternative (3)")
    add("--out", type=Path, metavar="FILE", help="write all rollouts as .parquet or .json (lines)")
    return parser


def step_range(text: str) -> range:
    first, colon, last = text.partition(":")
    return range(int(first or 0), 1 + (int(last or sys.maxsize - 1) if colon else int(first)))


def _run(arguments: argparse.Namespace) -> int:
    _check_usage(arguments)
    options = {"weak_sandbox": True} if arguments.weak_sandbox else {}
    scorer = arguments.scorer and Scorer.of(arguments.scorer, arguments.data_source, **options)
    files, unfinished = dump_files(arguments.folder)
    steps = arguments.steps
    if steps is not None:
        files = _chosen(files, steps)
    path = arguments.config or config_of_run(arguments.folder)
    if scorer is None and not has_rewards(files[0]):
        raise ValueError(f"{files[0]}: {SUMMED}")
    own = _own(path, files, scorer, "gdpo" if has_rewards(files[0]) else "grpo")
    alternatives = choose(own, arguments.arm, arguments.overrides)
    keeps_table = arguments.out is not None
    replay = Replay(own, alternatives, arguments.top, keeps_table, scorer).read(files)
    left_out = [dump for dump in unfinished if steps is None or int(dump.stem) in steps]
    is_reproduced = _print(replay, path, left_out)
    if arguments.out is not None:
        _write(pd.concat(replay.tables, ignore_index=True), arguments.out)
    return 0 if is_reproduced else 1


def _check_usage(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if out is not None and out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: expected a name that ends in {', '.join(FORMATS)}")
    if arguments.top < 0:
        raise ValueError(f"--top {arguments.top}: expected 0 or more")
    if arguments.weak_sandbox and not arguments.scorer:
        raise ValueError("--weak-sandbox goes with --scorer coding")


def _print(replay: Replay, path: Path | None, left_out: Sequence[Path]) -> bool:
    """Print all of it; return whether the run's settings reproduce the logged advantages."""
    rollouts = sum(len(step.columns[replay.reference].A_B) for step in replay.steps)
    source = f"the run's settings are in {path}"
    if path is None:
        source = "no configuration of the run was found, so the defaults are used"
    print(f"{len(replay.steps)} steps, {rollouts:,} rollouts; {source}")
    for dump in left_out:
        print(f"Step {dump.stem} is left out, because {dump} has no end: {WRITING}.")
    for arm in (replay.own, *replay.alternatives):
        print(f"{arm.name}: {printable(str(arm))}")
    is_reproduced, sentence = _reproduced(replay, path)
    print(sentence)
    for line in _rescored(replay):
        print(printable(line))
    width = shutil.get_terminal_size((120, 40)).columns
    print(f"\n== {TITLE} ==\n\n{describe(Evidence(replay.evidence))}")
    for arm in replay.alternatives:
        print(f"\n== {arm.name} ==\n\n{comparison_tables(replay, arm.name, width)}")
    print(f"\n{LEGEND}")
    return is_reproduced


def _write(table: pd.DataFrame, out: Path) -> None:
    with replace_together(out) as (file,):
        if out.suffix == ".parquet":
            table.to_parquet(file, index=False)
        else:
            table.to_json(file, orient="records", lines=True, double_precision=15)
    print(f"\n{len(table):,} rollouts written to {out}")


def _own(path: Path | None, files: Sequence[Path], scorer: Scorer | None, estimator: str) -> Arm:
    """The run's own settings; bounds are those of its scorers, not of another one."""
    if path is None:
        return Arm("run", {"adv_estimator": estimator}, {})
    own = read_run(path, data_sources(files))
    return replace(own, declared={}) if scorer else own


def _chosen(files: Sequence[Path], steps: range) -> list[Path]:
    chosen = [file for file in files if int(file.stem) in steps]
    if not chosen:
        raise ValueError(
            f"--steps: none of these is in {files[0].parent}, which has {files[0].stem} to "
            f"{files[-1].stem}"
        )
    return chosen


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


def _reproduced(replay: Replay, path: Path | None) -> tuple[bool, str]:
    """Return whether the run's settings reproduce the logged advantages, and a sentence on it."""
    worst, estimator = replay.worst, replay.own.estimator
    if replay.reference == OF_SCORE:
        used = f"the run may not have used: its estimator is {estimator if path else 'not known'}"
        if path is not None and estimator == "grpo":
            used = "is what the run trained on"
        return True, (
            "The dump holds no advantages. The arms are compared with verl's grpo on the dumped "
            f"score, which {used}."
        )
    if replay.scorer is not None:
        return True, "The logged advantages are compared as they are: --scorer has other rewards."
    if worst is None:
        return True, (
            f"The run's adv_estimator={estimator} is not recomputed: its logged advantages are "
            "compared as they are."
        )
    text = f"largest |difference| {worst.difference:.2g} over {replay.row_count:,} rows"
    if worst.difference <= REPRODUCED:
        return True, f"The run's settings reproduce the logged advantages: {text}."
    if path is None:
        reason = "name the run's configuration with --config"
    elif replay.own.algorithm.get("use_kl_in_reward"):
        reason = "algorithm.use_kl_in_reward=True, and a dump does not hold the KL"
    else:
        reason = "was the run resumed with other settings, or another version?"
    return False, (
        f"WARNING: the run's settings do not reproduce the logged advantages: {text} (allowed "
        f"{REPRODUCED:g}), at step {worst.step}, {printable(worst.uid)}; {reason}"
    )


def _rescored(replay: Replay) -> list[str]:
    """Sentences on how the scores of --scorer compare with those of the dump."""
    rescored = replay.rescored
    if not rescored.rollouts:
        return []
    same = f"{rescored.rollouts - rescored.other:,} of {rescored.rollouts:,} rollouts"
    sentences = [f"--scorer gives the dumped score in {same}."]
    if rescored.other:
        sentences[0] += f" WARNING: not for {rescored.example}"
    if rescored.not_the_sum:
        sentences.append(
            f"WARNING: in {rescored.not_the_sum:,} rollouts its `score` is not the sum of its "
            "rewards. Every number counts with weight 1, unless algorithm.gdpo.rewards names "
            "rewards and weights; weight 0 leaves one out"
        )
    return sentences
