"""What becomes of rewards for each turn when the policy decides when to stop: workshop/turns.md.

python -m workshop.turns prints the table of that page. A sample has one to five turns: after each,
a policy with one parameter goes on with probability p. Each turn has a reward, and the end has
`correct`, which a turn makes less likely by 0.05.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MOST_TURNS, SAMPLES = 5, 8
# the mean reward of a turn: its values, each as likely
KINDS = {"progress, 0.8": (1, 1, 1, 1, 0), "cost, -0.2": (-0.2,)}
FORMS = ("sum of the sample", "index of the turn", "return from the turn on")


def centred(values: Floats, present: npt.NDArray[Any], by_std: bool) -> Floats:
    """Less the mean of the group's others, or in standard deviations of the group; lone ones: 0."""
    n = present.sum(axis=1, keepdims=True)
    mean = (values * present).sum(axis=1, keepdims=True) / np.maximum(n, 1)
    apart = (values - mean) * (present & (n > 1))
    if not by_std:
        return np.asarray(apart * n / np.maximum(n - 1, 1))
    std = np.sqrt((apart**2).sum(axis=1, keepdims=True) / np.maximum(n - 1, 1))
    return np.asarray(apart / np.where(std > 1e-9, std, 1.0))


def gradient(
    form: str, values: Any, p: float, groups: int, rng: np.random.Generator, by_std: bool = True
) -> float:
    """The policy gradient at p of one form of advantages; shapes: groups, samples, turns."""
    goes_on = rng.random((groups, SAMPLES, MOST_TURNS)) < p
    goes_on[..., -1] = False
    reached = np.cumprod(np.insert(goes_on[..., :-1], 0, True, axis=2), axis=2).astype(bool)
    rewards = rng.choice(values, reached.shape) * reached
    correct = rng.random(reached.shape[:2]) < 0.9 - 0.05 * reached.sum(axis=2)
    everyone = np.ones_like(reached[..., :1])
    of_end = centred(correct[..., None] * 1.0, everyone, by_std)
    if form == FORMS[0]:
        of_turn = centred(rewards.sum(axis=2, keepdims=True), everyone, by_std)
    elif form == FORMS[1]:
        of_turn = from_here(centred(rewards, reached, by_std))
    else:
        of_turn = centred(from_here(rewards), reached, by_std)
    score = np.where(goes_on, 1 - p, -p) * reached
    score[..., -1] = 0  # the last turn decides nothing
    return float((score * (of_turn + of_end)).sum(axis=2).mean())


def from_here(values: Floats) -> Floats:
    return np.cumsum(values[..., ::-1], axis=2)[..., ::-1]


def true_gradient(values: Any, p: float) -> float:
    """By hand: the expected number of turns is 1 + p + ... + p^4."""
    by_p = sum(k * p ** (k - 1) for k in range(1, MOST_TURNS))
    return float((np.mean(values) - 0.05) * by_p * p * (1 - p))


def trained(form: str, values: Any, updates: int = 300) -> float:
    """Expected turns of a sample after these updates, from p = 0.5, with GDPO's normalisation."""
    logit, rng = 0.0, np.random.default_rng(1)
    for _ in range(updates):
        p = 1 / (1 + np.exp(-logit))
        logit += 0.1 * gradient(form, values, p, 64, rng)
    return float(sum((1 / (1 + np.exp(-logit))) ** k for k in range(MOST_TURNS)))


def table() -> str:
    lines = ["| reward of a turn | form | gradient / true | turns, trained |", "|---|---|---|---|"]
    for kind, values in KINDS.items():
        for form in FORMS:
            rng = np.random.default_rng(0)
            share = gradient(form, values, 0.5, 100_000, rng, False) / true_gradient(values, 0.5)
            lines.append(f"| {kind} | {form} | {share:.2f} | {trained(form, values):.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
