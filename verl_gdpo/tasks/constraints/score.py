r"""Instruction following: each constraint of a prompt that a program can check is a reward.

    Write something short about coffee. Use the word "old". Use at most 10 words. End with "!".
    -> Coffee is an old drink!

The kinds of constraints are those of IFEval (arXiv 2311.07911: keywords:existence,
length_constraints:number_sentences, change_case, startend:end_checker,
detectable_format:number_bullet_lists and json_format) and IFBench (arXiv 2507.02833:
count:word_count_range). Wording and checks are our own, and stricter where a policy could earn a
reward without doing what the prompt asks: a keyword is a whole word, JSON is an object with the
keys that are asked for, and a response without a word meets no constraint. The language is not
checked. Every check takes time that grows with the response alone.
"""

import json
import re
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any, NamedTuple

from verl_gdpo.tasks import Evaluation, Task
from verl_gdpo.tasks.constraints import DATA_SOURCES

WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")  # "don't" is one, "well-known" and "a_b" are two
MARKERS = ("* ", "- ")  # of an item
FENCE = "```"
MAX_BRACKETS = 100  # of JSON, which bounds its depth
SENTENCE_ENDS, AROUND_SENTENCES = (".", "!", "?", "\u2026"), "\"'\u2018\u2019\u201c\u201d()[]*_"
# also one character, such as the number of an item, and letters such as those of "a.m."
ABBREVIATION = re.compile(r"mr|mrs|ms|dr|prof|st|vs|.|[^\W\d_](\.[^\W\d_])+")


def count_words(text: str) -> int:
    """Return the number of words.

    >>> count_words("Don't stop: a well-known rule, 2 times.")
    8
    """
    return sum(1 for _ in WORD.finditer(text))


def count_sentences(text: str) -> int:
    """Return the number of sentences; words behind the last full stop are one more.

    A sentence has a word, and ends before white space. An abbreviation or a letter ends none.

    >>> count_sentences('Dr. A. Lee said "no." Why? ! I left')
    3
    """
    count, is_open = 0, False
    for piece in text.split():
        is_open = is_open or WORD.search(piece) is not None
        core = piece.strip(AROUND_SENTENCES)
        stem = core.removesuffix(".").casefold()
        is_short = core.endswith(".") and ABBREVIATION.fullmatch(stem) is not None
        if is_open and core.endswith(SENTENCE_ENDS) and not is_short:
            count, is_open = count + 1, False
    return count + is_open


def count_bullets(text: str) -> int:
    """Return the number of lines that begin with "* " or "- " and have a word."""
    lines = (line.lstrip() for line in text.splitlines())
    return sum(line.startswith(MARKERS) and WORD.search(line) is not None for line in lines)


def has_keywords(text: str, keywords: list[str]) -> bool:
    words = {word.casefold() for word in WORD.findall(text)}
    return words.issuperset(word.casefold() for word in keywords)


def has_ending(text: str, ending: str) -> bool:
    return text.strip().strip('"').rstrip().casefold().endswith(ending.casefold())


def is_json_with(text: str, keys: list[str]) -> bool:
    """Whether a text is one JSON object with these keys, in a block of code or not."""
    body = text.strip()
    if body.startswith(FENCE):
        body = body.removeprefix(FENCE).removesuffix(FENCE)
        body = body[4:] if body[:4].casefold() == "json" else body
    if body.count("{") + body.count("[") > MAX_BRACKETS:
        return False
    try:
        content = json.loads(body, parse_constant=int)  # NaN is neither JSON nor an int
    except ValueError:
        return False
    return isinstance(content, dict) and content.keys() >= {*keys}


class Constraint(NamedTuple):
    """A kind of constraint.

    form: of its value in a ground truth, for the message.
    has_form: whether a value has it.
    is_met: `is_met(response, value)` says whether a response with a word does what is asked.
    """

    form: str
    has_form: Callable[[Any], bool]
    is_met: Callable[[str, Any], bool]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(x, str) for x in value)


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, list) and [type(end) for end in value] == [int, int]
    return is_pair and 1 <= value[0] <= value[1]


def _range(count: Callable[[str], int]) -> Constraint:
    return Constraint(
        "[LOW, HIGH] from 1 on", _is_range, lambda text, ends: ends[0] <= count(text) <= ends[1]
    )


