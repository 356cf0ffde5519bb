"""The questions of BFCL-v3: with one answer, and dialogues with the results of their calls."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_gdpo.evaluation.bfcl import form, package
from verl_gdpo.evaluation.questions import Answer, Messages, OneAnswer, Question, Scores

WRONG = {"format": 0.0, "accuracy": 0.0, "accuracy_after_thought": 0.0}

PackageRow = Mapping[str, Any]  # what `questions` of worker.py returns


def question(row: PackageRow) -> Question:
    """Return the question of a row."""
    gold = row["gold"]
    if row["category"].startswith("multi_turn"):
        truth = "\n".join("; ".join(calls) for calls in gold)
        return Question(row["key"], row["category"], partial(ToolDialogue, row), truth)
    dialogue = [message for turn in row["turns"] for message in turn]
    prompt = form.prompt(row["tools"], dialogue, multi_turn=False)
    start = partial(OneAnswer, prompt, partial(_score, row), WRONG)
    return Question(row["key"], row["category"], start, json.dumps(gold, ensure_ascii=False))


def _score(row: PackageRow, text: str, _tokens: int) -> Scores:
    """Return the scores of an answer.

    format: 1 if it has one of the three forms.
    accuracy: 1 if the package's checker accepts its calls.
    accuracy_after_thought: the same, without calls within `<think>`, which ToolRL takes too.
    """
    calls = form.calls(text, multi_turn=False)
    later = form.calls(form.without_thought(text), multi_turn=False)
    right = _is_right(row, calls)
    also = right if later == calls else _is_right(row, later)
    return dict(zip(WRONG, map(float, (form.is_correct_format(text), right, also)), strict=True))


def _is_right(row: PackageRow, calls: Sequence[form.Call]) -> bool:
    if not row["gold"]:  # what counts is whether there is a call
        return bool(calls) is (row["category"] == "live_relevance")
    return _ask(row, "is_right", [{one.name: one.parameters} for one in calls]) == [True]


def _ask(row: PackageRow, task: str, about: Any) -> list[Any]:
    return package.ask(row["category"], task, row["key"], about)


class ToolDialogue:
    """Turns of a user, steps of the policy, and the results of its calls: an Episode.

    A turn ends with an answer that makes no call. One step more than allowed ends the dialogue: as
    wrong, unless the turn is the last one; then the checker decides. So does the package.

    Scores:
        format: of an answer: 1 if it has one of the three forms.
        accuracy: of the dialogue, as the package's checker says.
    """

    def __init__(self, row: PackageRow) -> None:
        self._row = row
        # of each turn, each answer and the calls in it
        self._turns: list[list[tuple[str, list[str]]]] = [[]]
        self._is_over = self._is_lost = False

    def prompt(self) -> Messages | None:
        """Return the dialogue so far, with the results of all calls."""
        if self._is_over or self._is_lost:
            return None
        steps = [calls for turn in self._turns for _, calls in turn]
        reply = _ask(self._row, "results", steps) if any(steps) else [steps]
        if not reply:
            self._is_lost = True
            return None
        results = iter(reply[0])
        messages: list[Mapping[str, str]] = []
        for turn, request in zip(self._turns, self._row["turns"], strict=False):
            messages += request
            for answer, calls in turn:
                messages.append({"role": "assistant", "content": answer})
                messages += [
                    {"role": "tool", "name": call, "content": result}
                    for call, result in zip(calls, next(results), strict=True)
                ]
        return form.prompt(self._row["tools"], messages, multi_turn=True)

    def take(self, answer: Answer) -> Scores:
        """Go on with an answer, and return its format."""
        calls = [str(call) for call in form.calls(answer.text, multi_turn=True)]
        self._turns[-1].append((answer.text, calls))
        if calls:
            self._is_over = len(self._turns[-1]) > form.MAX_STEPS
        elif len(self._turns) == len(self._row["gold"]):
            self._is_over = True
        else:
            self._turns.append([])
        return {"format": float(form.is_correct_format(answer.text))}

    def abandon(self) -> None:
        """End it as wrong."""
        self._is_lost = True

    def scores(self) -> Scores:
        """Return the accuracy."""
        if self._is_lost or len(self._turns) < len(self._row["gold"]):
            return {"accuracy": 0.0}
        turns = [[calls for _, calls in turn] for turn in self._turns]
        is_right = _ask(self._row, "is_right_dialogue", turns) == [True]
        return {"accuracy": float(is_right)}
