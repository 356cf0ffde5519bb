"""The questions of BFCL-v3 with one answer: calls, or none where no function fits."""

import json

from verl_gdpo.evaluation.bfcl import checker, data, form
from verl_gdpo.evaluation.questions import OneAnswer, Question, Scores

WRONG = {"format": 0.0, "accuracy": 0.0, "accuracy_after_thought": 0.0}


def question(row: data.Row, category: str) -> Question:
    """Return a question of a category of a single turn; `row` is one of `data.rows(category)`.

    Scores:
        format: 1 if the answer has one of the three forms.
        accuracy: 1 if the package's checker accepts the calls.
        accuracy_after_thought: the same, without calls within `<think>`, which ToolRL takes too.
    """

    def start() -> OneAnswer:
        tools = data.with_hints(row["function"], category)
        dialogue = [message for turn in row["question"] for message in turn]
        return OneAnswer(form.prompt(tools, dialogue, multi_turn=False), score, WRONG)

    def score(text: str, _tokens: int) -> Scores:
        calls = form.calls(text, multi_turn=False)
        later = form.calls(form.without_thought(text), multi_turn=False)
        right = checker.is_correct(row, category, calls)
        also = right if later == calls else checker.is_correct(row, category, later)
        scores = (form.is_correct_format(text), right, also)
        return dict(zip(WRONG, map(float, scores), strict=True))

    truth = json.dumps(row["ground_truth"], ensure_ascii=False)
    return Question(row["id"], category, start, truth)
