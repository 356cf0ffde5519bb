"""Draws the pictures of docs/evidence.md from the committed results.

python -m workshop.experiments              # docs/evidence/*.png
python -m workshop.experiments --advice     # prints the numbers of docs/advice.md
"""

import argparse
from pathlib import Path

from workshop.experiments import advice
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.trainer import pictures as trainer_pictures

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--advice", action="store_true", help="draw nothing")
    if parser.parse_args().advice:
        for what, numbers in advice.rows():
            print(f"| {what} | {numbers} |")
        return
    map_pictures.draw(DOCS / "evidence")
    trainer_pictures.draw(DOCS / "evidence")


if __name__ == "__main__":
    main()
