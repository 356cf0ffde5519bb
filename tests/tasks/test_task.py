"""Every task does what its record promises."""

import dataclasses
import inspect

import pytest
import yaml
from added_task import add_task
from ground_truths import GROUND_TRUTHS
from repository import REPO
from verl.utils.reward_score import default_compute_score

from verl_gdpo.tasks import GIVEN_BY_MANAGER, TASK_BY_SOURCE, TASKS, check_ground_truths


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_a_recipe_its_data_sources_and_a_trial_here(name):
    assert (REPO / "recipes" / "task" / f"{name}.yaml").is_file()
    assert all(TASK_BY_SOURCE[source] is TASKS[name] for source in TASKS[name].data_sources)
    assert {*TASKS[name].verl_names.values()} <= {*TASKS[name].reward_names}
    assert name in GROUND_TRUTHS


def test_every_recipe_is_of_a_task():
    assert {path.stem for path in (REPO / "recipes" / "task").glob("*.yaml")} == {*TASKS}
    hardware = {path.stem for path in (REPO / "recipes" / "hardware").glob("*.yaml")}
    for path in (REPO / "recipes" / "task_on_hardware").glob("*.yaml"):
        task, _, on = path.stem.rpartition("-")
        assert task in TASKS and on in hardware, path
        assert yaml.safe_load(path.read_text())


@pytest.mark.parametrize("name", TASKS)
def test_no_response_is_better_than_the_good_one_and_a_bad_one_does_not_raise(name):
    task = TASKS[name]
    bounds = task.bounds()
    assert {*bounds} <= {*task.reward_names}
    best = []
    for truth in GROUND_TRUTHS[name]:
        good = task.good_response(truth)
        best.append(task.score(good, truth, response_tokens=7, step=3))
        for bad in ("", "?", good[: len(good) // 2], good * 2, "\0<\ud800" + good):
            scores = task.score(bad, truth, response_tokens=7, step=3)
            assert {*scores} == {*bounds}
            for reward, value in scores.items():
                assert value is None or bounds[reward][0] <= value <= best[-1][reward]
    for reward, (_, high) in bounds.items():  # one that some prompts lack is None there
        assert max(scores[reward] for scores in best if scores[reward] is not None) == high


@pytest.mark.parametrize("name", TASKS)
def test_bounds_take_the_options_of_the_scorer(name):
    def options(function):
        parameters = inspect.signature(function).parameters.values()
        found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {key: value for key, value in found.items() if key not in GIVEN_BY_MANAGER}

    score, bounds = TASKS[name].score, TASKS[name].bounds
    bounds(**options(score))
    if options(bounds):
        assert options(bounds) == options(score)
    else:  # it hands all to the scorer
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            bounds(nothing=1)
    given = [p.name for p in inspect.signature(TASKS[name].score).parameters.values()]
    assert given[:2] == ["response", "ground_truth"] and {"response_tokens", "step"} <= {*given}
    assert ("notes" in given) == (TASKS[name].notes is not None)


@pytest.mark.parametrize("source", TASK_BY_SOURCE)
def test_no_data_source_is_one_that_verl_scores_by_itself(source):
    with pytest.raises(NotImplementedError):
        default_compute_score(source, "72", "72")


def test_a_bad_ground_truth_is_named(monkeypatch):
    def score(response, ground_truth, **_):
        if not ground_truth:
            raise ValueError("mine: got nothing")
        return {"a": 1.0}

    add_task(monkeypatch, "mine", score)
    rows = [
        {"data_source": source, "reward_model": {"ground_truth": truth}}
        for source, truth in (("mine", "x"), ("verl's", ""), ("mine", ""))
    ]
    check_ground_truths(rows[:2], "here")
    with pytest.raises(ValueError, match=r"here, row 2 \(data_source 'mine'\): mine: got nothing"):
        check_ground_truths(rows, "here")
    with pytest.raises(ValueError, match=r"^here has 12 bad rows, of which .* 10 are:(\n.*){10}$"):
        check_ground_truths(12 * rows, "here")


def test_what_each_task_scores():
    scored = {name: TASKS[name].scores for name in TASKS}
    answers = {"constraints", "coding", "math_length"}
    assert {name for name in scored if scored[name] == "answer"} == answers
    for name in scored.keys() - answers:
        assert "closed_thought" in inspect.signature(TASKS[name].score).parameters
    with pytest.raises(ValueError, match='scores=\'thought\': expected "response" or "answer"'):
        dataclasses.replace(TASKS["coding"], scores="thought")
