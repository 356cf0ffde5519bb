"""Checks whether a training configuration can work. It starts no Ray, and loads no model.

verl-gdpo check [OPTIONS] [what stands behind `python -m verl.trainer.main_ppo`]

The arguments are those of the training command: `key=value`, and Hydra's --config-dir and
--config-name. The command lists all problems that it can find at once. The exit code is 1 if there
are problems.
"""

import argparse
import sys
from collections.abc import Sequence

from verl_gdpo.tools.check.output import Output, message_of, others_kept_away
from verl_gdpo.tools.compose import add_config_arguments, compose_arguments

# the end of --help, and a list in docs/check.md
NOT_CHECKED = """\
- the rewards of real responses: the made-up ones may be of a form that your function does not know
- a reward model, a judge or a sandbox service under load; those of a reward model are not tried
- the model's weights, and whether the rollout engine can run this model
- whether memory suffices: for FSDP, keys that ask for more than a table has are only said
- the nodes of a Ray cluster that runs; the start of the run compares their files of verl-gdpo
- the GPUs of a rollout with nodes of its own (`separate_async` and the like)
- files that verl fetches, your own dataset class, pictures, and more than 1,000 prompts of a file
- what your tools and agent loops do, and whether their files are there
- how fast the run is, and whether it learns"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)  # as Hydra takes them
    with others_kept_away(options.verbose) as out:
        output = Output(out, options.brief)
        _check(output, options)
        output.finish()
    for problem in dict.fromkeys(output.problems):  # verl and we may say the same
        print(f"check: {problem}", file=sys.stderr)
    if output.problems and not options.verbose:
        print("(-v shows what verl and others printed meanwhile)", file=sys.stderr)
    return 1 if output.problems else 0


def _check(output: Output, options: argparse.Namespace) -> None:
    config = output.ask(compose_arguments, options)
    if config is None:
        return
    try:
        # verl takes seconds to load, and what it prints has to be kept away
        from verl_gdpo.tools.check.look import look
    except Exception as error:
        output.problems.append(f"verl cannot be used: {message_of(error)}")
        return
    look(output, config, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo check",
        description=__doc__.splitlines()[0],
        epilog=f"It does not check:\n{NOT_CHECKED}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    add = parser.add_argument
    add("--elsewhere", action="store_true", help="the run will be on another machine, with GPUs")
    add("--rows", type=int, default=8, help="number of rows to try the rewards on")
    about = "how long to wait for the next answer of the reward function (default: 60)"
    add("--seconds", type=float, default=60.0, help=about)
    about = "the rewards may be the same for all made-up responses"
    add("--allow-flat", action="store_true", help=about)
    about = "print warnings, and the rest only if there is a problem"
    add("--brief", action="store_true", help=about)
    about = "show what verl and others print meanwhile"
    add("-v", "--verbose", action="store_true", help=about)
    return parser
