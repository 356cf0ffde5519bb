"""Draws the pictures of workshop/experiments/RESULTS.md from the committed data.

python -m workshop.experiments              # map/map.png, trainer/*.png
python -m workshop.experiments --advice     # counts how often the advice is right
python -m workshop.experiments --weights    # counts where weights that keep GRPO's shares are found
"""

import argparse
from pathlib import Path

from workshop.experiments import advice, weights
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.trainer import pictures as trainer_pictures

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--advice", action="store_true", help="draw nothing")
    parser.add_argument("--weights", action="store_true", help="draw nothing")
    arguments = parser.parse_args()
    if arguments.weights:
        print(weights.table(list(weights.results())))
        return
    if arguments.advice:
        for what, numbers in advice.rows():
            print(f"| {what} | {numbers} |")
        return
    map_pictures.draw(HERE / "map")
    trainer_pictures.draw(HERE / "trainer")


if __name__ == "__main__":
    main()
