"""PAPO (arXiv 2603.26535) as docs/variants.md sets it: process on right answers alone."""

import re
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from repository import REPO

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import BatchRows

(BLOCK,) = re.findall(
    r"<!-- read by tests/core/algorithm/test_conditions_papo.py -->\n```yaml\n(.*?)```",
    (REPO / "docs" / "variants.md").read_text(),
    re.DOTALL,
)
SETTINGS = read_settings(OmegaConf.create(BLOCK).algorithm)
EPS = 1e-6

samples = st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
batches = st.lists(st.lists(samples, min_size=2, max_size=6), min_size=1, max_size=4)


def with_settings(batch):
    """The advantage of each sample, by the path of a training step."""
    infos = [
        {"correctness": float(right), "process": process}
        for group in batch
        for right, process in group
    ]
    groups = [g for g, group in enumerate(batch) for _ in group]
    keys = [f"{g}_{i}_0" for i, g in enumerate(groups)]
    rows = BatchRows.from_keys(keys, infos, ["d"] * len(keys), [False] * len(keys))
    rewards = RewardMatrix.of(rows, SETTINGS)
    return scalars_of(rewards, rows.counted_B, np.array(groups), SETTINGS).A_B.tolist()


def normalised(values):
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    return [(value - mean(values)) / (stdev(values) + EPS) for value in values]


def papo(batch):
    """The paper's two parts, as loops: outcome over the group, process over its right answers."""
    advantages = []
    for group in batch:
        outcome = normalised([float(right) for right, _ in group])
        of_right = iter(normalised([process for right, process in group if right]))
        for (right, _), part in zip(group, outcome, strict=True):
            advantages.append(part + next(of_right) if right else part)
    return advantages


@given(batches)
def test_outcome_over_the_group_plus_process_over_its_right_answers(batch):
    assert with_settings(batch) == pytest.approx(papo(batch), abs=1e-9)


def test_by_hand():
    # a: outcome (1, 1, 0, 0) has mean 1/2 and std .57735, so +-.8660; process of the two right
    #    answers (1, 0) is +-.7071; the process of the wrong answers counts nowhere
    # b: all are right, so outcome is 0 and process (0, 1) is +-.7071
    # c: one right answer has nothing to compare its process with; outcome (1, 0) is +-.7071
    batch = [[(1, 1.0), (1, 0.0), (0, 1.0), (0, 0.0)], [(1, 0.0), (1, 1.0)], [(1, 0.5), (0, 1.0)]]
    a, b, c = [1.5731, 0.1589, -0.8660, -0.8660], [-0.7071, 0.7071], [0.7071, -0.7071]
    assert with_settings(batch) == pytest.approx(a + b + c, abs=1e-4)
    assert papo(batch) == pytest.approx(a + b + c, abs=1e-4)
