"""The questions of BFCL-v3 with one answer: calls, or none where no function fits."""

import json

from verl_gdpo.evaluation.bfcl import checker, data, form
from verl_gdpo.evaluation.questions import Answer, Messages, Question, Scores


def question(row: data.Row, category: str) -> Question:
    """Return a question of a category of a single turn; `row` is one of `data.rows(category)`."""
    return Question(
        key=row["id"],
        category=category,
        start=lambda: SingleTurn(row, category),
        ground_truth=json.dumps(row["ground_truth"], ensure_ascii=False),
    )


class SingleTurn:
    """One request, an Episode.

    Scores:
        format: of the answer: 1 if it has one of the three forms.
        accuracy: 1 if the package's checker accepts the calls.
        accuracy_after_thought: the same, without calls within `<think>`, which ToolRL takes too.
    """

    def __init__(self, row: data.Row, category: str) -> None:
        self._row, self._category = row, category
        self._scores: Scores | None = None

    def prompt(self) -> Messages | None:
        """Return the request, or None after the answer."""
        if self._scores is not None:
            return None
        tools = data.with_hints(self._row["function"], self._category)
        dialogue = [message for turn in self._row["question"] for message in turn]
        return form.prompt(tools, dialogue, multi_turn=False)

    def take(self, answer: Answer) -> Scores:
        """Score the answer, and return its format."""
        rules = {"accuracy": answer.text}
        rules["accuracy_after_thought"] = form.without_thought(answer.text)
        calls = {name: form.calls(text, multi_turn=False) for name, text in rules.items()}
        right = checker.is_correct(self._row, self._category, calls["accuracy"])
        self._scores = {"accuracy": float(right), "accuracy_after_thought": float(right)}
        if calls["accuracy"] != calls["accuracy_after_thought"]:
            right = checker.is_correct(self._row, self._category, calls["accuracy_after_thought"])
            self._scores["accuracy_after_thought"] = float(right)
        return {"format": float(form.is_correct_format(answer.text))}

    def abandon(self) -> None:
        """End it as wrong."""
        self._scores = dict.fromkeys(("accuracy", "accuracy_after_thought"), 0.0)

    def scores(self) -> Scores:
        """Return both accuracies."""
        return self._scores or {}
