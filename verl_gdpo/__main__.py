"""The command `verl-gdpo`, also `python -m verl_gdpo`. Subcommands are modules in tools/."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import verl_gdpo
from verl_gdpo.terminal import needs_extra, printing, speaking_as
from verl_gdpo.tools import RECIPES

COMMANDS = {
    "data": "prepare the parquet files of a task",
    "recipes": "print the folder of the recipes, for --config-dir",
    "check": "say whether a training configuration can work, before anything starts",
    "run": "run a training, show its progress, and leave no process behind",
    "summary": "print the table and the findings of a run",
    "replay": "recompute the advantages of a run under other settings, and compare them",
    "evaluate": "evaluate a checkpoint or a model on a benchmark or your rows, and compare results",
    "report": "write a page with curves and examples of one run, or of several side by side",
}
# Commands whose module has another name. The package `run` is imported in verl's workers too, so
# it stays empty.
MODULES = {"run": "run.launch"}


def main() -> int:
    """Run one subcommand and return its exit code."""
    words = sys.argv[1:] or ["--help"]
    name = words[0]
    arguments = words[1:]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(verl_gdpo.__version__)
        return 0
    if name not in COMMANDS:
        print(f"verl-gdpo: unknown command {name!r}\n{_usage()}", file=sys.stderr)
        return 2
    if name == "recipes":
        return printing(lambda: _recipes(arguments))
    # As in a training, a reward function imports its neighbours.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(f"verl_gdpo.tools.{MODULES.get(name, name)}")
        with speaking_as(f"verl-gdpo {name}"):
            return printing(lambda: int(module.main(arguments)))
    except ModuleNotFoundError as error:
        print(f"verl-gdpo {name}: {needs_extra(error)}", file=sys.stderr)
        return 1


def _usage() -> str:
    lines = ["usage: verl-gdpo COMMAND ... (COMMAND --help says more)"]
    for command, what in COMMANDS.items():
        lines.append(f"  {command:<10}{what}")
    lines.append("  --version print the version")
    return "\n".join(lines)


def _recipes(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo recipes",
        description="Print the folder of the installed recipes, which is for Hydra's --config-dir, "
        'as in: python -m verl.trainer.main_ppo --config-dir "$(verl-gdpo recipes)" --config-name '
        "train task=tool_rl run_dir=runs/first. A page in it says what each recipe sets.",
    )
    parser.parse_args(arguments)
    print(RECIPES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
