"""Makes a W&B workspace that shows the metrics of verl-gdpo by question.

    pip install wandb-workspaces==0.4.13
    python examples/wandb_workspace.py ENTITY PROJECT

It needs a login to W&B, and prints the address of the workspace. `SECTIONS` is the whole
specification: {question: {title of a panel: pattern of its metrics}}.
"""

import sys
from collections.abc import Mapping
from typing import Any

NAME = "verl-gdpo"
TABLE = "val/generations"  # which verl logs with trainer.log_val_generations
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "What is learned?": {
        "reward, training": r"^gdpo/[^/]+/mean(/.+)?$",
        "reward, validation": r"^val-(aux|core)/.+/mean@\d+$",
    },
    "Which reward drives the update?": {
        "share of the update": r"^gdpo/[^/]+/share$",
        "energy": r"^gdpo/[^/]+/energy$",
        "correlation with the advantage": r"^gdpo/[^/]+/correlation$",
    },
    "Is a reward dead or saturated?": {
        "differs in this share of the groups": r"^gdpo/[^/]+/varies$",
        "groups that are all high": r"^gdpo/[^/]+/groups_all_high$",
        "groups that are all low": r"^gdpo/[^/]+/groups_all_low$",
        "at its bounds": r"^gdpo/[^/]+/at_(low|high)$",
    },
    "Do rewards oppose each other?": {
        "correlation of rewards within groups": r"^gdpo/[^/]+/correlation_with_.+$",
        "samples in which they cancel": r"^gdpo/cancelled$",
        "tied pairs": r"^gdpo/tied_pairs_(gdpo|grpo)$",
    },
    "How much signal is there?": {
        "groups without signal": r"^gdpo/no_signal(/.+)?$",
        "what the batch step divides by": r"^gdpo/batch_norm_std$",
        "largest and smallest advantage": r"^critic/advantages/(max|min)$",
    },
    "Why does the length change?": {
        "response length": r"^response_length/mean$",
        "correlation of advantage and length": r"^gdpo/length_correlation$",
    },
}


def workspace(entity: str, project: str) -> Any:
    """Return the workspace, which is not saved yet."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=question,
            panels=[
                reports.LinePlot(title=title, metric_regex=pattern)
                for title, pattern in panels.items()
            ],
            is_open=True,
        )
        for question, panels in SECTIONS.items()
    ]
    table = reports.WeavePanelSummaryTable(table_name=TABLE)
    sections.append(workspaces.Section(name="What does it answer?", panels=[table]))
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/wandb_workspace.py ENTITY PROJECT")
    print(workspace(*sys.argv[1:]).save().url)
