"""`reward.reward_functions`: several functions, as verl's reward worker calls them."""

import asyncio
import dataclasses
import re
import shlex
import sys
import threading
from contextlib import nullcontext

import pytest
import yaml
from added_task import add_task
from listed_functions import PAGE, config_of, manager_of, score, written
from omegaconf import OmegaConf
from reward_rows import GOLD, Tokenizer, row_of, scored
from verl import DataProto

from verl_gdpo.algorithm.metrics import scoring_metrics
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import ERROR_KEY, NOTES_KEY, RewardError
from verl_gdpo.hooks.advantage_step import AdvantageStep
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.scoring.function_list import (
    OF_GROUP,
    refuse_without_v1,
)
from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.tool_rl.call_formats import REASONS

pytestmark = pytest.mark.usefixtures("event_loop")


@pytest.fixture
def file(tmp_path):
    return written(tmp_path)


def test_numbers_and_dicts_of_functions_get_their_names(file):
    entries = {
        "short": {"path": file, "name": "length", "limit": 3},
        "judge": {"path": file, "name": "judge", "extra": 1},
        "whole": {"path": file, "name": "whole"},
        "lone": {"path": file, "name": "lone"},
        "none": {"path": file, "name": "none"},
        "form": {"task": "tool_rl", "sources": ["rlla"]},
    }
    assert score(config_of(entries)) == {
        "reward_score": 0.0 + 1.5 + 1.5 + 1.5,
        "reward_extra_info": {
            "form__format": None,
            "form__correctness": None,
            "short": 0.0,
            "judge__clear": 0.5,
            "judge__kind": 1.0,
            "judge__why": "s 42 ['extra']",
            "whole__a": 1.0,
            "whole__b": 0.5,
            "lone": 1.5,
            "lone__note": "text",
            "none": None,
            "score": 4.5,
        },
    }


def test_a_task_of_ours_is_a_function_too():
    gold = '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>'
    result = score(config_of({"rlla": {"task": "tool_rl"}}), response=gold, truth=gold)
    rewards = {"rlla__format": 1.0, "rlla__correctness": 3.0}
    notes = {f"{reason}_rlla": 0.0 for reason in REASONS}
    assert result["reward_extra_info"] == {**rewards, "score": 4.0, NOTES_KEY: notes}


def test_functions_run_side_by_side(file, monkeypatch):
    """Each waits for the other, so one after the other they would never end."""
    both = threading.Barrier(2, timeout=20)
    entries = {name: {"path": file, "name": "length"} for name in ("x", "y")}
    manager = manager_of(config_of(entries))
    module = manager.functions[0].function.__globals__
    assert module is manager.functions[1].function.__globals__  # a file is loaded once
    monkeypatch.setitem(module, "len", lambda text: both.wait() + 1)
    assert scored(manager)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": {"name": "wrong_sum"}}, r"x: it returned score=9.0, which is not the sum of {'a'"),
        (
            {"x": {"name": "with_reason"}},
            r"returned \(0.5, 'because'\); expected a number, None or",
        ),
        ({"x": {"name": "in_words"}, "y": {"name": "number"}}, "x: .*it returned 'good'; expected"),
        ({"x": {"name": "fails"}}, r"KeyError: 'a bug' \[.*my_rewards.py:\d+\]"),
        ({"x": {"name": "length", "sources": ["t"]}}, "no function scores rows of data_source 's'"),
        (
            {"w": {"name": "whole"}, "w__a": {"name": "length"}},
            r"returns \['w__a'\] too; rename",
        ),
        ({"x": {"name": "not_the_sum"}}, r"score=1.0, which is not the sum of {'right': None}"),
        ({"x": {"name": "two", "rewards": ["x"]}}, r"x__x', 'x__y'\], .*x.rewards=\[x,y\]"),
        ({"x": {"name": "two", "rewards": ["x", "y", "z"]}}, r"its entry says .*'x__z'\]"),
        ({"x": {"name": "two", "rewards": "number"}}, r"its entry says \['x'\].*rewards=\[x,y\]"),
        ({"x": {"name": "two", "weight": 2.0}}, r"its entry says \['x'\]\. .*rewards=\[x,y\]"),
        ({"x": {"name": "length", "rewards": ["a"]}}, r"returned the rewards \['x'\].*ds=number"),
        (  # which no on_error lets pass
            {"x": {"name": "length", "rewards": ["a"], "on_error": "missing"}},
            r"its entry says \['x__a'\]",
        ),
    ],
)
def test_a_function_that_fails_ends_the_run(file, entries, message):
    config = config_of({name: {"path": file, **entry} for name, entry in entries.items()})
    with pytest.raises(RuntimeError, match=message):
        score(config)


