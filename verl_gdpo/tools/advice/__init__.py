"""What GDPO would change for the rewards of a run: sentences, and a table.

`rules.yaml` decides what to train with, and nothing else does; docs/advice.md says how often that
is right. The shares of the update say what GDPO changes. Groups that are drawn again say how sure
both are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import yaml

from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.terminal import printable, render, wrapped
from verl_gdpo.tools.advice.evidence import METHODS, Evidence, Measured

TITLE = "What would GDPO change?"
SURE = 0.8  # of groups drawn again have to say the same
MATTERS = 0.1  # of the update; a smaller change of a share is hardly one
INTERVAL = (2.5, 97.5)  # percentiles

HEADER = ("reward", "weight", "spread", "varies", "share under GRPO", "under GDPO")
LEGEND = """\
spread: standard deviation within groups; varies: in this share of the groups; share: of the update,
the covariance of the reward's part with the whole"""


class AdviceRule(NamedTuple):
    """A rule, in words for its page; it applies where each number is within its bounds."""

    name: str
    symptom: str
    bounds: Mapping[str, tuple[float, float]]
    train_with: str
    arms: Sequence[str]  # those that `train_with` names, as workshop/experiments/map calls them

    def applies(self, measured: Measured) -> bool:
        return all(
            low <= getattr(measured, name) <= high for name, (low, high) in self.bounds.items()
        )


@cache
def rules_file() -> Mapping[str, Any]:
    """All of `rules.yaml`."""
    kept: Mapping[str, Any] = yaml.safe_load(
        files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8")
    )
    return kept


def read_rules() -> list[AdviceRule]:
    """In their order; the last one has no bounds, so one always applies."""
    return [
        AdviceRule(rule["name"], rule["seen"], rule["if"], rule["train_with"], rule["arms"])
        for rule in rules_file()["rules"]
    ]


def rule_of(measured: Measured) -> AdviceRule:
    return next(rule for rule in read_rules() if rule.applies(measured))


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
    """What GDPO would change: plain sentences, and a table of the rewards."""

    sentences: Sequence[str]  # without a full stop
    rows: Sequence[Sequence[str]]  # under `HEADER`

    @property
    def advice(self) -> str:
        return ". ".join(self.sentences)

    def __str__(self) -> str:
        """Return it for a terminal."""
        advice = "\n".join(wrapped(f"{printable(sentence)}.") for sentence in self.sentences)
        return f"{advice}\n\n{render(HEADER, self.rows)}\n{LEGEND}"


def describe(evidence: Evidence) -> Description:
    """Return the description of the first steps of a run."""
    return Description([*_sentences(evidence, advise(evidence))], _reward_rows(evidence))


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
    n = evidence.numbers
    spread_K = np.sqrt(np.diagonal(n["square"]) / n["freedom"].clip(min=1))
    numbers = ([f"{value:.3g}" for value in column] for column in (evidence.weights_K, spread_K))
    columns = (n["varies"] / n["has"].clip(min=1), *map(evidence.shares_K, METHODS))
    shares = ([f"{value:.0%}" for value in column] for column in columns)
    return [[*row] for row in zip(evidence.weights, *numbers, *shares, strict=True)]
