"""A policy whose answers are a function of what it is asked, in the place of a model."""

from verl_gdpo.evaluation.engines import Prompt
from verl_gdpo.evaluation.questions import Answer


class ScriptedPolicy:
    """Stands in for an engine.

    answer: `answer(messages, seed)` returns a text; one token is a word.
    batch: how many answers come together; `asked` counts them, `stop_after` lets a kill come then.
    """

    def __init__(self, answer, *, positions=10_000, max_tokens=100, batch=3, stop_after=None):
        self.answer, self.positions, self.max_tokens = answer, positions, max_tokens
        self.batch, self.stop_after, self.asked = batch, stop_after, 0

    def prompt(self, messages, seed):
        text = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
        return Prompt(text, text.split(), (messages, seed))

    def answers(self, prompts):
        for first in range(0, len(prompts), self.batch):
            found = {}
            for k in range(first, min(first + self.batch, len(prompts))):
                if self.asked == self.stop_after:
                    yield found
                    raise KeyboardInterrupt
                self.asked += 1
                words = self.answer(*prompts[k].seed).split(" ")
                kept = words[: self.max_tokens]
                found[k] = Answer(" ".join(kept), len(kept), len(kept) < len(words))
            yield found