@pytest.mark.parametrize(
    ("dropping", "notes"),
    [((), {}), (["short"], {"dropped": 0.0}), (["fails", "short"], {"dropped": 1.0})],
)
def test_a_reward_whose_function_fails_may_be_missing(file, dropping, notes):
    entries = {
        "fails": {"path": file, "name": "fails", "on_error": "missing"},
        "both": {"path": file, "name": "wrong_sum", "on_error": "missing", "weight": {"a": 1}},
        "short": {"path": file, "name": "length", "on_error": "missing"},
        "other": {"path": file, "name": "length", "on_error": "missing", "sources": ["t"]},
    }
    for name in dropping:
        entries[name]["on_error"] = "drop"
    assert score(config_of(entries))["reward_extra_info"] == {
        **dict.fromkeys(["fails", "both__a", "other"]),
        "short": 1.0,
        "score": 1.0,
        NOTES_KEY: {f"failed_{name}": float(name in ("fails", "both")) for name in entries} | notes,
    }


@pytest.mark.parametrize(
    ("failed", "limits", "ends"),
    [(1, {}, True), (1, {"max_failed": 0.25}, False), (0, {"max_failed": 0}, False)],
)
def test_the_run_ends_if_a_function_fails_too_often(failed, limits, ends):
    infos = [{"x": None, NOTES_KEY: {"failed_x": 1.0}}] * failed
    infos += [{"x": 1.0, NOTES_KEY: {"failed_x": 0.0}}] * (4 - failed)
    rows = BatchRows.from_keys(["a_0_0", "a_1_0", "b_0_0", "b_1_0"], infos, "ssss", [False] * 4, 7)
    message = "reward_functions: failed x: 25% of the samples of step 7, and .*max_failed=0.1"
    with pytest.raises(RewardError, match=message) if ends else nullcontext():
        AdvantageStep(GdpoSettings(**limits), rows).check("gdpo")


def test_limits_hold_for_the_functions_that_ask(file):
    entry = {"path": file, "name": "counts"}
    kinds = {"free": {**entry, "kind": "free"}, "x": {**entry, "kind": "limited", "limited": True}}
    config = config_of(kinds)
    config.reward.max_concurrent = 2
    manager = manager_of(config)

    async def all_of_them(manager):
        rows = [row_of("r", "42", "s") for _ in range(6)]
        await asyncio.gather(*map(manager.run_single, rows))

    manager.loop.run_until_complete(all_of_them(manager))
    names = manager.functions[0].function.__globals__
    assert names["most"] == {"free": 6, "limited": 2}
    # they hold for a function alone too
    config = config_of(None)
    config.reward.custom_reward_function.path = file
    config.reward.max_concurrent = 3
    names["most"]["free"] = 0

    async def alone(solution_str, **_):
        return await names["counts"](solution_str, "free")

    manager = GdpoRewardManager(config, Tokenizer(), alone)
    manager.loop.run_until_complete(all_of_them(manager))
    assert names["most"]["free"] == 3


