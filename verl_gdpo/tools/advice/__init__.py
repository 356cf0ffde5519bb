"""One sentence of advice, with a table and facts: does GDPO help for these rewards?

Each rule is a line of docs/when_gdpo_helps.md, and claims no more than its simulation shows. What a
simulation knew by construction and nobody sees in rewards, such as which reward is easy to learn,
the sentence leaves to its reader. `tests/tools/test_advice.py` gives the rules the rewards of that
simulation, and compares what they claim with what it found.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from verl_gdpo.batch.advantages import Floats, correlation
from verl_gdpo.terminal import printable, render
from verl_gdpo.tools.advice.evidence import Evidence

PAGE = "docs/when_gdpo_helps.md#should-i-use-gdpo-for-my-rewards"
UNEQUAL = 2.0  # times the range of another reward
BY_PROMPT = 2.5  # factor; in the simulation 1.1 to 1.5 where scales are the same, else 3.1 or more
NOISE_STEPS = 10  # fewer steps do not show that a reward does not rise
CHANCE = 3.0  # standard errors
EXCLUDED = 20  # samples with both rewards that chance would have brought
TITLE = "What would GDPO change?"
WIDTH = 100  # columns of a terminal
ENDS = 0.1  # of the steps: means at the start and at the end
PAIRS_SHOWN = 6  # pairs of rewards, those with the largest correlation

HEADER = (
    *("reward", "weight", "range", "spread", "mean at first", "at last"),
    *("share under GRPO", "under GDPO"),
)
LEGEND = """\
range: highest less lowest value, declared or seen; spread: standard deviation within groups;
share: of the update, the covariance of the reward's part with the whole"""


@dataclass(frozen=True)
class Advice:
    rule: str  # a key of `RULES`
    sentence: str


def advise(evidence: Evidence) -> Advice:
    """Return the advice of the first rule that applies."""
    return next(Advice(name, said) for name, rule in RULES.items() for said in rule(evidence))


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


@dataclass(frozen=True)
class Description:
    """What GDPO would change: one sentence of advice, a table of the rewards, and more facts."""

    advice: str
    rows: Sequence[Sequence[str]]  # under `HEADER`
    facts: Sequence[str]

    def __str__(self) -> str:
        """Return it for a terminal."""
        table = render(HEADER, [[*map(printable, row)] for row in self.rows])
        facts = "\n".join(_wrapped(f"- {printable(fact)}.") for fact in self.facts)
        advice = _wrapped(f"{printable(self.advice)}. See {PAGE}")
        return f"{advice}\n\n{table}\n{LEGEND}\n\n{facts}"


def describe(seen: Evidence) -> Description:
    """Return the description of a run, or of a step."""
    return Description(advise(seen).sentence, _reward_rows(seen), [*_facts(seen)])


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _reward_rows(seen: Evidence) -> list[list[str]]:
    count = max(round(ENDS * len(seen.steps)), 1)
    first_K, last_K = (_mean(part) for part in (seen.mean_TK[:count], seen.mean_TK[-count:]))
    grpo_K, gdpo_K = (seen.shares_K(method) for method in ("grpo", "gdpo"))
    return [
        [
            name,
            *(f"{column[k]:.3g}" for column in (seen.weights_K, seen.range_K, seen.spread_K)),
            *("-" if np.isnan(column[k]) else f"{column[k]:.3g}" for column in (first_K, last_K)),
            *(f"{column[k]:.1%}" for column in (grpo_K, gdpo_K)),
        ]
        for k, name in enumerate(seen.names)
    ]


def _mean(part_TK: Floats) -> list[float]:
    columns = [column[np.isfinite(column)] for column in part_TK.T]
    return [float(column.mean()) if len(column) else np.nan for column in columns]


def _facts(seen: Evidence) -> list[str]:
    used = np.flatnonzero(seen.used_K).tolist()
    together = [(j, k) for j, k in combinations(used, 2) if seen.sums.have_KK[j, k]]
    found = []
    if together:
        shown = sorted(together, key=lambda pair: -abs(seen.correlation(*pair)))[:PAIRS_SHOWN]
        listed = ", ".join(
            f"{seen.names[j]} and {seen.names[k]} {seen.correlation(j, k):+.2f}" for j, k in shown
        )
        found.append(f"Correlation of rewards within groups: {listed}")
        j, k = max(together, key=lambda pair: seen.factor_by_prompt(*pair))
        found.append(
            f"The scale of {seen.names[j]} against {seen.names[k]} differs between prompts by a "
            f"factor of {seen.factor_by_prompt(j, k):.2f} (in the simulation 1.1 to 1.5 by chance "
            "alone, and 3.1 or more where scales depend on the prompt)"
        )
    pairs = seen.pairs
    if pairs.different:
        share = {
            name: f"{count / pairs.different:.1%}"
            for name, count in vars(pairs).items()
            if name != "different"
        }
        found.append(
            f"Of {pairs.different:,} pairs of responses to a prompt with different rewards, the "
            f"rewards oppose each other in {share['opposed']}; GRPO ties {share['tied_grpo']} and "
            f"GDPO {share['tied_gdpo']}; they disagree about which one is better in "
            f"{share['turned']}"
        )
    alone, rescaled = seen.with_gdpo("grpo"), seen.with_gdpo("rescaled")
    if alone is not None and rescaled is not None:
        found.append(
            f"The advantages of GRPO have the correlation {alone:.3f} with those of GDPO; those of "
            f"GRPO on rewards of equal spread within groups, {rescaled:.3f}"
        )
    return found
