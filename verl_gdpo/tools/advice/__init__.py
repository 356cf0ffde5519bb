"""What GDPO would change for the rewards of a run: sentences, with a table and numbers.

`rules.yaml` decides what to train with, and nothing else does; docs/advice.md says how often that
is right. The shares of the update say what GDPO changes. Groups that are drawn again say how sure
both are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.terminal import printable, render, wrapped
from verl_gdpo.tools.advice.evidence import METHODS, Evidence
from verl_gdpo.tools.advice.rules import Measured, Rule, read_rules, rule_of

PAGE = "docs/when_gdpo_helps.md#should-i-use-gdpo-for-my-rewards"
TITLE = "What would GDPO change?"
SURE = 0.8  # of groups drawn again have to say the same
MATTERS = 0.1  # of the update; a smaller change of a share is hardly one
INTERVAL = (2.5, 97.5)  # percentiles

HEADER = (
    *("reward", "weight", "spread", "varies", "mean at first", "at last"),
    *("share under GRPO", "under GDPO"),
)
LEGEND = """\
spread: standard deviation within groups; varies: in this share of the groups; share: of the update,
the covariance of the reward's part with the whole. Means are of the first and the last third of the
steps that were looked at"""


class Advice(NamedTuple):
    """The rule that applies, and how often it does if groups are drawn again."""

    rule: Rule
    measured: Measured
    of: dict[str, str]  # {quantity: rewards}
    said: Counter[str]  # {what to train with: how often groups drawn again say it}
    shares_RMK: Floats  # of groups drawn again, under GRPO and GDPO

    @property
    def is_sure(self) -> bool:
        of_rules = {rule.train_with: tuple(rule.arms) for rule in read_rules()}
        same = sum(n for one, n in self.said.items() if of_rules[one] == tuple(self.rule.arms))
        return same >= SURE * self.said.total()


def advise(seen: Evidence) -> Advice:
    """Apply the rules to what was seen, and to groups that are drawn again from it."""
    measured, of = seen.measured()
    said: Counter[str] = Counter()
    shares = []
    for numbers in seen.drawn_again():
        said[rule_of(seen.measured(numbers)[0]).train_with] += 1
        shares.append([seen.shares_K(method, numbers) for method in METHODS])
    return Advice(rule_of(measured), measured, of, said, np.array(shares))


@dataclass(frozen=True)
class Description:
    """What GDPO would change: plain sentences, a table of the rewards, and the numbers."""

    sentences: Sequence[str]  # without a full stop
    rows: Sequence[Sequence[str]]  # under `HEADER`
    facts: Sequence[str]

    @property
    def advice(self) -> str:
        return ". ".join(self.sentences)

    def __str__(self) -> str:
        """Return it for a terminal."""
        table = render(HEADER, [[*map(printable, row)] for row in self.rows])
        facts = "\n".join(wrapped(printable(fact), "- ") for fact in self.facts)
        advice = "\n".join(wrapped(f"{printable(sentence)}.") for sentence in self.sentences)
        return f"{advice}\n\n{table}\n{LEGEND}\n\nWhat the rules of {PAGE} read:\n{facts}"


def describe(seen: Evidence) -> Description:
    """Return the description of the first steps of a run."""
    advice = advise(seen)
    found = zip(advice.measured._fields, advice.measured, strict=True)
    facts = [f"{key} {value:.3g}: {advice.of[key]}" for key, value in found if np.isfinite(value)]
    return Description([*_sentences(seen, advice)], _reward_rows(seen), facts)


def _sentences(seen: Evidence, advice: Advice) -> list[str]:
    rule = advice.rule
    if advice.is_sure:
        found = [(key, getattr(advice.measured, key)) for key in rule.bounds]
        numbers = "; ".join(f"{key} {value:.3g}: {advice.of[key]}" for key, value in found)
        because = f"{rule.seen} ({numbers})" if numbers else rule.seen
        return [_change(seen, advice), f"Train with {rule.train_with}: {because}"]
    said = [f"{n / advice.said.total():.0%} say {one}" for one, n in advice.said.most_common(2)]
    return [
        _change(seen, advice),
        f"{len(seen.step_G):,} groups of {seen.step_count} steps are too few to say what to train "
        f"with: of groups drawn again, {', and '.join(said)}",
    ]


def _change(seen: Evidence, advice: Advice) -> str:
    """What GDPO changes: the share of the reward whose share it changes most."""
    if advice.rule.name in ("one reward", "same"):
        return "GDPO changes nothing"
    if advice.rule.name == "cancel":
        return f"Under GDPO {advice.of['opposite'].replace(', ', ' and ')} cancel"
    shares_MK = np.array([seen.shares_K(method) for method in METHODS])
    k = int(np.abs(shares_MK[1] - shares_MK[0]).argmax())
    of_k_RM = advice.shares_RMK[:, :, k]
    low, high = np.percentile(of_k_RM[:, 1] - of_k_RM[:, 0], INTERVAL)
    what = "Too few groups to say whether GDPO changes which reward counts"
    if low > MATTERS or high < -MATTERS:
        what = "GDPO changes which reward counts"
    elif low > -MATTERS and high < MATTERS:
        what = "GDPO hardly changes which reward counts"
    before, after = (
        f"{share:.0%} [{low:.0%}, {high:.0%}]"
        for share, low, high in zip(
            shares_MK[:, k], *np.percentile(of_k_RM, INTERVAL, axis=0), strict=True
        )
    )
    return f"{what}: the share of {[*seen.weights][k]} in the update goes from {before} to {after}"


def _reward_rows(seen: Evidence) -> list[list[str]]:
    n, weights_K = seen.numbers, seen.weights_K
    spread_K = np.sqrt(np.diagonal(n["square"]) / n["freedom"].clip(min=1))
    ends = [n[f"sum_{end}"] / n[f"count_{end}"].clip(min=1) for end in (0, 1)]
    columns = [
        (f"{value:.3g}" for value in column)
        for column in (weights_K, spread_K, *(np.where(weights_K < 0, -1, 1) * end for end in ends))
    ]
    varies, *shares = (
        (f"{value:.0%}" for value in column)
        for column in (n["varies"] / n["has"].clip(min=1), *map(seen.shares_K, METHODS))
    )
    weight, spread, first, last = columns
    rows = zip(seen.weights, weight, spread, varies, first, last, *shares, strict=True)
    return [[*row] for row in rows]