def test_a_function_of_groups_needs_the_group(file):
    """Where no trainer runs, as in `check`, a response is a group of its own."""
    entry = {"path": file, "name": "rank", "group": True}
    config = config_of({"x": entry, "other": {**entry, "sources": ["t"]}})
    infos = {"x": 1.0, "other": None, "score": 1.0}
    assert score(config)["reward_extra_info"] == infos
    config.transfer_queue.enable = True
    info = score(config)["reward_extra_info"]
    assert "x.group=True: the sample came without its group" in info[ERROR_KEY]
    with pytest.raises(ValueError, match=r"x.group=True: only the V1 trainers of verl"):
        refuse_without_v1(config)
    # verl_gdpo_group: the workers of V1's agent loops mark a whole group
    rows = [row_of(text, "42", "s", **{OF_GROUP: True}) for text in ("longer", "long\0\0")]
    manager = manager_of(config)
    both = manager.loop.run_until_complete(manager.run_single(DataProto.concat(rows)))
    of_rows = [each["reward_extra_info"] for each in both.pop("reward_extra_info")]
    assert both == {"reward_score": 0.0}
    assert of_rows == [{"x": x, "other": None, "score": x} for x in (0.0, 1.0)]


PARTS = """
seen = []

def of_row(solution_str, answer_str, reasoning_str):
    seen.append((solution_str, reasoning_str, answer_str))
    return 1.0

def of_group(answer_strs, reasoning_strs):
    seen.append((reasoning_strs, answer_strs))
    return [1.0] * len(answer_strs)

def of_verl(data_source, solution_str, ground_truth, extra_info, **others):
    seen.append(sorted(others))
    return 1.0

def of_verls_group(solution_strs, extra_infos, **others):
    seen.append(sorted(others))
    return [1.0] * len(solution_strs)
"""


def test_functions_may_take_the_thought_and_the_answer(tmp_path):
    path = str(tmp_path / "parts.py")
    (tmp_path / "parts.py").write_text(PARTS)
    entries = {}
    for name in ("of_row", "of_group", "of_verl", "of_verls_group"):
        entries[name] = {"path": path, "name": name, "group": name.endswith("group")}
    manager = manager_of(config_of(entries))
    scored(manager, "a </think> 4", prompt="<think>")
    seen = sys.modules[manager.functions[0].function.__module__].seen
    assert ("a </think> 4", "a", "4") in seen
    assert (["a"], ["4"]) in seen
    # Nothing of ours goes to a function that hands all on.
    assert [] in seen and ["data_source", "ground_truth"] in seen and len(seen) == 4


def test_a_task_of_the_list_scores_as_its_record_says():
    """`tool_rl` scores the response with the tag of its prompt, and `constraints` the answer."""
    after_tag = GOLD.removeprefix("<think>")
    score = {"task": "tool_rl"}
    manager = manager_of(config_of({"t": score}))
    opened = scored(manager, after_tag, GOLD, prompt="<think>")["reward_extra_info"]
    assert (opened["t__format"], opened["t__correctness"]) == (1.0, 3.0)
    call = GOLD.partition("</think>\n")[2]
    closed = scored(manager, call, GOLD, prompt="<think></think>")["reward_extra_info"]
    assert (closed["t__format"], closed["t__correctness"]) == (1.0, 3.0)
    manager = manager_of(config_of({"c": {"task": "constraints"}}))
    truth = '{"keyword": ["old"], "words": [1, 2]}'
    thought = scored(manager, "old old old </think> new", truth, prompt="<think>")
    info = thought["reward_extra_info"]
    assert (info["c__keyword"], info["c__words"]) == (0.0, 1.0)


def test_a_task_of_the_list_is_told_what_it_is_told_alone(monkeypatch):
    """Its scorer may name the response and the ground truth as it likes."""
    told = []

    def hears(text, truth, *, response_tokens=None, step=None, limit=1):
        told.append((text, truth, response_tokens, step, limit))
        return {"r": 1.0}

    bounds = {"r": (0.0, 1.0)}
    task = add_task(monkeypatch, "echo", hears, bounds=lambda limit=1: bounds)
    monkeypatch.setitem(TASKS, "echo", task)
    manager = manager_of(config_of({"e": {"task": "echo", "limit": 5}}))
    assert scored(manager, "a", "b", "echo", global_steps=7)["reward_score"] == 1.0
    assert told == [("a", "b", 2, 7, 5)]


