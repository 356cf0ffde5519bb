"""Makes the pages of the experiments and their pictures, from the committed results.

python -m workshop.experiments            # docs/when_gdpo_helps.md and docs/in_verls_trainer.md
python -m workshop.experiments --advice   # prints the numbers of docs/advice.md
"""

import argparse
from pathlib import Path

from workshop.experiments import advice
from workshop.experiments.map import page as map_page
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.trainer import page as trainer_page
from workshop.experiments.trainer import pictures as trainer_pictures

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[str, str]:
    """{file in docs/: its text}."""
    return {
        "when_gdpo_helps.md": map_page.render(),
        "when_gdpo_helps/all_settings.md": map_page.render("all_settings.md.jinja"),
        "in_verls_trainer.md": trainer_page.render(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--advice", action="store_true", help="write nothing")
    if parser.parse_args().advice:
        for what, numbers in advice.rows():
            print(f"| {what} | {numbers} |")
        return
    for file, text in pages().items():
        (DOCS / file).write_text(text)
    map_pictures.draw(DOCS / "when_gdpo_helps")
    trainer_pictures.draw(DOCS / "in_verls_trainer")


if __name__ == "__main__":
    main()
