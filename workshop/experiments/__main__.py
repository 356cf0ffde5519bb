"""Makes the pages of the experiments and their pictures, from the committed results.

python -m workshop.experiments              # docs/when_gdpo_helps.md and docs/evidence.md
python -m workshop.experiments --advice     # prints the numbers of docs/advice.md
python -m workshop.experiments --settings   # prints every setting of the map
"""

import argparse
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from workshop.experiments import advice, bandit, demonstration
from workshop.experiments.map import compare as map_compare
from workshop.experiments.map import page as map_page
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.trainer import compare, pictures
from workshop.experiments.trainer import page as trainer_page

DOCS = Path(__file__).parents[2] / "docs"
FILES = ("when_gdpo_helps.md", "evidence.md")


def page(file: str) -> str:
    """Return the text of a page: its template says the words, and the data the numbers."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(f"{file}.jinja").render(
        bandit=bandit,
        compare=compare,
        demonstration=demonstration,
        map=map_page,
        maps=map_compare,
        trainer=trainer_page,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--advice", action="store_true", help="write nothing")
    parser.add_argument("--settings", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.advice:
        for what, numbers in advice.rows():
            print(f"| {what} | {numbers} |")
    if arguments.settings:
        print(*map_page.all_settings(), sep="\n")
    if arguments.advice or arguments.settings:
        return
    for file in FILES:
        (DOCS / file).write_text(page(file))
    map_pictures.draw(DOCS / "evidence")
    pictures.draw(DOCS / "evidence")


if __name__ == "__main__":
    main()
