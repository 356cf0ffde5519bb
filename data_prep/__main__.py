"""Runs `verl-gdpo data`."""

import sys

from verl_gdpo.terminal import printing
from verl_gdpo.tools.data import main

if __name__ == "__main__":
    sys.exit(printing(lambda: main(sys.argv[1:])))
