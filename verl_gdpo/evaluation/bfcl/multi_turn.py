"""The dialogues of BFCL-v3: turns of a user, steps of the policy, and the results of its calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_gdpo.evaluation.bfcl import form, simulators
from verl_gdpo.evaluation.questions import Answer, Messages, Question, Scores

Documents = Mapping[str, Sequence[form.Tool]]  # of the functions of each class


def question(
    entry: Mapping[str, Any],
    gold: Sequence[Sequence[str]],
    documents: Documents,
    hinted: Documents,
) -> Question:
    """Return a question of a category multi_turn_*.

    Args:
        entry: of the package.
        gold: the calls of each turn.
        documents: of the package.
        hinted: the same, each with its hint about the language, as the system prompt shows them.

    Raises:
        ValueError: the entry and its gold have different numbers of turns.
    """
    if len(entry["question"]) != len(gold):
        raise ValueError(
            f"{entry['id']}: got {len(entry['question'])} turns and the gold calls of {len(gold)}; "
            f"expected as many. Is the package as it was installed?"
        )
    return Question(
        key=entry["id"],
        category=entry["id"].rpartition("_")[0],
        start=lambda: Dialogue(entry, gold, documents, hinted),
        ground_truth="\n".join("; ".join(calls) for calls in gold),
    )


class Dialogue:
    """One dialogue, an Episode.

    A turn ends with an answer that makes no call. One step more than allowed ends the dialogue: as
    wrong, unless the turn is the last one; then the checker decides. So does the package.

    Scores:
        format: of an answer: 1 if it has one of the three forms.
        accuracy: of the dialogue, as the package's checker says.
    """

    def __init__(
        self,
        entry: Mapping[str, Any],
        gold: Sequence[Sequence[str]],
        documents: Documents,
        hinted: Documents,
    ) -> None:
        hidden = {name for names in entry.get("missed_function", {}).values() for name in names}
        self._tools = [
            tool
            for name in entry["involved_classes"]
            for tool in hinted[name]
            if tool["name"] not in hidden
        ]
        self._requests = _requests(entry, documents)
        self._entry, self._gold = entry, gold
        # of each turn, each answer and the calls in it
        self._turns: list[list[tuple[str, list[str]]]] = [[]]
        self._is_over = self._is_lost = False

    def prompt(self) -> Messages | None:
        """Return the dialogue so far, with the results of all calls."""
        if self._is_over or self._is_lost:
            return None
        steps = [calls for turn in self._turns for _, calls in turn]
        try:
            results = iter(simulators.results(self._entry, steps) if any(steps) else steps)
        except simulators.LimitError:
            self._is_lost = True
            return None
        messages: list[Mapping[str, str]] = []
        for turn, request in zip(self._turns, self._requests, strict=False):
            messages += request
            for answer, calls in turn:
                messages.append({"role": "assistant", "content": answer})
                messages += [
                    {"role": "tool", "name": call, "content": result}
                    for call, result in zip(calls, next(results), strict=True)
                ]
        return form.prompt(self._tools, messages, multi_turn=True)

    def take(self, answer: Answer) -> Scores:
        """Go on with an answer, and return its format."""
        calls = [str(call) for call in form.calls(answer.text, multi_turn=True)]
        self._turns[-1].append((answer.text, calls))
        if calls:
            self._is_over = len(self._turns[-1]) > form.MAX_STEPS
        elif len(self._turns) == len(self._gold):
            self._is_over = True
        else:
            self._turns.append([])
        return {"format": float(form.is_correct_format(answer.text))}

    def abandon(self) -> None:
        """End it as wrong."""
        self._is_lost = True

    def scores(self) -> Scores:
        """Return the accuracy."""
        if self._is_lost or len(self._turns) < len(self._gold):
            return {"accuracy": 0.0}
        turns = [[calls for _, calls in turn] for turn in self._turns]
        try:
            is_right = simulators.is_right(self._entry, turns, self._gold)
        except simulators.LimitError:
            is_right = False
        return {"accuracy": float(is_right)}


def _requests(entry: Mapping[str, Any], documents: Documents) -> list[Sequence[Mapping[str, str]]]:
    """What the user says in each turn; where functions are revealed, the package's words."""
    from bfcl_eval.constants.default_prompts import (
        DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as REVEALED,
    )

    by_name = {tool["name"]: tool for name in entry["involved_classes"] for tool in documents[name]}
    requests = list(entry["question"])
    for turn, names in entry.get("missed_function", {}).items():
        text = REVEALED.format(functions=[by_name[name] for name in names])
        requests[int(turn)] = [{"role": "user", "content": text}]
    return requests
