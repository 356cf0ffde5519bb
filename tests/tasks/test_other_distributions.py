"""Tasks of other distributions, which entry points bring into the registry."""

import json
import re
import sys
from dataclasses import replace

import pytest

from verl_gdpo import tasks
from verl_gdpo.tasks import TASK_BY_SOURCE, TASKS, TaskError
from verl_gdpo.tasks.preparation.prepared_files import _code, parquet_rows
from verl_gdpo.tools import data, evaluate
from verl_gdpo.tools.evaluate.tasks import benchmark_of

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
    """A distribution NAME 1.0 as pip leaves it in a folder; `modules` is {name: text}."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(entry_points)
    (info / "entry_points.txt").write_text(f"[verl_gdpo.tasks]\n{lines}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed distributions, in which the registry looks anew."""
    for registry in (TASKS, TASK_BY_SOURCE):
        ours = {key: task for key, task in registry.data.items() if task.origin == "verl-gdpo"}
        monkeypatch.setattr(registry, "data", ours)
    monkeypatch.setattr(tasks, "_add_others", tasks._add_others.__wrapped__)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def echo(site):
    install(site, "echo-task", {"echo_task": ECHO}, ["echo = echo_task:TASK"])
    return site


def test_a_task_is_loaded_when_it_is_asked_for(echo):
    assert TASKS["gsm8k"].origin == "verl-gdpo" and "rlla" in TASK_BY_SOURCE
    assert "echo_task" not in sys.modules
    assert TASK_BY_SOURCE.get("nothing") is None
    assert TASKS["echo"] is TASK_BY_SOURCE["echo"] and TASKS["echo"].origin == "echo-task 1.0"
    assert len(TASKS) == len([*TASKS]) and "nothing" not in TASKS


def test_all_tasks_are_listed_with_those_of_others(echo):
    assert {"gsm8k", "echo"} < {*TASKS} and "echo" in {**TASK_BY_SOURCE}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("TASK = 1", "TypeError: replace"),
        ("", "has no attribute 'TASK'"),
    ],
)
def test_an_error_names_the_distribution(site, capsys, text, why):
    install(site, "broken-task", {"broken_task": text}, ["mine = broken_task:TASK"])
    assert TASKS["gsm8k"]
    for _ in range(2):
        with pytest.raises(TaskError, match="mine = broken_task:TASK in the group") as raised:
            TASKS.get("mine")
        assert "broken-task 1.0" in str(raised.value) and why in str(raised.value)
    assert data.main(["gsm8k", "--out", "nowhere"]) == 1
    assert evaluate.main(["model", "--bench", "gsm8k"]) == 1
    said = capsys.readouterr().err
    assert said.count("Mend or uninstall broken-task 1.0") == said.count("\n") == 2


@pytest.mark.parametrize(
    ("name", "source", "what"),
    [
        ("echo", "other", "task 'echo' is in echo-task 1.0 (task 'echo') and in other-task 1.0"),
        ("gsm8k", "other", "task 'gsm8k' is in verl-gdpo (task 'gsm8k') and in other-task 1.0"),
        ("other", "echo", "data_source 'echo' is in echo-task 1.0 (task 'echo') and in other-task"),
        ("other", "rlla", "data_source 'rlla' is in verl-gdpo (task 'tool_rl') and in other-task"),
    ],
)
def test_a_name_of_two_distributions_is_refused(echo, name, source, what):
    text = f"{ECHO}\nfrom dataclasses import replace\n"
    text += f"TASK = replace(TASK, name={name!r}, data_sources=({source!r},))\n"
    install(echo, "other-task", {"other_task": text}, ["other = other_task:TASK"])
    for _ in range(2):
        with pytest.raises(TaskError, match=re.escape(what)):
            list(TASKS)


def test_a_distribution_that_is_found_twice_is_one(echo, tmp_path, monkeypatch):
    """An editable checkout, whose metadata lie beside the installed ones."""
    again = tmp_path / "checkout"
    again.mkdir()
    install(again, "Echo_Task", {}, ["echo = echo_task:TASK"])
    monkeypatch.syspath_prepend(again)
    assert TASKS["echo"].name == "echo"


def prepared(folder, *pairs):
    items = [{"question": f"Say {text}.", "answer": text} for text in pairs]
    (folder / "rows.json").write_text(json.dumps(items))
    files = ["--from", str(folder / "rows.json"), "--test", str(folder / "rows.json")]
    return data.main(["echo", "--out", str(folder / "echo"), *files])


def test_its_rows_are_prepared(echo, tmp_path, capsys):
    assert prepared(tmp_path, "a", "long") == 0
    rows = [*parquet_rows(tmp_path / "echo" / "test.parquet")]
    assert [row["data_source"] for row in rows] == ["echo", "echo"]
    assert [one["content"] for one in rows[0]["prompt"]] == ["Say it.", "Say a."]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["a", "long"]
    assert prepared(tmp_path, "7") == 1
    assert "echo ground truth: got '7'; expected a word" in capsys.readouterr().err


ROWS = '''
"""Words from nowhere."""
from say_back import TASK
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded

def word(rng, split):
    return make_row(TASK, f"Say {rng.random()}", "".join(rng.choices("abcdefgh", k=9)))

SOURCES = Sources(task=TASK, row_of=lambda item, _: item, make_rows=seeded("echo", word))
'''


def test_its_rows_may_have_a_source_of_their_own(site, tmp_path, capsys):
    text = ECHO.replace('name="echo"', 'name="echo", rows="its_words"')
    modules = {"say_back": text, "its_words": ROWS}
    install(site, "echo-task", modules, ["echo = say_back:TASK"])
    assert data.main(["echo", "--synthetic", "3", "--out", str(tmp_path / "echo")]) == 0
    assert len([*parquet_rows(tmp_path / "echo" / "train.parquet")]) == 3
    assert {site / "say_back.py", site / "its_words.py"} < {*_code(TASKS["echo"])}
    with pytest.raises(SystemExit):
        data.main(["--help"])
    assert "Words from nowhere." in capsys.readouterr().out


def test_an_error_in_the_module_of_its_rows_names_the_distribution(site, capsys):
    text = ECHO.replace('name="echo"', 'name="echo", rows="echo_task"')
    install(site, "echo-task", {"echo_task": text}, ["echo = echo_task:TASK"])
    assert data.main(["gsm8k", "--out", "nowhere"]) == 1
    said = capsys.readouterr().err
    assert "task 'echo' of echo-task 1.0: echo_task.SOURCES cannot be imported: Attr" in said


def test_it_is_evaluated(echo):
    """As tool_rl and gsm8k are, which say as little of their columns."""
    benchmark = benchmark_of(TASKS["echo"])
    assert (benchmark.name, benchmark.summary) == ("echo", "correct, short") and benchmark.percent
    assert [column.name for column in benchmark.columns([])] == ["correct", "short"]
    wide = replace(TASKS["echo"], bounds=lambda: {"short": (0.0, 3.0)})
    assert not benchmark_of(wide).percent
