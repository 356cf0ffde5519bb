"""Which groups dynamic sampling keeps; `test_replay_buffer.py` asks verl's buffer."""

import numpy as np
import pytest

from verl_gdpo.algorithm.group_filter import classify_groups
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("metric", [None, np.array([0.0, 1.0, 1.0, 1.0, np.nan])])
def test_a_group_that_is_only_padding_is_not_kept(place, metric):
    # "varies" has the rewards 0 and 1, "same" has 1 and 1; neither knows of the padding
    samples = [("varies", 0.0), ("varies", 1.0), ("same", 1.0), ("same", 1.0)]
    samples.insert(2 * place, ("padding", 0.0))
    groups = [group for group, _ in samples]
    rows = BatchRows.from_keys(
        [f"{group}_{row}_0" for row, group in enumerate(groups)],
        [{"right": right} for _, right in samples],
        sources=["s"] * 5,
        is_padding=[group == "padding" for group in groups],
    )
    metric_B = None if metric is None else np.insert(metric[:4], 2 * place, metric[4])
    kept = classify_groups(rows, groups, GdpoSettings(), metric_B)
    assert kept == {"varies": None, "same": 1.0, "padding": 0.0}


@pytest.mark.parametrize(
    ("metric_B", "kept"),
    [
        ([np.nan, np.nan], None),  # no sample has one: GDPO's signal alone decides
        ([2.0, np.nan], 2.0),
        ([2.0, 2.0], 2.0),
        ([2.0, 3.0], None),
    ],
)
def test_the_metric_must_vary_where_a_sample_has_one(metric_B, kept):
    infos = [{"right": 0.0}, {"right": 1.0}]
    rows = BatchRows.from_keys(["u_0_0", "u_1_0"], infos, ["s"] * 2, [False] * 2)
    assert classify_groups(rows, ["u", "u"], GdpoSettings(), np.array(metric_B)) == {"u": kept}
