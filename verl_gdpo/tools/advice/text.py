"""Says in words and tables what GDPO would change."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from verl_gdpo.batch.advantages import Floats
from verl_gdpo.terminal import printable, render
from verl_gdpo.tools.advice.evidence import Evidence
from verl_gdpo.tools.advice.rules import PAGE, advise

TITLE = "What would GDPO change?"
WIDTH = 100  # columns of a terminal
ENDS = 0.1  # of the steps: means at the start and at the end
PAIRS_SHOWN = 6  # pairs of rewards, those with the largest correlation
# for responses that nobody's policy wrote: what follows from ranges and weights alone
RULES_FOR_MADE_UP = ("too few", "weights", "ranges", "equal")

HEADER = (
    *("reward", "weight", "range", "spread", "mean at first", "at last"),
    *("share under GRPO", "under GDPO"),
)
LEGEND = """\
range: highest less lowest value, declared or seen; spread: standard deviation within groups;
share: of the update, the covariance of the reward's part with the whole"""


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


def of_made_up_responses(seen: Evidence) -> str:
    """Return what ranges and weights say, given responses that `verl-gdpo check` has made up."""
    names = [name for name, used in zip(seen.names, seen.used_K, strict=True) if used]
    ranges = [f"{size:.3g}" for size in seen.range_K[seen.used_K]]
    listed = ", ".join(
        f"{printable(name)} {size}" for name, size in zip(names, ranges, strict=True)
    )
    return _wrapped(
        f"{TITLE} These responses are made up, so only ranges count here ({listed or 'none'}). "
        f"{printable(advise(seen, RULES_FOR_MADE_UP).sentence)}. See {PAGE}; `verl-gdpo replay "
        "RUN` says more, from the rollouts of a run."
    )


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
