"""`workshop.experiments.map` as loops over prompts, samples and positions, for one seed.

The advantages are those of the package, so arms and training are compared with it together.
"""

from functools import partial

import numpy as np
import torch

from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from verl_gdpo.algorithm.variants import dara, dvao, gd2po, rvpo, sa_mrpo
from workshop.experiments.map.settings import POSITIONS, PROMPTS, TOKENS

GRPO = {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6}


def package_advantages(arm, rewards_BK, groups, bound_K, range_KP):
    """The advantage of each sample of one batch, under the options that the arm stands for."""
    rewards_BK = torch.as_tensor(rewards_BK, dtype=torch.float64)
    if arm == "grpo_prompt_range":  # no option of the package: the rewards themselves are divided
        rewards_BK = rewards_BK / torch.as_tensor(np.asarray(range_KP).T[groups])
    by_group = torch.stack([rewards_BK[torch.as_tensor(groups) == g] for g in set(groups)])
    spread_K = by_group.var(dim=1).mean(0).sqrt()
    by_spread = torch.where(spread_K > 0, 1 / spread_K, 1.0)
    options = {
        "gdpo": {},
        "grpo": GRPO,
        "grpo_spread": {**GRPO, "weights": by_spread},
        "grpo_prompt_range": GRPO,
        "grpo_range": {**GRPO, "weights": [1 / bound for bound in bound_K]},
        "grpo_batch_norm": {"group_norm": "summed"},
        "grpo_no_std": {**GRPO, "normalize_by_std": False},
        "grpo_spread_no_std": {**GRPO, "normalize_by_std": False, "weights": by_spread},
        "gdpo_weighted": {"weights": list(bound_K)},
        "gdpo_no_batch_norm": {"batch_norm": "none"},
        "rvpo": {"combine": partial(rvpo, k=1.0)},
        "rvpo_mild": {"combine": partial(rvpo, k=0.3)},
        "dara": {"combine": dara},
        "sa_mrpo": {"combine": partial(sa_mrpo, bounds_K=[(0, bound) for bound in bound_K])},
        "gd2po": {"combine": partial(gd2po, tau=0.5)},
        "dvao": {"combine": dvao},
    }
    return compute_gdpo_scalars(rewards_BK, groups, **options[arm]).A_B.numpy()


def naive_hits(problem, arm, rate, steps, optimizer="one scale"):
    """What `simulate.train` returns, (steps + 1, rewards), for the first seed of the problem."""
    setting = problem.setting
    logits = problem.start_VLSP[:, :, 0].copy()
    bound_K = [reward.bound for reward in setting.rewards]
    step, hits = make_optimizer(optimizer, rate), []
    for t in range(steps):
        pi = softmax(logits)
        hits.append(expected_hits(problem, pi))
        answers = [(p, answer(problem, pi, t, g, p)) for g in range(setting.samples) for p in range(PROMPTS)]  # fmt: skip  # noqa: E501
        rewards_BK = [
            rewards(problem, tokens, t, row // PROMPTS, p)
            for row, (p, tokens) in enumerate(answers)
        ]
        A_B = package_advantages(arm, np.array(rewards_BK), [p for p, _ in answers], bound_K, problem.range_KSP[:, 0])  # fmt: skip  # noqa: E501
        gradient = np.zeros_like(logits)
        for A, (p, tokens) in zip(A_B, answers, strict=True):
            for place, token in enumerate(tokens):
                gradient[:, place, p] += A * (np.eye(TOKENS)[token] - pi[:, place, p])
        logits += step(gradient / len(answers))
    return np.array([*hits, expected_hits(problem, softmax(logits))])


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(0)


def expected_hits(problem, pi):
    """The share of each reward, and last of the small one, from all possible answers."""
    worth = [reward.worth for reward in problem.setting.rewards]
    total_K = 0
    for tokens in np.ndindex(*[TOKENS] * POSITIONS):
        for p in range(PROMPTS):
            chance = np.prod([pi[token, place, p] for place, token in enumerate(tokens)])
            met = values(problem, tokens, p)
            # the last of those with the smallest range
            small = min((problem.range_KSP[k, 0, p], -k) for k in range(len(met)) if worth[k])[1]
            total_K = total_K + chance * np.array([*met, met[-small]])
    return total_K / PROMPTS


def values(problem, tokens, p):
    """The share of the events of each reward that an answer meets."""
    met = iter(
        [
            all(accepts_VLP[token, place, p] for place, token in enumerate(tokens))
            for accepts_VLP in problem.accepts_EVLSP[:, :, :, 0]
        ]
    )
    of_rewards = [[next(met) for _ in reward.events] for reward in problem.setting.rewards]
    return [sum(events) / max(1, len(events)) for events in of_rewards]


def answer(problem, pi, t, g, p):
    draws = problem.draws_TLGSP[t, :, g, 0, p]
    return [
        min(sum(pi[:, place, p].cumsum() < draw), TOKENS - 1) for place, draw in enumerate(draws)
    ]


def rewards(problem, tokens, t, g, p):
    row = []
    for k, value in enumerate(values(problem, tokens, p)):
        reward = problem.setting.rewards[k]
        if reward.is_noisy:
            noise = problem.noise_TKGSP[t, k, g, 0, p]
            value = 1 - value if noise < reward.wrong else value
            value = (1 - reward.noise) * value + reward.noise * noise
        row.append(value * problem.range_KSP[k, 0, p])
    return row


def make_optimizer(name, rate):
    """A function from the gradient of each prompt's logits to their change."""
    parts = []  # Adam's two means of each step's gradients: of the prompts' own logits, and shared

    def step(gradient):
        both = [gradient, gradient.sum(2, keepdims=True)]
        if name == "sgd":
            return rate * (both[0] + both[1])
        squares = [np.square(part) for part in both]
        if name == "one scale":
            one = sum(part.sum() for part in squares) / sum(part.size for part in both)
            squares = [one, one]
        parts.append((both, squares))
        # a running mean with its correction is a weighted mean of all steps so far
        total = 0
        for i in (0, 1):
            mean = weighted_mean([both[i] for both, _ in parts], 0.9)
            square = weighted_mean([squares[i] for _, squares in parts], 0.999)
            total = total + rate * mean / (np.sqrt(square) + 1e-8)
        return total

    return step


def weighted_mean(values, decay):
    weights = [decay**age for age in reversed(range(len(values)))]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
