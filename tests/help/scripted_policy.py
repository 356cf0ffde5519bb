"""A policy whose answers are a function of what it is asked, in the place of a model."""

from verl_gdpo.tools.evaluate.benchmark import Answer
from verl_gdpo.tools.evaluate.dialogues import Prompt


class ScriptedPolicy:
    """Stands in for an engine.

    answer: `answer(messages, seed)` returns a text; one token is a word.
    batch: how many answers come together.
    """

    def __init__(self, answer, *, positions=10_000, max_tokens=100, batch=3):
        self.answer, self.positions, self.max_tokens = answer, positions, max_tokens
        self.batch = batch

    def prompt(self, messages, seed):
        text = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
        return Prompt(text, text.split(), (messages, seed))

    def answers(self, prompts):
        for first in range(0, len(prompts), self.batch):
            found = {}
            for k in range(first, min(first + self.batch, len(prompts))):
                words = self.answer(*prompts[k].seed).split(" ")
                kept = words[: self.max_tokens]
                found[k] = Answer(" ".join(kept), len(kept), len(kept) < len(words))
            yield found
