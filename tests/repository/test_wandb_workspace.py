"""examples/wandb_workspace.py shows metrics that exist, and W&B's own package takes it."""

import inspect
import os
import re
import subprocess
import sys

import pytest
from metrics_of_batch import of_batch
from repository import REPO
from verl.utils import tracking

from examples.wandb_workspace import SECTIONS, TABLE

OF_VERL = ["val-aux/made/format/mean@1", "critic/advantages/max", "response_length/mean"]


def test_every_panel_shows_metrics_that_are_logged_and_no_metric_is_in_two():
    bounds, sources = {"x": (0, 1), "y": (0, 1)}, ["p"] * 4 + ["q"] * 4
    names = [*of_batch(bounds=bounds, sources=sources), *OF_VERL]
    shown = []
    for pattern in (pattern for panels in SECTIONS.values() for pattern in panels.values()):
        assert pattern[0] == "^" and pattern[-1] == "$"
        found = [name for name in names if re.search(pattern, name)]
        assert found, pattern
        shown += found
    assert len(shown) == len({*shown})
    patterns = [pattern for panels in SECTIONS.values() for pattern in panels.values()]
    of_tools = "gdpo/rollout/tool_seconds/mean"  # which is no reward
    assert not any(re.search(pattern, of_tools) for pattern in patterns)


def test_the_table_is_the_one_that_is_logged():
    assert f'"{TABLE}"' in inspect.getsource(tracking)


BUILD = """if 1:
    from examples.wandb_workspace import NAME, SECTIONS, TABLE, workspace
    made = workspace("somebody", "something")
    view = made._to_model()  # what `save` sends
    assert view.display_name == NAME
    *sections, table = view.spec.section.panel_bank_config.sections
    assert [section.name for section in sections] == [*SECTIONS]
    for section, panels in zip(sections, SECTIONS.values(), strict=True):
        configs = [panel.config for panel in section.panels]
        assert [c.chart_title for c in configs] == [*panels]
        assert [c.metric_regex for c in configs] == [*panels.values()]
        assert all(c.use_metric_regex for c in configs)
    assert TABLE in table.model_dump_json(by_alias=True)
    # what comes back from W&B is the same
    again = type(made)._from_model(view)
    assert [section.name for section in again.sections][: len(SECTIONS)] == [*SECTIONS]
"""


@pytest.mark.slow  # it needs a package index
def test_wandbs_package_takes_the_specification(tmp_path):
    text = (REPO / "examples" / "wandb_workspace.py").read_text()
    (package,) = re.findall(r"pip install (wandb-workspaces==\S+)", text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    subprocess.run([*pip, package], check=True, timeout=300)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
