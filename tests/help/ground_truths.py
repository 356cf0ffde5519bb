"""Ground truths of each task."""

from importlib import import_module

from verl_gdpo.tasks import TASKS

COUNTS = {"coding": 6, "constraints": 60}  # each answer of coding starts a sandbox


def ground_truths(task):
    rows = import_module(f"verl_gdpo.tasks.{task}.rows")
    made = rows.make_rows(COUNTS.get(task, 20), split="train", seed=0)
    return [row["reward_model"]["ground_truth"] for row in made]


GROUND_TRUTHS = {task: ground_truths(task) for task in TASKS}
