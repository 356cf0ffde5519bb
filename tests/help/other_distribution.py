"""Distributions that bring a task, as pip leaves them: modules beside a folder *.dist-info."""

import sys

from verl_gdpo import tasks
from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS

ECHO = '''
"""A scorer."""
from verl_gdpo.tasks import Task

def score(response, ground_truth, *, response_tokens=None, step=None):
    if not ground_truth.isalpha():
        raise ValueError(f"echo ground truth: got {ground_truth!r}; expected a word")
    short = float(response_tokens <= 2) if ground_truth != "long" else None
    return {"short": short, "correct": float(response == ground_truth)}

def bounds():
    return {"short": (0.0, 1.0), "correct": (0.0, 1.0)}

TASK = Task(
    name="echo",
    data_sources=("echo",),
    score=score,
    bounds=bounds,
    reward_names=("short", "correct"),
    main_reward="correct",
    good_response=str,
    system_prompt="Say it.",
)
'''


def install(folder, name, modules, entry_points):
    """A distribution NAME 1.0 in a folder; `modules` is {name: text}."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(entry_points)
    (info / "entry_points.txt").write_text(f"[verl_gdpo.tasks]\n{lines}\n")


def look_again(monkeypatch, folder):
    """Let the registry look for distributions anew, in `folder` too; yields while it does."""
    ours = {name: task for name, task in TASKS.data.items() if task.origin == "verl-gdpo"}
    of_source = {
        key: task for key, task in TASK_BY_SOURCE.data.items() if task.origin == "verl-gdpo"
    }
    monkeypatch.setattr(TASKS, "data", ours)
    monkeypatch.setattr(TASK_BY_SOURCE, "data", of_source)
    monkeypatch.setattr(tasks, "_add_others", tasks._add_others.__wrapped__)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
