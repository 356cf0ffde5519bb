"""GDPO in a training loop of your own, with torch alone, in a minute on a CPU.

    python examples/own_loop.py [STEPS]

A judge gives 0 to 100 points, and a format is 0 or 1. GRPO adds them up, so the format is lost in
the judge's points. GDPO normalises each reward by itself, and learns both.
"""

import sys

import torch
from torch import Tensor, nn

from verl_gdpo import compute_gdpo_advantage

WORDS, LENGTH = 12, 8  # the vocabulary, in which word 0 is a tag, and the words of a response
PROMPTS, SAMPLES = 16, 8  # of a step, and of a prompt
ESTIMATORS = {"GRPO": {"group_norm": "summed", "batch_norm": "none"}, "GDPO": {}}


class Policy(nn.Module):
    """Gives each word its logit, by the prompt, the word before it and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.places = nn.Embedding(LENGTH, 32)
        self.layers = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, WORDS))

    def forward(self, text_BT: Tensor) -> Tensor:
        before_BTH = self.words(text_BT)
        prompt_BTH = before_BTH[:, :1].expand_as(before_BTH)
        place_BTH = self.places.weight[: text_BT.shape[1]].expand_as(before_BTH)
        return self.layers(torch.cat([prompt_BTH, before_BTH, place_BTH], dim=2))

    @torch.no_grad()
    def respond(self, prompt_B: Tensor) -> Tensor:
        """Return prompt and response of each sample, (B, 1 + LENGTH)."""
        text_BT = prompt_B[:, None]
        for _ in range(LENGTH):
            shares_BV = self(text_BT)[:, -1].softmax(dim=-1)
            text_BT = torch.cat([text_BT, shares_BV.multinomial(1)], dim=1)
        return text_BT


def score(prompt: int, response: list[int]) -> dict[str, float]:
    """The judge, whose taste is not quite constant, likes the word after the prompt's."""
    liked = sum(word == prompt % (WORDS - 1) + 1 for word in response[1:])
    judge = 100 * liked / (LENGTH - 1) + 5 * torch.randn(()).item()
    return {"format": float(response[0] == 0), "judge": judge}


def train(estimator: str, steps: int) -> list[dict[str, float]]:
    """Return the mean of each reward of each step."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    means = []
    for _ in range(steps):
        prompt_B = torch.randint(1, WORDS, (PROMPTS,)).repeat_interleave(SAMPLES)
        text_BT = policy.respond(prompt_B)
        rewards = [score(prompt, response) for prompt, *response in text_BT.tolist()]
        group_ids = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        mask_BT = torch.ones(len(rewards), LENGTH)  # here, all words are the policy's
        advantage_BT = compute_gdpo_advantage(rewards, group_ids, mask_BT, **ESTIMATORS[estimator])
        log_BTV = policy(text_BT[:, :-1]).log_softmax(dim=-1)
        log_BT = log_BTV.gather(2, text_BT[:, 1:, None])[:, :, 0]
        loss = -(advantage_BT * log_BT).sum() / mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append({name: sum(r[name] for r in rewards) / len(rewards) for name in rewards[0]})
    return means


def main(steps: int) -> None:
    curves = {estimator: train(estimator, steps) for estimator in ESTIMATORS}
    print("step  " + "  ".join(f"{name:>6} format  judge" for name in curves))
    for step in sorted({0, *range(24, steps, 25), steps - 1}):
        of_each = [f"{c[step]['format']:13.2f}  {c[step]['judge']:5.1f}" for c in curves.values()]
        print(f"{step + 1:4d}  " + "  ".join(of_each))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
