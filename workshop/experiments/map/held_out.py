"""How often the advice of the tools is right, in runs and settings that its rules were not made on.

python -m workshop.experiments.map.held_out           # count, from the committed outcomes
python -m workshop.experiments.map.held_out --train   # train what has no outcome yet, for minutes

A run is what a user has: 30 steps of GRPO, with one seed, of which the tools see the rewards alone.
The settings of `settings.py` come with new seeds. Further settings are drawn at random, so that
nobody has chosen them.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from verl_gdpo.terminal import render
from verl_gdpo.tools.advice import advise
from verl_gdpo.tools.advice.evidence import FIRST_STEPS
from verl_gdpo.tools.advice.rules import rule_of
from workshop.experiments.map import dumps, results
from workshop.experiments.map.arms import FIRST_ARMS
from workshop.experiments.map.compare import MATTERS
from workshop.experiments.map.draws import arms_of, run_draw, trained_as
from workshop.experiments.map.settings import SETTINGS, SHARES, Reward, Setting, event

DATA = Path(__file__).parent / "data" / "held_out.csv"
OPTIMIZER = "adam"  # as verl has it
DRAWS, SETTINGS_DRAWN = 4, 40
FIRST_SEED, SEEDS = 2_000_000, 4  # no draw has these
HEADER = ("runs of", "runs", "says nothing", "same as the rule", "interval", "right", "interval")


@cache
def drawn_settings() -> dict[str, Setting]:
    """Of two to four rewards of any kind that the simulation has."""
    chance = np.random.default_rng(20261123)
    found = {}
    for number in range(SETTINGS_DRAWN):
        by_prompt = chance.random() < 0.2
        rewards = [
            Reward(
                (event(str(chance.choice([*SHARES])), own=bool(chance.random() < 0.6)),),
                range=float(np.round(20 ** chance.uniform(-1, 1), 2)),
                by_prompt="each" if by_prompt else "no",
            )
            for _ in range(chance.integers(2, 5))
        ]
        if chance.random() < 0.15:
            size = float(np.round(20 ** chance.uniform(-1, 1), 2))
            rewards.append(Reward((), size, noise=1.0, worth=0.0))
        name = f"drawn {number}"
        found[name] = Setting(name, tuple(rewards), samples=int(chance.choice([4, 8, 16])))
    return found


def train() -> None:
    """Train the arms of the rules in the settings that were drawn; write what each earned."""
    with DATA.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("setting", *FIRST_ARMS))
        for name, setting in drawn_settings().items():
            arms = [arm for arm in arms_of(setting) if arm in FIRST_ARMS]
            draws = [run_draw(setting, OPTIMIZER, draw, arms) for draw in range(DRAWS)]
            earned = {arm: fmean(draw[arm].shares for draw in draws) for arm in arms}
            alike = (earned[trained_as(setting, arm)] for arm in FIRST_ARMS)
            writer.writerow((name, *(f"{shares:.4f}" for shares in alike)))
            file.flush()
            print(name, earned, file=sys.stderr, flush=True)


class Case(NamedTuple):
    """What the advice on one run was."""

    setting: str
    is_sure: bool
    is_the_rule: bool  # of the setting, as four other seeds together show it
    cost: float  # the worst arm that the advice names, less than the best arm there is

    @property
    def is_right(self) -> bool:
        return self.cost < MATTERS


def cases(
    settings: Mapping[str, Setting], earned: Mapping[str, Mapping[str, float]], steps: int
) -> Iterator[Case]:
    """The advice on each run of each setting, of which so many steps are seen."""
    for name, setting in settings.items():
        truth = rule_of(dumps.measure(setting))
        raw_KTGSP = dumps.raw_rewards(setting, range(FIRST_SEED, FIRST_SEED + SEEDS))
        for seed in range(SEEDS):
            advice = advise(dumps.evidence_of(raw_KTGSP[:, :steps, :, [seed]]))
            is_the_rule = advice.rule.arms == truth.arms
            yield Case(name, advice.is_sure, is_the_rule, cost_of(advice.rule.arms, earned[name]))


def cost_of(arms: Sequence[str], earned: Mapping[str, float]) -> float:
    """How much the worst of some arms earns less than the best that anybody can train with."""
    best = max(earned[arm] for arm in ("gdpo", "grpo", "grpo_range"))
    return max((best - earned[arm] for arm in arms), default=0.0)


def earned_in_map() -> dict[str, dict[str, float]]:
    """What each arm of the rules earns in the settings of the map."""
    found = results.read()
    return {
        name: {
            arm: fmean(
                outcome.shares
                for outcome in found[
                    results.Key(OPTIMIZER, name, trained_as(setting, arm))
                ].values()
            )
            for arm in FIRST_ARMS
        }
        for name, setting in SETTINGS.items()
    }


def earned_in_drawn() -> dict[str, dict[str, float]]:
    with DATA.open(newline="") as file:
        return {
            line.pop("setting"): {arm: float(shares) for arm, shares in line.items()}
            for line in csv.DictReader(file)
        }


def row(what: str, found: Sequence[Case]) -> list[str]:
    sure = [case for case in found if case.is_sure]
    return [
        what,
        str(len(found)),
        f"{1 - len(sure) / len(found):.2f}",
        *_share([(case.setting, case.is_the_rule) for case in sure]),
        *_share([(case.setting, case.is_right) for case in sure]),
    ]


def _share(of: Sequence[tuple[str, bool]]) -> tuple[str, str]:
    """A share, and its interval if other settings had been drawn."""
    groups: dict[str, list[bool]] = {}
    for setting, holds in of:
        groups.setdefault(setting, []).append(holds)
    counts = np.array([(sum(group), len(group)) for group in groups.values()])
    again = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    drawn = counts[again].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return f"{counts[:, 0].sum() / counts[:, 1].sum():.2f}", f"{low:.2f} to {high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.experiments.map.held_out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--train", action="store_true")
    if parser.parse_args().train:
        train()
    kinds = {
        "the map's settings": (SETTINGS, earned_in_map()),
        "settings drawn at random": (drawn_settings(), earned_in_drawn()),
    }
    rows = []
    for kind, (settings, earned) in kinds.items():
        for steps in (FIRST_STEPS, 2):
            found = [*cases(settings, earned, steps)]
            rows.append(row(f"{kind}, {steps} steps", found))
        for arm in ("gdpo", "grpo"):
            always = [Case(n, True, False, cost_of([arm], earned[n])) for n in settings]
            rows.append(row(f"{kind}, always {arm}", always))
    print(render(HEADER, rows, left=range(1)))


if __name__ == "__main__":
    main()
