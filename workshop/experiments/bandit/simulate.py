"""Trains a small policy on rewards that GDPO harms, and on rewards for which only GDPO helps.

python -m workshop.experiments.bandit.simulate    # writes bandit.parquet: minutes on one core

A response has six places with four choices each, of which choice 0 is wanted. Which token that is,
depends on the prompt in the last three places, and in the first three only where a setting says so.
All prompts share a network, which gives the probabilities of the tokens, so what a policy earns is
computed and not sampled. Its width and the learning rate were chosen with GRPO on two rewards of
range 1 alone, so that it earns what it earns in verl's trainer, as the mean over the training.

Shape suffixes: N samples of a prompt, S seeds, P prompts, L places, C choices, R all responses.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.tools.advice import GDPO, Evidence
from workshop.experiments import results

N, S, P, L, C, WIDTH = 8, 24, 16, 6, 4, 256
STARTED, STEPS, LAST, RATE = 150, 30, 5, 1.25e-3
GRPO: dict[str, Any] = {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6}  # as verl has it
EVERY_R11L = torch.tensor([*product(range(C), repeat=L)])[:, None, None]
UP_P = torch.linspace(0, 1, P, dtype=torch.float64)  # what differs by prompt
IS_WIDE_P = torch.arange(P) % 2 == 1  # of the source whose correctness has six times the range


class Setting(NamedTuple):
    """What each reward multiplies, and the shares that are shown: names of `signals`.

    is_own: the wanted tokens of the first three places depend on the prompt too.
    """

    sizes: Mapping[str, float]
    shown: Sequence[str] = ("answer",)
    is_own: bool = False


SETTINGS = {
    "1_to_1": Setting({"format": 1, "answer": 1}, ("format", "answer")),
    "20_to_1": Setting({"format": 20, "answer": 1}, ("format", "answer")),
    "judge": Setting({"format": 1, "judge of 60 to 80": 100}, ("format", "graded")),
    "tests": Setting({"format": 1, "tests passed of 50": 50}, ("format", "graded")),
    "sources": Setting({"by source": 6, "format": 1}, ("narrow answer", "wide format"), True),
    "bonus": Setting({"answer": 1, "spoils": 0.05}),
    "length": Setting({"correct": 1, "thoughts": -0.05}, ("correct",)),
    "noise_3": Setting({"answer": 1, "noise 0": 0.1, "noise 1": 0.1, "noise 2": 0.1}),
    "noise_1": Setting({"answer": 1, "noise 0": 0.1}),
    "failures_10": Setting({"answer": 1, "succeeds in 90 %": 0.1}),
    "failures_2": Setting({"answer": 1, "succeeds in 98 %": 0.1}),
    "exclude": Setting({"answer": 10, "other answer": 1}),
}


def signals(c: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Return what rewards and shares are made of, of choices and of three normal numbers each."""
    first, last, wide = c[..., :3] == 0, c[..., 3:] == 0, IS_WIDE_P.expand(*c.shape[:2], P)
    form, answer, graded = first.all(-1) * 1.0, last.all(-1) * 1.0, last.double().mean(-1)
    tests_P = (2 * 25**UP_P).round()  # 2 to 50
    return {
        **{"format": form, "answer": answer, "graded": graded},
        "judge of 60 to 80": 0.6 + (UP_P + graded) / 10 + z[0] / 100,
        "tests passed of 50": (tests_P * graded).round() / 50,
        "by source": torch.where(wide, answer, answer / 6),
        "narrow answer": answer.where(~wide, torch.nan),
        "wide format": form.where(wide, torch.nan),
        **{"spoils": c[..., 3] == 1, "other answer": (c[..., 3:] == 1).all(-1)},
        **{"thoughts": first.double().mean(-1), "correct": answer * (first.sum(-1) >= 2)},
        **{f"noise {k}": z[k] / 5 for k in range(3)},  # five standard deviations are the range
        # quantiles of the normal distribution
        **{f"succeeds in {k} %": z[0] < limit for k, limit in ((90, 1.2816), (98, 2.0537))},
    }


class Policy:
    """Of all seeds: parameters, and which token of each place is choice 0, 1, 2 and 3."""

    def __init__(self, parameters: list[Tensor], tokens_SPLC: Tensor, rate: float) -> None:
        self.parameters = [of.detach().clone().requires_grad_() for of in parameters]
        self.tokens_SPLC, self.adam = tokens_SPLC, torch.optim.AdamW(self.parameters, lr=rate)

    def choices(self) -> Any:  # torch does not type its distributions
        embedding, hidden, output = self.parameters
        logits = (torch.tanh(embedding @ hidden) @ output).reshape(-1, P, L, C)
        return Categorical(logits=logits.gather(-1, self.tokens_SPLC), validate_args=False)

    def step(self, loss_S: Tensor) -> None:
        """Clip the gradient of each seed at norm 1, as verl does."""
        slopes = torch.autograd.grad(loss_S.sum(), self.parameters)
        norm_S = torch.stack([of.flatten(1).norm(dim=1) for of in slopes]).norm(dim=0)
        for parameter, slope in zip(self.parameters, slopes, strict=True):
            parameter.grad = slope / norm_S.clamp(min=1)[:, None, None]
        self.adam.step()

    def earns(self, shown: Sequence[str]) -> Tensor:
        """Return the share of each shown reward, a row for each seed."""
        logs = self.choices().logits.detach().permute(2, 3, 0, 1)
        p_RSP = torch.stack([logs[k][EVERY_R11L[:, 0, 0, k]] for k in range(L)]).sum(0).exp()
        of = signals(EVERY_R11L, torch.zeros(3, 1, 1, 1))
        return torch.stack([(p_RSP * of[name]).sum(0).nanmean(-1) for name in shown], -1)


