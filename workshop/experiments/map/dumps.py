"""What the first steps of a run show of its rewards: the numbers that the rules are keyed on.

A user has the same numbers from a rollout dump of a run with GRPO. They do not say which reward is
hard; how often each of them varies within a group says nearly the same. Shape letters: as in
`simulate`, and T are the steps of the dump.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.tools.advice.evidence import FIRST_STEPS, Evidence, look
from verl_gdpo.tools.advice.rules import Measured
from workshop.experiments.map.arms import ARMS, Rewards
from workshop.experiments.map.settings import SETTINGS, Setting
from workshop.experiments.map.simulate import make_problem, train

DUMPS = Path(__file__).parent / "data" / "dumps.csv"
DUMP_SEEDS = 4
RATE = 0.32  # of Adam, near the best one of GRPO in most settings


def raw_rewards(setting: Setting, seeds: Sequence[int]) -> np.ndarray:
    """raw_KTGSP of a training with GRPO and Adam, as a user would train."""
    raw_T: list[np.ndarray] = []

    def grpo(rewards: Rewards) -> np.ndarray:
        raw_T.append(rewards.raw_KGRP[:, :, 0].astype(float))
        return ARMS["grpo"](rewards)

    train(make_problem(setting, seeds), grpo, [RATE], "adam", steps=FIRST_STEPS)
    return np.stack(raw_T, axis=1)


def evidence_of(raw_KTGSP: np.ndarray) -> Evidence:
    """What a dump with these rewards shows; the prompts of all seeds are one batch."""
    K, T, G = raw_KTGSP.shape[:3]
    raw_TNGK = raw_KTGSP.reshape(K, T, G, -1).transpose(1, 3, 2, 0)
    N = raw_TNGK.shape[1]
    weights = {f"reward {k}": 1.0 for k in range(K)}
    everything, groups = np.ones(N * G, np.bool_), np.repeat(np.arange(N), G)
    return Evidence(
        [
            look(RewardMatrix(weights, values, np.ones_like(values, np.bool_)), everything, groups)
            for values in raw_TNGK.reshape(T, N * G, K)
        ]
    )


def measure(setting: Setting) -> Measured:
    """Of some seeds at once."""
    return evidence_of(raw_rewards(setting, range(DUMP_SEEDS))).measured()[0]


def write(path: Path = DUMPS) -> None:
    """Measure every setting."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("setting", *Measured._fields))
        for name, setting in SETTINGS.items():
            writer.writerow((name, *(f"{number:.3g}" for number in measure(setting))))


def read(path: Path = DUMPS) -> dict[str, Measured]:
    with path.open(newline="") as file:
        return {
            line["setting"]: Measured(*(float(line[name]) for name in Measured._fields))
            for line in csv.DictReader(file)
        }