COUNTS = {"sentences": count_sentences, "words": count_words, "bullets": count_bullets}
CASES = {"lower": str.islower, "upper": str.isupper}
CONSTRAINTS: Mapping[str, Constraint] = {
    "keyword": Constraint(
        "[WORD, ...]", lambda value: _texts(value) and all(map(WORD.fullmatch, value)), has_keywords
    ),
    **{name: _range(count) for name, count in COUNTS.items()},
    "case": Constraint(
        '"lower" or "upper"', lambda value: value in [*CASES], lambda text, case: CASES[case](text)
    ),
    "ending": Constraint(
        "TEXT", lambda value: isinstance(value, str) and has_ending(value, value or "?"), has_ending
    ),
    "json": Constraint("[KEY, ...]", _texts, is_json_with),
}


def score(
    response: str, ground_truth: str, *, response_tokens: int | None = None, step: int | None = None
) -> dict[str, float | None]:
    """Score one response against the constraints of one prompt.

    >>> rewards = score("Coffee is an old drink", '{"keyword": ["old"], "ending": "!"}')
    >>> {name: value for name, value in rewards.items() if value is not None}
    {'keyword': 1.0, 'ending': 0.0}

    Args:
        response: decoded text without special tokens. No string raises.
        ground_truth: a JSON object {name of a constraint: its value}; see `CONSTRAINTS`. Sentences,
            words and bullets have the lowest and the highest number, json has the keys.
        response_tokens: part of every scorer's signature; unused.
        step: the same.

    Returns:
        a reward for each of `CONSTRAINTS`: 1 if it is met, else 0, and None if it is not asked for.

    Raises:
        ValueError: a ground truth of another form.
    """
    asked = read_constraints(ground_truth)
    has_word = WORD.search(response) is not None
    return {
        name: float(has_word and constraint.is_met(response, asked[name]))
        if name in asked
        else None
        for name, constraint in CONSTRAINTS.items()
    }


def bounds() -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    return dict.fromkeys(CONSTRAINTS, (0.0, 1.0))


def read_constraints(ground_truth: str) -> dict[str, Any]:
    """Return {name: value} of a ground truth; raise ValueError for one of another form."""
    try:
        asked = json.loads(ground_truth)
    except (TypeError, ValueError, RecursionError):
        asked = None
    if not (isinstance(asked, dict) and asked) or not all(
        name in CONSTRAINTS and CONSTRAINTS[name].has_form(value) for name, value in asked.items()
    ):
        forms = ", ".join(f'"{name}": {each.form}' for name, each in CONSTRAINTS.items())
        raise ValueError(
            f"constraints ground truth: got {repr(ground_truth)[:200]}; expected a JSON object "
            f"with one or more of {{{forms}}}"
        )
    return asked


def _good_response(ground_truth: str) -> str:
    """As few words as the constraints allow; those that contradict each other are not all met."""
    asked = read_constraints(ground_truth)
    words = list(asked.get("keyword", ()))
    if "json" in asked:
        return json.dumps(dict.fromkeys(asked["json"], " ".join(words) or "so"))
    low = {name: asked.get(name, [1])[0] for name in COUNTS}
    parts = max(low["sentences"], low["bullets"])
    while len(words) < max(low["words"], parts):
        words.append("so")
    pieces = words[: parts - 1]
    pieces.append(" ".join(words[parts - 1 :]))  # the last one has all other words
    text = "\n* ".join(["", *pieces]) if "bullets" in asked else ". ".join(pieces)
    text = f"{text} {asked.get('ending', '')}".strip()
    return {"lower": text.lower(), "upper": text.upper()}.get(asked.get("case", ""), text)


EACH = {name: methodcaller("get", name) for name in CONSTRAINTS}  # as a column
TASK = Task(
    name="constraints",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=tuple(CONSTRAINTS),
    rows="verl_gdpo.tasks.constraints.rows",
    scores="answer",  # keywords and lengths of a thought are none of what the prompt asks for
    good_response=_good_response,
    system_prompt=None,  # chat templates have one of their own
    evaluation=Evaluation({"all met": lambda rewards: float(0 not in rewards.values())} | EACH),
)
