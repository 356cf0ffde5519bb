"""`python -m data_prep TASK ...` in a checkout: the same as `verl-gdpo data TASK ...`.

The code is in `verl_gdpo/tasks/preparation/`, so that the installed package has it too.
"""

import sys

from verl_gdpo.terminal import printing
from verl_gdpo.tools.data import main

if __name__ == "__main__":
    sys.exit(printing(lambda: main(sys.argv[1:])))