def test_what_the_tasks_of_the_list_note_is_logged_under_their_names():
    """Two entries may have one task, and a name may look like the note of a failure."""
    entries = {
        "failed_": {"task": "tool_rl", "on_error": "drop"},
        "own": {"task": "tool_rl", "call_format": "hermes"},
        "words": {"task": "constraints", "sources": ["other"]},
    }
    info = score(config_of(entries), response=GOLD, truth=GOLD)["reward_extra_info"]
    notes = {"failed_failed_": 0.0, "dropped": 0.0}
    notes.update({f"{reason}_failed_": 0.0 for reason in REASONS})
    notes.update({f"{reason}_own": 0.0 for reason in REASONS})
    assert info[NOTES_KEY] == {**notes, "call_incomplete_own": 1.0}
    rows = BatchRows.from_keys(["u_0_0"], [info], ["s"], [False])
    step = AdvantageStep(GdpoSettings(), rows)
    step.check("gdpo")
    assert scoring_metrics(step.rows)["gdpo/scoring/call_incomplete_own"] == 1.0
    assert NOTES_KEY not in step.rewards.weights


# --- names of rewards -----------------------------------------------------------------------------


def test_a_score_beside_none_is_the_sum_of_what_there_is(file):
    names = ("sum_of_nothing", "no_score", "sum_of_one")
    entries = {name: {"path": file, "name": name} for name in names}
    assert score(config_of(entries))["reward_extra_info"] == {
        **{"sum_of_nothing__right": None, "sum_of_nothing__fmt": None},
        **{"no_score__right": 1.0},
        **{"sum_of_one__right": None, "sum_of_one__fmt": 1.0},
        "score": 2.0,
    }


def test_what_catches_the_rest_is_no_name(file):
    entry = {"path": file, "name": "named_as_positions"}
    assert score(config_of({"x": entry}))["reward_score"] == 1.0


@pytest.mark.parametrize(
    "entry",
    [
        {"rewards": ["x", "y"]},
        {"rewards": ["x", "y"], "weight": 1.0},
        {"weight": {"x": 1.0, "y": 1.0}},
        {"gdpo": {"x__x": 1.0, "x__y": 1.0}},
    ],
)
@pytest.mark.parametrize("on_error", ["missing", "drop"])
def test_a_failure_has_all_names_however_they_were_said(file, entry, on_error):
    """Each worker is a manager of its own, and the first row of each is one that fails."""
    entry = dict(entry)
    gdpo = {"rewards": entry.pop("gdpo")} if "gdpo" in entry else {}
    entries = {"x": {"path": file, "name": "two", "on_error": on_error, **entry}}
    config = config_of(entries, gdpo={**gdpo, "max_failed": 1.0})
    settings = settings_of_run(config)
    infos = []
    for worker in range(3):
        manager = manager_of(config)
        for response in ("fail", "fine" + "!" * worker):
            infos.append(scored(manager, response)["reward_extra_info"])
    for info in infos[::2]:
        assert (info["x__x"], info["x__y"], info["score"]) == (None, None, 0.0)
        assert "x" not in info and info[NOTES_KEY]["failed_x"] == 1.0
    assert [info["x__y"] for info in infos[1::2]] == [4.0, 5.0, 6.0]
    keys = [f"u_{n}_0" for n in range(6)]
    rows = BatchRows.from_keys(keys, infos, ["s"] * 6, [False] * 6, 1)
    step = AdvantageStep(settings, rows)
    step.check("gdpo")
    assert {*step.rewards.weights} == {"x__x", "x__y"}
    assert step.rewards.present_BK.sum(axis=0).tolist() == [3, 3]


