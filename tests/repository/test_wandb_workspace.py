"""examples/wandb_workspace.py shows metrics that exist; `nox -s workspace` builds it."""

import re

from metrics_of_batch import of_batch

from examples.wandb_workspace import SECTIONS, TABLE
from verl_gdpo.verl_hooks.dump_writer import NAME

OF_VERL = ["val-aux/made/format/mean@1", "critic/advantages/max", "response_length/mean"]


def test_every_panel_shows_a_metric_that_is_logged():
    logged = of_batch(bounds={"x": (0, 1), "y": (0, 1)}, sources=["p"] * 4 + ["q"] * 4)
    for panels in SECTIONS.values():
        for pattern in panels.values():
            assert pattern[0] == "^" and pattern[-1] == "$"
            assert any(re.search(pattern, name) for name in [*logged, *OF_VERL]), pattern


def test_no_metric_is_in_two_panels():
    patterns = [pattern for panels in SECTIONS.values() for pattern in panels.values()]
    for name in [*of_batch(bounds={"x": (0, 1)}, sources=["p"] * 4 + ["q"] * 4), *OF_VERL]:
        assert sum(bool(re.search(pattern, name)) for pattern in patterns) <= 1, name


def test_the_table_is_the_one_that_is_logged():
    assert TABLE == NAME
