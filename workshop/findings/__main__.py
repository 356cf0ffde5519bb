"""Print how often the findings about a run are right. The exit code is 1 if a goal is missed."""

import argparse
import sys

from workshop.findings.rates import HELD_OUT, rates, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.findings", description=__doc__)
    parser.add_argument("--tuning", action="store_true", help="the runs the rules were tuned on")
    parser.add_argument("--part", type=float, default=1.0, help="of the runs; default: all")
    arguments = parser.parse_args()
    found = []
    for rate in rates(0 if arguments.tuning else HELD_OUT, arguments.part):
        print("  ".join(rate.cells()), file=sys.stderr, flush=True)
        found.append(rate)
    print(f"\n{table(found)}")
    return int(any(rate.missed for rate in found))


if __name__ == "__main__":
    sys.exit(main())
