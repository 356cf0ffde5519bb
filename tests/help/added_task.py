"""A task that only one test uses."""

from verl_gdpo.tasks import TASK_BY_SOURCE, Task


def add_task(monkeypatch, name, score, bounds=dict, **fields):
    """A task whose rows have `name` as data source; returns its record."""
    made = {"reward_names": (), "good_response": str, "system_prompt": None, **fields}
    task = Task(name=name, data_sources=(name,), score=score, bounds=bounds, **made)
    monkeypatch.setitem(TASK_BY_SOURCE, name, task)
    return task
