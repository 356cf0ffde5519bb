"""examples/wandb_workspace.py with W&B's own package, offline. Only `nox -s workspace` runs it."""

from examples.wandb_workspace import NAME, SECTIONS, TABLE, workspace


def test_the_package_takes_the_specification():
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
