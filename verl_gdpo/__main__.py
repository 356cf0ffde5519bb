"""The command `verl-gdpo`, also `python -m verl_gdpo`. Subcommands are modules in tools/."""

import importlib
import os
import sys

import verl_gdpo
from verl_gdpo.terminal import needs_extra, printing
from verl_gdpo.tools import RECIPES

COMMANDS = {
    "data": "prepare the parquet files of a task",
    "recipes": "print the folder of the recipes, for --config-dir",
    "check": "say whether a training configuration can work, before anything starts",
    "summary": "print the table and the findings of a run",
    "replay": "recompute the advantages of a run under other settings, and compare them",
    "evaluate": "evaluate a checkpoint or a model on a benchmark, and compare results",
    "report": "write a page with curves and examples of one run, or of several side by side",
}


def main() -> int:
    """Run one subcommand and return its exit code."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name == "recipes":
        print(RECIPES)
        return 0
    if name in COMMANDS:
        # as in a training: a reward function imports its neighbours
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(f"verl_gdpo.tools.{name}")
            return printing(lambda: int(module.main(arguments)))
        except ModuleNotFoundError as error:
            print(f"verl-gdpo {name}: {needs_extra(error)}", file=sys.stderr)
            return 1
    if name == "--version":
        print(verl_gdpo.__version__)
        return 0
    asked = name in ("-h", "--help")
    lines = [f"  {command:<10}{what}" for command, what in COMMANDS.items()]
    problem = [] if asked else [f"verl-gdpo: unknown command {name!r}"]
    usage = [*problem, "usage: verl-gdpo COMMAND ... (COMMAND --help says more)", *lines]
    print("\n".join(usage), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
