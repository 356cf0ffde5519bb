"""One sentence of advice: does GDPO help for these rewards?

Each rule is a line of docs/when_gdpo_helps.md, and claims no more than its simulation shows. What a
simulation knew by construction and nobody sees in rewards, such as which reward is easy to learn,
the sentence leaves to its reader. `tests/tools/test_advice.py` gives the rules the rewards of that
simulation, and compares what they claim with what it found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from verl_gdpo.batch.advantages import correlation
from verl_gdpo.tools.advice.evidence import Evidence

PAGE = "docs/when_gdpo_helps.md#should-i-use-gdpo-for-my-rewards"
UNEQUAL = 2.0  # times the range of another reward
BY_PROMPT = 2.5  # factor; in the simulation 1.1 to 1.5 where scales are the same, else 3.1 or more
NOISE_STEPS = 10  # fewer steps do not show that a reward does not rise
CHANCE = 3.0  # standard errors
EXCLUDED = 20  # samples with both rewards that chance would have brought


@dataclass(frozen=True)
class Advice:
    rule: str  # a key of `RULES`
    sentence: str


def advise(evidence: Evidence, rules: Sequence[str] | None = None) -> Advice:
    """Return the advice of the first rule that applies; `rules` are those that may apply."""
    for name in rules or RULES:
        for sentence in RULES[name](evidence):
            return Advice(name, sentence)
    raise ValueError(f"no rule applies: {rules}")


def _too_few(seen: Evidence) -> Iterator[str]:
    used = [name for name, used in zip(seen.names, seen.used_K, strict=True) if used]
    if not used:
        yield "No reward with a weight differs within a group, so neither estimator trains anything"
    elif len(used) == 1:
        yield f"Only {used[0]} differs within groups. With one reward, GDPO is GRPO up to a factor"
    elif not [*_pairs(seen)]:
        yield "No sample has two of the rewards. With one reward, GDPO is GRPO up to a factor"


def _chance(seen: Evidence) -> Iterator[str]:
    moved = [k for k in np.flatnonzero(seen.used_K).tolist() if moved_by_chance(seen, k)]
    if not moved:
        return
    names = " and ".join(seen.names[k] for k in moved)
    yield (
        f"Only chance seems to move {names} in {len(seen.steps)} steps: if it is noise, remove it "
        "or give it a small weight, because GDPO raises noise of a small range; if it is a reward "
        "that training has neglected, GDPO helps where its range is the smaller one"
    )


def _conflict(seen: Evidence) -> Iterator[str]:
    for j, k, ratio in _unequal(seen):
        if exclude_each_other(seen, j, k):
            a, b = seen.names[j], seen.names[k]
            yield (
                f"{a} and {b} exclude each other, and {a} has {ratio:.3g} times the range: if that "
                f"says which one is wanted, GDPO does harm unless {a} gets a larger weight; if "
                "not, GDPO and GRPO differ little"
            )


def _by_prompt(seen: Evidence) -> Iterator[str]:
    for j, k in _pairs(seen):
        factor = seen.factor_by_prompt(j, k)
        if factor >= BY_PROMPT:
            yield (
                f"The scale of {seen.names[j]} against {seen.names[k]} depends on the prompt (by a "
                f"factor of {factor:.1f}): GDPO helps if all rewards are hard to learn, which no "
                "rescaling does, and differs little from GRPO if one is easy"
            )


def _weights(seen: Evidence) -> Iterator[str]:
    worth_K = np.abs(seen.weights_K) * seen.range_K
    for j, k, ratio in _unequal(seen):
        if worth_K[seen.used_K].max() < UNEQUAL * worth_K[seen.used_K].min():
            yield (
                f"The weights make up for {seen.names[j]} having {ratio:.3g} times the range of "
                f"{seen.names[k]}, so GRPO is already rescaled, and near GDPO with equal weights; "
                "under GDPO, a weight says only what a reward counts"
            )


def _ranges(seen: Evidence) -> Iterator[str]:
    for j, k, ratio in _unequal(seen):
        a, b = seen.names[j], seen.names[k]
        yield (
            f"{a} has {ratio:.3g} times the range of {b}: GDPO helps if {a} is no harder to learn "
            f"than {b}, and rescaled GRPO is then near it; if {a} is harder, GDPO and GRPO differ "
            "little; and a range that is meant as a weight has to become one"
        )


def _equal(seen: Evidence) -> Iterator[str]:
    yield (
        "The ranges are about equal: GDPO helps if all rewards are hard to learn, and differs "
        "little from GRPO if one is easy"
    )


# by name; the last one always applies
RULES: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "too few": _too_few,
    "chance": _chance,
    "conflict": _conflict,
    "by prompt": _by_prompt,
    "weights": _weights,
    "ranges": _ranges,
    "equal": _equal,
}


def moved_by_chance(seen: Evidence, k: int) -> bool:
    """Whether nothing but chance seems to move a reward.

    Its mean neither rises nor moves more than means of random samples do, its groups differ as much
    as chance makes them differ, and it is correlated with no other reward. A reward that training
    neglects looks the same.
    """
    mean_T = seen.mean_TK[np.isfinite(seen.mean_TK[:, k]), k]
    steps = len(mean_T)
    between, within = (getattr(seen.sums, f"{what}_freedom_K")[k] for what in ("between", "within"))
    if steps < NOISE_STEPS or not between or not within:
        return False
    variance = seen.sums.within_K[k] / within
    groups = seen.sums.between_K[k] / between / variance
    samples = (between + within) / steps + 1  # of a step
    moves = mean_T.var(ddof=1) * samples / variance
    rise = correlation(np.arange(steps), mean_T) or 0.0
    others = [seen.correlation(j, k) for j in np.flatnonzero(seen.used_K).tolist() if j != k]
    return bool(
        abs(rise) * np.sqrt(steps) < CHANCE
        and moves - 1 < CHANCE * np.sqrt(2 / (steps - 1))
        and abs(groups - 1) < CHANCE * np.sqrt(2 / between + 2 / within)
        and all(abs(other) * np.sqrt(within) < CHANCE for other in others)
    )


def exclude_each_other(seen: Evidence, j: int, k: int) -> bool:
    """Whether two rewards are never both above their lowest values, though chance would do it."""
    met_j, met_k = seen.sums.met_KK[j, k], seen.sums.met_KK[k, j]
    by_chance = met_j * met_k / seen.sums.have_KK[j, k]
    return bool(seen.sums.met_both_KK[j, k] == 0 and by_chance >= EXCLUDED)


def _pairs(seen: Evidence) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rewards in use that some sample has both."""
    for j, k in permutations(np.flatnonzero(seen.used_K).tolist(), 2):
        if seen.sums.have_KK[j, k]:
            yield j, k


def _unequal(seen: Evidence) -> list[tuple[int, int, float]]:
    """Return (j, k, ratio) where the range of j is larger; the largest ratio comes first."""
    found = [(j, k, float(seen.range_K[j] / seen.range_K[k])) for j, k in _pairs(seen)]
    return sorted((f for f in found if f[2] >= UNEQUAL), key=lambda f: -f[2])
