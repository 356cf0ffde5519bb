"""How often the advice of `replay` and `report` was right on held-out runs: docs/advice.md's table.

A run is what a user has: 30 steps of GRPO, with one seed, of which the tools saw the rewards alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from workshop.experiments.map.compare import MATTERS
from workshop.experiments.results import Simulated, read_simulated

STEPS = (30, 2)  # that were seen


def rows() -> Iterator[tuple[str, str]]:
    """(what was counted, the cells of its line)."""
    of_kind: dict[str, dict[str, Simulated]] = {}
    for name, kept in read_simulated().items():
        kind = "the map's settings" if kept.measured else "random settings"
        of_kind.setdefault(kind, {})[name] = kept
    for kind, settings in of_kind.items():
        for steps in STEPS:
            yield f"{kind}, {steps} steps", " | ".join(advised(settings, steps))
        for arm in ("gdpo", "grpo"):
            right = {name: [cost_of(arm, of.earned) < MATTERS] for name, of in settings.items()}
            yield f"{kind}, always {arm}", " | ".join(share(right))


def advised(settings: Mapping[str, Simulated], steps: int) -> list[str]:
    """Runs; the share of which the advice was unsure; of the others, the rule's, and right ones."""
    cases = {name: [of for of in s.advised if of["steps"] == steps] for name, s in settings.items()}
    sure = {name: [case for case in of if case["is_sure"]] for name, of in cases.items()}
    count, said = (sum(map(len, of.values())) for of in (cases, sure))
    same = {name: [case["is_the_rule"] for case in of] for name, of in sure.items() if of}
    right = {name: [case["cost"] < MATTERS for case in of] for name, of in sure.items() if of}
    return [str(count), f"{1 - said / count:.2f}", *share(same), *share(right)]


def cost_of(arm: str, earned: Mapping[str, float]) -> float:
    """How much an arm earns less than the best that anybody can train with."""
    return max(earned[name] for name in ("gdpo", "grpo", "grpo_range")) - earned[arm]


def share(of: Mapping[str, Sequence[bool]]) -> tuple[str, str]:
    """Of the runs, and its interval if other settings had been drawn."""
    counts = np.array([(sum(group), len(group)) for group in of.values()])
    again = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    drawn = counts[again].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return f"{counts[:, 0].sum() / counts[:, 1].sum():.2f}", f"{low:.2f} to {high:.2f}"
