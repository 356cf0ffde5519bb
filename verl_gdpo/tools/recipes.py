"""Prints the folder of the recipes, for the option `--config-dir` of a verl command.

python -m verl.trainer.main_ppo --config-dir "$(verl-gdpo recipes)" --config-name train ...
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import verl_gdpo

FOLDER = Path(verl_gdpo.__file__).resolve().parent / "recipes"


def main(argv: Sequence[str]) -> int:
    """Print the folder and return the exit code."""
    doc = str(__doc__).splitlines()[0]
    argparse.ArgumentParser(prog="verl-gdpo recipes", description=doc).parse_args(argv)
    print(FOLDER)
    return 0
