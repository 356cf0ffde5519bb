"""Print how often the findings about a run are right. The exit code is 1 if a goal is missed."""

import argparse
import sys

from workshop.findings.made_runs import HELD_OUT, OTHER_HELD_OUT, OTHER_TUNING, TUNING
from workshop.findings.rates import healthy_rates, sick_rates, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop.findings", description=__doc__)
    parser.add_argument("--tuning", action="store_true", help="the runs the rules were tuned on")
    parser.add_argument("--part", type=float, default=1.0, help="of the runs; default: all")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default: 0")
    arguments = parser.parse_args()
    if arguments.tuning:
        part, other = TUNING, OTHER_TUNING
    else:
        part, other = HELD_OUT, OTHER_HELD_OUT
    sick = []
    for rate in sick_rates(part, arguments.part, arguments.first):
        print(rate, file=sys.stderr, flush=True)
        sick.append(rate)
    healthy = healthy_rates(part, arguments.part, arguments.first)
    others = healthy_rates(other, arguments.part, arguments.first)
    print(*healthy, *others, sep="\n", file=sys.stderr)
    print(f"\n{table(healthy)}\n\n{table(others)}\n\n{table(sick)}")
    return int(any(rate.missed for rate in [healthy[0], others[0], *sick]))


if __name__ == "__main__":
    sys.exit(main())
