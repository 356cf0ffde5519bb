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
        letters = "lower case" if value == "lower" else "CAPITAL LETTERS"
        return f"Write in {letters} only."
    if name == "ending":
        return f'End with "{value}"'
    if name == "json":
        return f"Answer only with a JSON object with the keys {_quoted(value)}."

    low, high = value
    if low == high:
        number = str(low)
    elif low > 1:
        number = f"{low} to {high}"
    else:
        number = f"at most {high}"
    if name == "bullets":
        return f'Write exactly {number} items, each on a line that begins with "{MARKERS[0]}".'
    noun = name
    if high == 1:
        noun = name.removesuffix("s")
    verb = "Write" if name == "sentences" else "Use"
    return f"{verb} {number} {noun}."


def _quoted(texts: list[str]) -> str:
    return " and ".join(f'"{text}"' for text in texts)


def _own(words: list[str], split: str) -> list[str]:
    """Those of one split, so that its prompts share no topic and no keyword with the other's."""
    own = []
    for place, word in enumerate(words):
        is_of_test = place % TEST_EVERY == TEST_EVERY - 1
        if is_of_test == (split == "test"):
            own.append(word)
    return own


def _constraints(rng: Random, form: str, split: str) -> dict[str, Any]:
    """Some constraints that one response can meet."""
    most = rng.choice((6, 9, 12))
    sentences = rng.randint(1, 2)
    bullets = rng.randint(2, 3)
    # All are drawn, also those that are left out. A prompt has them in this order.
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
    if form == "json":
        # Capital letters would change the keys of JSON.
        names = ["json", "keyword"]
    if form == "bullets":
        names = ["bullets", "keyword"]
        # That is a third of them, and costs no random number.
        if most % 2 == 1:
            names = ["bullets", "case"]
    return {name: value for name, value in values.items() if name in names}


def _made_row(rng: Random, split: str) -> Row:
    form = rng.choice(("prose",) * 6 + ("bullets", "json"))
    asked = _constraints(rng, form, split)
    topic = rng.choice(_own(TOPICS, split))
    sentences = [OPENERS[form].format(topic)]
    for name, value in asked.items():
        sentences.append(phrase_of(name, value))
    return make_row(TASK, " ".join(sentences), json.dumps(asked))


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(TASK, partial(row_of_question, TASK), make_rows=make_rows, made_rows=2000)
