"""What the first steps of a run show of its rewards: the numbers that the rules are keyed on.

A user has the same numbers from a rollout dump of a run with GRPO. They do not say which reward is
hard; how often each of them varies within a group says nearly the same. Shape letters: as in
`simulate`, and T are the steps of the dump.
"""

import csv
from pathlib import Path

import numpy as np

from verl_gdpo.tools.advice.rules import Measured
from workshop.experiments.map.arms import ARMS, Rewards
from workshop.experiments.map.settings import SETTINGS
from workshop.experiments.map.simulate import make_problem, train

DUMPS = Path(__file__).parent / "data" / "dumps.csv"
DUMP_STEPS, DUMP_SEEDS = 30, 4
RATE = 0.32  # of Adam, near the best one of GRPO in most settings
NOTHING = 1e-9


def measure(name: str) -> Measured:
    """Train with GRPO and Adam, as a user would, and measure the rewards of the first steps."""
    raw_T: list[np.ndarray] = []

    def grpo(rewards: Rewards) -> np.ndarray:
        raw_T.append(rewards.raw_KGRP[:, :, 0].astype(float))
        return ARMS["grpo"](rewards)

    problem = make_problem(SETTINGS[name], range(DUMP_SEEDS))
    train(problem, grpo, [RATE], "adam", steps=DUMP_STEPS)
    return measured(np.stack(raw_T, axis=1))


def measured(raw_KTGSP: np.ndarray) -> Measured:
    """From the raw rewards of steps, samples, seeds and prompts."""
    K, T, G = raw_KTGSP.shape[:3]
    groups_KGN = np.moveaxis(raw_KTGSP, 2, 1).reshape(K, G, -1)
    centred_KGN = groups_KGN - groups_KGN.mean(1, keepdims=True)
    std_KN = groups_KGN.std(1, ddof=1)
    spread_K = np.sqrt(np.square(std_KN).mean(1))
    large, small = int(spread_K.argmax()), int(spread_K.argmin())
    varies_K = (std_KN > NOTHING).mean(1)
    mean_KT = raw_KTGSP.mean((2, 3, 4))
    rise_K = (mean_KT[:, -T // 3 :].mean(1) - mean_KT[:, : T // 3].mean(1)) / spread_K
    pairs = [(j, k) for j in range(K) for k in range(j)]
    correlation_KK = np.corrcoef(centred_KGN.reshape(K, -1))
    return Measured(
        spread_ratio=float(spread_K[large] / spread_K[small]),
        varies_ratio=float(varies_K[large] / varies_K[small]),
        varies_alike=float(varies_K.max() / varies_K.min()),
        correlation=max(float(correlation_KK[pair]) for pair in pairs),
        prompt_factor=max(_prompt_factor(std_KN[[*pair]]) for pair in pairs),
        together=min(_together(raw_KTGSP[[*pair]]) for pair in pairs),
        rise=float(abs(rise_K).min()),
    )


def _prompt_factor(std_2N: np.ndarray) -> float:
    """How much the ratio of two rewards' spreads differs between groups; 1 is not at all."""
    both_2N = std_2N[:, (std_2N > NOTHING).all(0)]
    ratio_N = np.log(both_2N[0] / both_2N[1])
    return float(np.exp(ratio_N.std())) if len(ratio_N) > 1 else 1.0


def _together(raw_2TGSP: np.ndarray) -> float:
    """How often two rewards are both above their lowest values, over what chance would bring."""
    met_2B = raw_2TGSP.reshape(2, -1) > raw_2TGSP.min((1, 2, 3, 4))[:, None] + NOTHING
    chance = met_2B.mean(1).prod()
    return float(met_2B.all(0).mean() / chance) if chance else 1.0


def write(path: Path = DUMPS) -> None:
    """Measure every setting."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("setting", *Measured._fields))
        for name in SETTINGS:
            writer.writerow((name, *(f"{number:.3g}" for number in measure(name))))


def read(path: Path = DUMPS) -> dict[str, Measured]:
    with path.open(newline="") as file:
        return {
            line["setting"]: Measured(*(float(line[name]) for name in Measured._fields))
            for line in csv.DictReader(file)
        }