@cache
def started(is_own: bool) -> Policy:
    """Take choice 0 in half of the places, and the others equally often."""
    torch.manual_seed(int(is_own))
    scales = {(P, WIDTH): 2.0, (WIDTH, WIDTH): WIDTH**-0.5, (WIDTH, L * C): WIDTH**-0.5 / 2}
    random = [scale * torch.randn(S, *shape).double() for shape, scale in scales.items()]
    tokens_SPL = torch.randint(C, (S, P, L))
    tokens_SPL[..., :3] = tokens_SPL[:, : P if is_own else 1, :3]
    policy = Policy(random, (tokens_SPL[..., None] + torch.arange(C)) % C, 1e-3)
    for _ in range(STARTED):
        policy.step(-policy.choices().logits.sum((1, 2)) @ torch.tensor([3.0, 1, 1, 1]).double())
    return policy


def batches(setting: Setting, choices_NSPL: Tensor) -> Tensor:
    """Return the rewards of each seed's batch, as S x NP x K."""
    of = signals(choices_NSPL, torch.randn(3, *choices_NSPL.shape[:3]).double())
    rewards = [size * of[name].double() for name, size in setting.sizes.items()]
    return torch.stack(rewards, -1).transpose(0, 1).flatten(1, 2)


def weights_of_replay(setting: Setting) -> dict[str, list[float]]:
    """{arm: the weights that `verl-gdpo replay` prints of the first step of all seeds}.

    Where no weights keep GRPO's shares, there is no such arm.
    """
    torch.manual_seed(0)
    values_BK = batches(setting, started(setting.is_own).choices().sample((N,))).flatten(0, 1)
    present_BK = np.ones(values_BK.shape, bool)
    rewards = RewardMatrix(dict.fromkeys(setting.sizes, 1.0), values_BK.numpy(), present_BK)
    groups = np.add.outer(P * np.arange(S), np.tile(np.arange(P), N)).ravel()
    evidence = Evidence([(rewards, present_BK[:, 0], groups)], GDPO)
    weights = {"gdpo_spreads": evidence.spread_weights().tolist()}
    keeping = evidence.keeping_weights()
    if keeping is not None and keeping.is_kept:
        weights["gdpo_shares"] = keeping.weights_K.tolist()
    return weights


def train(setting: Setting, weights: list[float], options: Mapping[str, Any]) -> Tensor:
    """Return what each seed earns of each reward that is shown, mean over the last steps."""
    start, earned = started(setting.is_own), []
    policy = Policy(start.parameters, start.tokens_SPLC, RATE)
    torch.manual_seed(1)
    for step in range(STEPS):
        chosen = policy.choices()
        choices_NSPL = chosen.sample((N,))
        A_S = [
            compute_gdpo_scalars(batch, torch.arange(P).repeat(N), weights=weights, **options).A_B
            for batch in batches(setting, choices_NSPL)
        ]
        A_NSP = torch.stack(A_S).reshape(S, N, P).transpose(0, 1)
        policy.step(-(A_NSP * chosen.log_prob(choices_NSPL).mean(-1)).mean((0, 2)))
        if step >= STEPS - LAST:
            earned.append(policy.earns(setting.shown))
    return torch.stack(earned).mean(0)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm of a setting, seed and reward that is shown."""
    setting = SETTINGS[name]
    equal = [1.0] * len(setting.sizes)
    divided = [1 / abs(size) for size in setting.sizes.values()]
    arms = {"grpo": (equal, GRPO), "grpo_by_range": (divided, GRPO), "gdpo": (equal, {})}
    for arm, weights in weights_of_replay(setting).items():
        arms[arm] = weights, {}
    for arm, (weights, options) in arms.items():
        row = {"setting": name, "arm": arm, "weights": weights}
        for seed, shares in enumerate(train(setting, weights, options).tolist()):
            for reward, share in zip(setting.shown, shares, strict=True):
                yield {**row, "seed": seed, "reward": reward, "share": share}


if __name__ == "__main__":
    results.write([row for name in SETTINGS for row in rows(name)], results.BANDIT)
