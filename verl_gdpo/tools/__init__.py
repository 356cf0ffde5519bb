"""The subcommands of `verl-gdpo`: data, check, run, summary, evaluate, replay and report."""

from pathlib import Path

import verl_gdpo

RECIPES = Path(verl_gdpo.__file__).resolve().parent / "recipes"