def config_of_page(heading, file):
    """The overrides of the first example under a heading of the page."""
    section = PAGE.read_text().partition(f"# {heading}\n")[2]
    lines = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    config = config_of({})
    for word in shlex.split(lines):
        key, _, value = re.sub(r"my_\w+\.py", file, word).removeprefix("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


def test_the_example_of_names_with_failures_planted(file):
    config = config_of_page("The names of a list's rewards", file)
    settings_of_run(config)
    for response, clear in (("fail", None), ("fine", 1.0), ("fail", None)):
        info = score(config, response=response)["reward_extra_info"]
        assert (info["style__clear"], info["style__brief"]) == (clear, clear)


def test_the_example_of_a_group_with_failures_planted(file):
    config = config_of_page("A reward that compares a group", file)
    config.reward.max_concurrent = 2
    best = config.reward.reward_functions.best
    best.on_error = "missing"
    with pytest.raises(ValueError, match=r"best\.rewards=number"):
        settings_of_run(config)
    best.rewards = "number"
    settings_of_run(config)
    assert score(config)["reward_extra_info"]["best"] == 1.0
    best.name = "fails_for_a_group"
    info = score(config)["reward_extra_info"]
    assert (info["best"], info[NOTES_KEY]) == (None, {"failed_best": 1.0})


def test_the_example_of_a_rubric_with_failures_planted(file):
    config = config_of_page("Rubrics", file)
    config.reward.reward_functions.quality.on_error = "missing"
    config.reward.reward_functions.quality.name = "judge_by_rubric"
    settings_of_run(config)
    weights = {"index": 1, "criteria": '{"a": 1, "b": 3}'}
    for response, quality in (("fail", None), ("fine", 0.25)):
        info = score(config, response=response, extra_info=weights)["reward_extra_info"]
        assert info["quality"] == quality


def test_the_example_of_a_judge_with_failures_planted(file):
    """Where nobody answers, all rewards of the judge are None."""
    section = PAGE.read_text().partition("# A judge\n")[2]
    block = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1])
    entry = block["reward"]["reward_functions"]["judge"]
    entry |= {"judge": "http://127.0.0.1:9/v1", "template": "{response} {nothing}"}
    del entry["key_from"]
    config = config_of({"judge": entry})
    config.reward.max_concurrent = block["reward"]["max_concurrent"]
    assert settings_of_run(config).terms.weights_at(1) == {"judge__clear": 0.5, "judge__right": 1}
    info = score(config)["reward_extra_info"]
    assert (info["judge__clear"], info["judge__right"]) == (None, None)
    assert info[NOTES_KEY] == {"failed_judge": 1.0}


def test_the_example_of_a_list_with_failures_planted(file):
    """Two data sources, and each function fails for some rows."""
    config = config_of_page("Several reward functions", file)
    functions = config.reward.reward_functions
    assert settings_of_run(config).terms.weights_at(1) == {
        **{"right": 1.0, "short": 0.5},
        **{"form__format": 1.0, "form__correctness": 1.0},
    }
    functions.right.on_error = functions.form.on_error = "missing"
    settings = settings_of_run(config)
    infos, keys, sources = [], [], []
    for n in range(8):
        manager = manager_of(config)
        source = "rlla" if n % 2 else "math"
        truth = None if n == 1 else GOLD
        response = "fail" if n in (0, 1, 4) else f"{GOLD}{n}" if n > 5 else GOLD
        infos.append(scored(manager, response, truth, source)["reward_extra_info"])
        keys.append(f"{source}_{n}_0")
        sources.append(source)
    form = [info["form__format"] for info in infos]
    assert form == [None, None, None, 1.0, None, 1.0, None, 0.0]
    assert [info["right"] for info in infos] == [None, None, 1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert all(0 < info["short"] < 1 for info in infos)
    assert len({frozenset(info) for info in infos}) == 1
    rows = BatchRows.from_keys(keys, infos, sources, [False] * 8, 1)
    settings = dataclasses.replace(settings, max_failed=1.0)
    AdvantageStep(settings, rows).check("gdpo")


def test_a_reward_that_a_step_lacks_is_one_line(caplog, monkeypatch):
    caplog.set_level("INFO")
    for known in ("_had", "_lacked"):  # of this process
        monkeypatch.setattr(f"verl_gdpo.hooks.advantage_step.{known}", set())
    settings = GdpoSettings(rewards={"lacked": 1.0, "here": 1.0})
    keys = [f"u_{n}_0" for n in range(2)]
    for number, value in enumerate((None, None, 1.0, None)):
        infos = [{"lacked": value, "here": float(n)} for n in range(2)]
        rows = BatchRows.from_keys(keys, infos, "ss", [False] * 2, number)
        step = AdvantageStep(settings, rows)
        step.check("gdpo")
        assert step.rewards.present_BK[:, 1].all()
    lines = [each for each in caplog.messages if "no sample of step" in each]
    assert lines == ["verl-gdpo: no sample of step 0 has the reward 'lacked'"]
