"""Makes up responses to a few rows: right ones, damaged ones, garbage, and long ones."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tools.check.data_files import DataRow

END = 0  # the end-of-turn token
TOKENS = re.compile(r" ?\w{1,8}|\W{1,4}")
GARBAGE = "?" * 8
RIGHT = "ground truth"  # a kind of response
THINK = "<think>"
FILLER = " let us look at this once more"


@dataclass(frozen=True)
class Sample:
    row: int
    kind: str
    response: str
    label: str
    source: str


class Words:
    """Replaces the policy's tokenizer: a token is a short word, or what is between two words."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {"": END}

    def encode(self, text: str) -> list[int]:
        return [*(self._texts.setdefault(t, len(self._texts)) for t in TOKENS.findall(text)), END]

    def decode(self, ids: Any, **_options: Any) -> str:
        texts = [*self._texts]
        return "".join(texts[i] for i in ids.tolist())


WORDS = Words()


def make_samples(config: Any, rows: Sequence[DataRow]) -> list[Sample]:
    """Return a sample for each row and each of its made-up responses."""
    texts = [_good_response(row) for row in rows]
    limit = config.data.max_response_length
    samples = []
    for number, row in enumerate(rows):
        same = [i for i, other in enumerate(rows) if other.source == row.source]
        foreign = next((texts[i] for i in same if texts[i] not in (texts[number], "")), "")
        answer = texts[number] if row.source in TASK_BY_SOURCE else _in_usual_forms(texts[number])
        share = (number + 1) / (len(rows) + 1)  # so the rows have many lengths
        responses = {
            **made_up_responses(texts[number], foreign, answer),
            **long_responses(answer, limit, share),
        }
        for kind, response in responses.items():
            label = f"{row.label}, response {kind!r}"
            samples.append(Sample(number, kind, response, label, row.source))
    return samples


def long_responses(truth: str, limit: int, share: float) -> dict[str, str]:
    """Return {kind: response} of a good response after some thoughts, where there is room.

    Args:
        limit: the longest response in tokens.
        share: how much of the room before that the shorter one takes.
    """
    room = limit - len(WORDS.encode(truth))
    # thoughts before the tag would break a format
    place = truth.find(THINK) + len(THINK) if THINK in truth else 0
    filler = TOKENS.findall(FILLER)
    kinds = {}
    for kind, length in {"longer": int(room * share), "as long as allowed": room}.items():
        if length > 0:
            words = (filler * (length // len(filler) + 1))[:length]
            kinds[kind] = truth[:place] + "".join(words) + truth[place:]
    return kinds


def made_up_responses(truth: str, foreign: str, answer: str) -> dict[str, str]:
    """Return {kind: response}; a response that equals an earlier one is left out.

    Args:
        truth: a good response to the row; "" if none is known.
        foreign: a good response to another row; "" if there is none.
        answer: a good response in other words; it may be the same.
    """
    middle = len(truth) // 2
    changed = "#" if truth[middle : middle + 1] != "#" else "_"
    candidates = {
        RIGHT: truth,
        "in usual forms": answer,
        "another row's": foreign,
        "one character off": truth and truth[:middle] + changed + truth[middle + 1 :],
        "cut in half": truth[:middle],
        "without tags": re.sub(r"</?\w+>", "", truth),
        "garbage": GARBAGE,
    }
    kinds: dict[str, str] = {}
    for kind, response in candidates.items():
        if response and response not in kinds.values():
            kinds[kind] = response
    return {**kinds, "empty": ""}


def _good_response(row: DataRow) -> str:
    """Return the good response of the row's task, else the ground truth, or "" if it is no text."""
    truth = (row.fields.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, str):
        return ""
    task = TASK_BY_SOURCE.get(row.source)
    return task.good_response(truth) if task else truth


def _in_usual_forms(truth: str) -> str:
    """Return an answer that verl's scorers find, each in the form that it looks for."""
    if not truth:
        return ""
    forms = ("<answer>{}</answer>", "Answer: {}", "\\boxed{{{}}}", "#### {}")
    return f"{THINK}</think> " + "\n".join(form.format(truth) for form in forms)
