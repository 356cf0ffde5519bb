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
from verl_gdpo.tools.advice.rules import AdviceRule, Measured, read_rules, rule_of

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

    rule: AdviceRule
    measured: Measured
    of: dict[str, str]  # {quantity: rewards}
    votes: Counter[str]  # {what to train with: how often groups drawn again say it}
    shares_RMK: Floats  # of groups drawn again, under GRPO and GDPO

    @property
    def is_sure(self) -> bool:
        same = {rule.train_with for rule in read_rules() if rule.arms == self.rule.arms}
        return sum(self.votes[text] for text in same) >= SURE * self.votes.total()


def advise(evidence: Evidence) -> Advice:
    """Apply the rules to the evidence, and to groups that are drawn again from it."""
    measured, of = evidence.measured()
    votes: Counter[str] = Counter()
    shares = []
    for numbers in evidence.drawn_again():
        votes[rule_of(evidence.measured(numbers)[0]).train_with] += 1
        shares.append([evidence.shares_K(method, numbers) for method in METHODS])
    return Advice(rule_of(measured), measured, of, votes, np.array(shares))


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
        table = render(HEADER, self.rows)
        facts = "\n".join(wrapped(printable(fact), "- ") for fact in self.facts)
        advice = "\n".join(wrapped(f"{printable(sentence)}.") for sentence in self.sentences)
        return f"{advice}\n\n{table}\n{LEGEND}\n\nWhat the rules of {PAGE} read:\n{facts}"


def describe(evidence: Evidence) -> Description:
    """Return the description of the first steps of a run."""
    advice = advise(evidence)
    numbers = zip(advice.measured._fields, advice.measured, strict=True)
    facts = [f"{key} {value:.3g}: {advice.of[key]}" for key, value in numbers if np.isfinite(value)]
    return Description([*_sentences(evidence, advice)], _reward_rows(evidence), facts)


def _sentences(evidence: Evidence, advice: Advice) -> list[str]:
    rule = advice.rule
    if advice.is_sure:
        values = [(key, getattr(advice.measured, key)) for key in rule.bounds]
        numbers = "; ".join(f"{key} {value:.3g}: {advice.of[key]}" for key, value in values)
        because = f"{rule.symptom} ({numbers})" if numbers else rule.symptom
        return [_change(evidence, advice), f"Train with {rule.train_with}: {because}"]
    total, most = advice.votes.total(), advice.votes.most_common(2)
    votes = ", and ".join(f"{n / total:.0%} say {train_with}" for train_with, n in most)
    return [
        _change(evidence, advice),
        f"{len(evidence.step_G):,} groups of {evidence.step_count} steps are too few to say what "
        f"to train with: of groups drawn again, {votes}",
    ]


def _change(evidence: Evidence, advice: Advice) -> str:
    """What GDPO changes: the share of the reward whose share it changes most."""
    if advice.rule.name in ("one reward", "same"):
        return "GDPO changes nothing"
    if advice.rule.name == "cancel":
        return f"Under GDPO {advice.of['opposite'].replace(', ', ' and ')} cancel"
    shares_MK = np.array([evidence.shares_K(method) for method in METHODS])
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
    reward = [*evidence.weights][k]
    return f"{what}: the share of {reward} in the update goes from {before} to {after}"


def _reward_rows(evidence: Evidence) -> list[list[str]]:
    n, weights_K = evidence.numbers, evidence.weights_K
    spread_K = np.sqrt(np.diagonal(n["square"]) / n["freedom"].clip(min=1))
    ends = [n[f"sum_{end}"] / n[f"count_{end}"].clip(min=1) for end in (0, 1)]
    columns = [
        (f"{value:.3g}" for value in column)
        for column in (weights_K, spread_K, *(np.where(weights_K < 0, -1, 1) * end for end in ends))
    ]
    varies, *shares = (
        (f"{value:.0%}" for value in column)
        for column in (n["varies"] / n["has"].clip(min=1), *map(evidence.shares_K, METHODS))
    )
    weight, spread, first, last = columns
    rows = zip(evidence.weights, weight, spread, varies, first, last, *shares, strict=True)
    return [[*row] for row in rows]
