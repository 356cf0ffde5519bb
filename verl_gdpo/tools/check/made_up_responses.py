"""Makes the responses that are tried before a run: some right, some wrong, some garbage."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import plain
from verl_gdpo.scoring import function_list
from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tools.check.data_files import DataRow, Responses

END = 0  # The end-of-turn token.
TOKENS = re.compile(r" ?\w{1,8}|\W{1,4}")
RIGHT = "ground truth"  # A kind of response.
THINK = "<think>"
FILLER = " let us look at this once more"


@dataclass(frozen=True)
class Sample:
    """A made-up response to a row of data.

    row: the number of the row among those that are tried.
    kind: what sort of response it is, such as `RIGHT`.
    label: its name for messages.
    source: the data source of the row.
    """

    row: int
    kind: str
    response: str
    label: str
    source: str

    @property
    def uid(self) -> str:
        """The prompt, as verl would name it: samples of one row share it."""
        return str(self.row)


class Words:
    """Replaces the policy's tokenizer: a token is a short word, or what is between two words."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {"": END}

    def encode(self, text: str) -> list[int]:
        ids = []
        for token in TOKENS.findall(text):
            ids.append(self._texts.setdefault(token, len(self._texts)))
        ids.append(END)
        return ids

    def decode(self, ids: Any, **_options: Any) -> str:
        texts = list(self._texts)
        return "".join(texts[int(i)] for i in ids)


WORDS = Words()


def make_samples(config: Any, rows: Sequence[DataRow], more: Responses) -> list[Sample]:
    """Return a sample for each row and each of its responses, made-up ones and `more`."""
    samples = []
    options = _options_of_scorers(config)
    for number, row in enumerate(rows):
        truth = row.good_response(options)
        limit = config.data.max_response_length
        if row.source in TASK_BY_SOURCE:
            responses = make_responses(truth, truth, limit)
        else:
            responses = make_responses(truth, _in_usual_forms(truth), limit)
            responses |= as_json_answers(row.truth)
        tried = [text for row_of_text, text in more if row_of_text in (None, row)]
        for place, text in enumerate(tried, 1):
            responses[f"{place} of --responses"] = text
        for kind, response in responses.items():
            label = f"{row.label}, response {kind!r}"
            samples.append(Sample(number, kind, response, label, row.source))
    return samples


def _options_of_scorers(config: Any) -> dict[str, Any]:
    """Return the options of our scorers, also of those in a list of reward functions."""
    options = dict(config.reward.get("reward_kwargs") or {})
    for entry in (plain(OmegaConf.select(config, function_list.KEY)) or {}).values():
        if isinstance(entry, Mapping) and entry.get("task"):
            options |= function_list.options_of_entry(entry)
    return options


def make_responses(truth: str, answer: str, limit: int) -> dict[str, str]:
    """Return {kind: response}; a response that equals an earlier one is left out.

    Args:
        truth: a good response to the row; "" if none is known.
        answer: a good response in other words; it may be the same.
        limit: the longest response in tokens.
    """
    middle = len(truth) // 2
    one_off = ""
    if truth:
        other = "#"
        if truth[middle] == "#":
            other = "_"
        one_off = truth[:middle] + other + truth[middle + 1 :]
    candidates = {
        RIGHT: truth,
        "in usual forms": answer,
        "one character off": one_off,
        "cut in half": truth[:middle],
        "without tags": re.sub(r"</?\w+>", "", truth),
        "garbage": "?" * 8,
        "as long as allowed": _lengthened(answer, limit),
    }
    kinds: dict[str, str] = {}
    for kind, response in candidates.items():
        if response and response not in kinds.values():
            kinds[kind] = response
    kinds["empty"] = ""
    return kinds


def as_json_answers(truth: Any) -> dict[str, str]:
    """Return {kind: response} of a ground truth as JSON, alone and in a block of code."""
    if truth in (None, ""):
        return {}
    fields = truth
    if isinstance(truth, str):
        fields = {"answer": truth}
    answer = json.dumps(fields, default=str)
    return {"as JSON": answer, "as JSON in a code block": f"```json\n{answer}\n```"}


def _lengthened(answer: str, limit: int) -> str:
    """The answer after as many thoughts as there is room for."""
    room = max(limit - len(WORDS.encode(answer)), 0)
    # Thoughts before the tag would break a format.
    place = 0
    if THINK in answer:
        place = answer.find(THINK) + len(THINK)
    filler = TOKENS.findall(FILLER)
    words = (filler * (room // len(filler) + 1))[:room]
    return answer[:place] + "".join(words) + answer[place:]


def _in_usual_forms(truth: str) -> str:
    """Return an answer that verl's scorers find, each in the form that it looks for."""
    if not truth:
        return ""
    forms = ("<answer>{}</answer>", "Answer: {}", "\\boxed{{{}}}", "#### {}")
    return f"{THINK}</think> " + "\n".join(form.format(truth) for form in forms)
