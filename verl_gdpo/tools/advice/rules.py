"""The rules of docs/when_gdpo_helps.md: `rules.yaml`, keyed on what a rollout dump shows."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


class Measured(NamedTuple):
    """What the rewards of a dump are like; `rules.yaml` says what each number is."""

    rewards: float
    agree: float
    opposite: float
    spread_ratio: float
    varies_ratio: float
    varies_alike: float
    correlation: float
    prompt_factor: float
    together: float
    rise: float


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
