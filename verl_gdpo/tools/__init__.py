"""The subcommands of `verl-gdpo`: data, check, run, summary, evaluate, replay and report."""

from pathlib import Path

import verl_gdpo

RECIPES = Path(verl_gdpo.__file__).resolve().parent / "recipes"

# Exit codes of `verl-gdpo check`, which the launcher reads. The last one says nothing of the
# configuration. argparse ends with 2 for a wrong option.
CHECK_REFUSES = (1, 2)
CHECK_FAULT = 3
