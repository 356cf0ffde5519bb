"""Instructions with constraints that a program can check: made, or from local files.

A prompt names a topic and two to four constraints that fit together:

    Write something short about coffee. Use the word "old". Use at most 10 words. End with "!".

Three quarters ask for prose, the others for a list or for JSON, half each. The test split has
topics and keywords that the train split never has. Of local files, an object is
{"question": ..., "answer": ...} with the constraints as the answer; `score.py` has their form.
"""

import json
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from verl_gdpo.tasks.constraints.score import MARKERS, TASK, WORD
from verl_gdpo.tasks.preparation.schema import Row
from verl_gdpo.tasks.preparation.sources import Sources, make_row, row_of_question, seeded

TOPICS = WORD.findall(
    """coffee rain trains bread oceans winter music dogs books tea mountains moonlight cats gardens
    school bicycles birds snow rivers cheese cities football bees apples ships summer clocks horses
    paper nights cooking trees shoes islands soup friends letters stars doors honey bridges sleep
    windows salt maps lamps wool markets storms chairs kites towers milk songs dreams tomatoes"""
)
TEST_EVERY = 4  # of the topics, and of the keywords
KEYWORDS = WORD.findall(
    """old red warm slow bright small quiet never always water people time morning house hand world
    little friend light away together under often green simple long"""
)
ENDINGS = ("!", "?", "the end.", "thank you.", "that is all.")
KEYS = ("name", "color", "use", "place", "size", "taste")
PROSE = "Write something short about {}."
OPENERS = {"prose": PROSE, "bullets": "Make a list about {}.", "json": "Describe {}."}


def phrase_of(name: str, value: Any) -> str:
    """Return the sentence of a prompt that asks for a constraint."""
    if name == "keyword":
        noun = "word" if len(value) == 1 else "words"
        return f"Use the {noun} {_quoted(value)}."
    if name == "case":
        return f"Write in {'lower case' if value == 'lower' else 'CAPITAL LETTERS'} only."
    if name == "ending":
        return f'End with "{value}"'
    if name == "json":
        return f"Answer only with a JSON object with the keys {_quoted(value)}."
    low, high = value
    number = str(low) if low == high else f"{low} to {high}" if low > 1 else f"at most {high}"
    if name == "bullets":
        return f'Write exactly {number} items, each on a line that begins with "{MARKERS[0]}".'
    return (
        f"{'Write' if name == 'sentences' else 'Use'} {number} {name[: -1 if high == 1 else None]}."
    )


def _quoted(texts: list[str]) -> str:
    return " and ".join(f'"{text}"' for text in texts)


def _own(words: list[str], split: str) -> list[str]:
    """Those of one split, so that its prompts share no topic and no keyword with the other's."""
    return [
        w for i, w in enumerate(words) if (i % TEST_EVERY == TEST_EVERY - 1) == (split == "test")
    ]


def _constraints(rng: Random, form: str, split: str) -> dict[str, Any]:
    """Some constraints that one response can meet."""
    most, sentences, bullets = rng.choice((6, 9, 12)), rng.randint(1, 2), rng.randint(2, 3)
    values: Mapping[str, Any] = {
        "bullets": [bullets, bullets],
        "json": rng.sample(KEYS, 2),
        "keyword": rng.sample(_own(KEYWORDS, split), rng.choice((1, 1, 2))),
        "sentences": [sentences, sentences],
        "words": rng.choice(([1, most], [most, most + 8])),
        "case": rng.choice(("lower", "upper")),
        "ending": rng.choice(ENDINGS),
    }
    names = rng.sample(("keyword", "sentences", "words", "case", "ending"), rng.randint(2, 4))
    if form != "prose":  # capital letters would change the keys of JSON
        names = [form, "case" if form == "bullets" and most % 2 else "keyword"]
    return {name: value for name, value in values.items() if name in names}


def _made_row(rng: Random, split: str) -> Row:
    form = rng.choice(("prose",) * 6 + ("bullets", "json"))
    asked = _constraints(rng, form, split)
    opener = OPENERS[form].format(rng.choice(_own(TOPICS, split)))
    phrases = [phrase_of(name, value) for name, value in asked.items()]
    return make_row(TASK, " ".join([opener, *phrases]), json.dumps(asked))


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(TASK, partial(row_of_question, TASK), make_rows=make_rows, made_rows=2000)
