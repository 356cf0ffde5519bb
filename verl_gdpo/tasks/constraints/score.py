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
SENTENCE_ENDS = (".", "!", "?", "\u2026")
QUOTES = '"\u201c\u201d'
AROUND_SENTENCES = "\"'\u2018\u2019\u201c\u201d()[]*_"
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
    count = 0
    is_open = False  # Whether there is a word behind the last end of a sentence.
    for piece in text.split():
        if WORD.search(piece) is not None:
            is_open = True
        core = piece.strip(AROUND_SENTENCES)
        stem = core.removesuffix(".").casefold()
        is_short = core.endswith(".") and ABBREVIATION.fullmatch(stem) is not None
        if is_open and core.endswith(SENTENCE_ENDS) and not is_short:
            count += 1
            is_open = False
    if is_open:
        count += 1
    return count


def count_bullets(text: str) -> int:
    """Return the number of lines that begin with "* " or "- " and have a word."""
    count = 0
    for line in text.splitlines():
        if line.lstrip().startswith(MARKERS) and WORD.search(line) is not None:
            count += 1
    return count


def has_keywords(text: str, keywords: list[str]) -> bool:
    words = {_as_compared(word) for word in WORD.findall(text)}
    return all(_as_compared(keyword) in words for keyword in keywords)


def _as_compared(word: str) -> str:
    """Return a word without regard to case, and with one sign for both apostrophes."""
    return word.casefold().replace("\u2019", "'")


def has_ending(text: str, ending: str) -> bool:
    # A response may be quoted as a whole.
    unquoted = text.strip().strip(QUOTES).rstrip()
    return unquoted.casefold().endswith(ending.casefold())


def is_json_with(text: str, keys: list[str]) -> bool:
    """Whether a text is one JSON object with these keys, in a block of code or not."""
    body = text.strip()
    if body.startswith(FENCE):
        body = body.removeprefix(FENCE).removesuffix(FENCE)
        if body[:4].casefold() == "json":
            body = body[4:]
    if body.count("{") + body.count("[") > MAX_BRACKETS:
        return False
    try:
        content = json.loads(body, parse_constant=int)  # NaN is neither JSON nor an int
    except ValueError:
        return False
    return isinstance(content, dict) and all(key in content for key in keys)


class Constraint(NamedTuple):
    """A kind of constraint.

    form: of its value in a ground truth, for the message.
    has_form: whether a value has it.
    is_met: `is_met(response, value)` says whether a response with a word does what is asked.
    """

    form: str
    has_form: Callable[[Any], bool]
    is_met: Callable[[str, Any], bool]


def _are_texts(value: Any) -> bool:
    if not isinstance(value, list) or value == []:
        return False
    return all(isinstance(text, str) for text in value)


def _are_words(value: Any) -> bool:
    return _are_texts(value) and all(WORD.fullmatch(text) for text in value)


def _is_range(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    low, high = value
    # A bool is an int in Python.
    if type(low) is not int or type(high) is not int:
        return False
    return 1 <= low <= high


def _is_case(value: Any) -> bool:
    return isinstance(value, str) and value in CASES


def _is_ending(value: Any) -> bool:
    # `has_ending` takes white space and quotation marks away, so that nothing ends in them.
    return isinstance(value, str) and has_ending(value, value or "?")


def _has_case(text: str, case: str) -> bool:
    return CASES[case](text)


def _range(count: Callable[[str], int]) -> Constraint:
    def is_met(text: str, ends: list[int]) -> bool:
        low, high = ends
        return low <= count(text) <= high

    return Constraint("[LOW, HIGH] from 1 on", _is_range, is_met)


CASES = {"lower": str.islower, "upper": str.isupper}
CONSTRAINTS: Mapping[str, Constraint] = {
    "keyword": Constraint("[WORD, ...]", _are_words, has_keywords),
    "sentences": _range(count_sentences),
    "words": _range(count_words),
    "bullets": _range(count_bullets),
    "case": Constraint('"lower" or "upper"', _is_case, _has_case),
    "ending": Constraint("TEXT", _is_ending, has_ending),
    "json": Constraint("[KEY, ...]", _are_texts, is_json_with),
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
    rewards: dict[str, float | None] = {}
    for name, constraint in CONSTRAINTS.items():
        if name in asked:
            rewards[name] = float(has_word and constraint.is_met(response, asked[name]))
        else:
            rewards[name] = None
    return rewards


def bounds() -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    return dict.fromkeys(CONSTRAINTS, (0.0, 1.0))


def read_constraints(ground_truth: str) -> dict[str, Any]:
    """Return {name: value} of a ground truth; raise ValueError for one of another form."""
    try:
        asked = json.loads(ground_truth)
    except (TypeError, ValueError, RecursionError):
        asked = None
    if not _are_constraints(asked):
        forms = ", ".join(f'"{name}": {each.form}' for name, each in CONSTRAINTS.items())
        raise ValueError(
            f"constraints ground truth: got {repr(ground_truth)[:200]}; expected a JSON object "
            f"with one or more of {{{forms}}}"
        )
    return dict(asked)


def _are_constraints(asked: Any) -> bool:
    if not isinstance(asked, dict) or not asked:
        return False
    for name, value in asked.items():
        if name not in CONSTRAINTS or not CONSTRAINTS[name].has_form(value):
            return False
    return True


def _good_response(ground_truth: str) -> str:
    """As few words as the constraints allow; those that contradict each other are not all met."""
    asked = read_constraints(ground_truth)
    words = list(asked.get("keyword", ()))
    if "json" in asked:
        return json.dumps(dict.fromkeys(asked["json"], " ".join(words) or "so"))
    part_count = max(_lowest(asked, "sentences"), _lowest(asked, "bullets"))
    word_count = max(_lowest(asked, "words"), part_count)
    while len(words) < word_count:
        words.append("so")

    # Each part has one word, and the last one has all others.
    parts = words[: part_count - 1]
    parts.append(" ".join(words[part_count - 1 :]))
    if "bullets" in asked:
        text = "".join(f"\n* {part}" for part in parts)
    else:
        text = ". ".join(parts)
    text = f"{text} {asked.get('ending', '')}".strip()
    if asked.get("case") == "lower":
        return text.lower()
    if asked.get("case") == "upper":
        return text.upper()
    return text


def _lowest(asked: Mapping[str, Any], name: str) -> int:
    if name not in asked:
        return 1
    low: int
    low, _ = asked[name]
    return low


def _all_met(rewards: Mapping[str, Any]) -> float:
    """The column for constraints together; one that is not asked for is None."""
    return float(0 not in rewards.values())


# The columns of an evaluation.
COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {"all met": _all_met}
for _name in CONSTRAINTS:
    COLUMNS[_name] = methodcaller("get", _name)

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
    evaluation=Evaluation(COLUMNS),
)
