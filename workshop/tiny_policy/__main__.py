"""The command `python -m workshop.tiny_policy --out DIR [--seed S] [--steps N] [--data FILE]`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from verl_gdpo.terminal import printing
from workshop.tiny_policy.train import make_policy


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="workshop.tiny_policy")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="gets the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--data", metavar="PARQUET", type=Path, help="default: rows of its own")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # more help little at this size, and hurt on a busy machine
    # by default it ends the process at once, and the half-made folder stays
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        print(make_policy(args.out, seed=args.seed, data=args.data, steps=args.steps))
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"warm start: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(printing(main))
