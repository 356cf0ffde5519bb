"""Functions that compare the samples of a group: `reward.reward_functions.NAME.group=true`.

To add a case: prompts as `stage.py` lists them, `play(stage.train, prompts)`, and what must come
out. `own` returns `a` of a sample; `rank` gets a group, and returns the rank of each `b` in it.
"""

import itertools

import pytest
from scripted import Scored
from stage import oracle_of

from verl_gdpo.algorithm.values import RewardError

FILE = """
import asyncio
import json

def own(solution_str):
    return float(json.loads(solution_str)["a"])

async def rank(solution_strs, extra_infos, ground_truth, data_source):
    assert data_source == "d" and {ground_truth} == {str(info["index"]) for info in extra_infos}
    said = [json.loads(text) for text in solution_strs]
    if any("hang" in each for each in said):
        await asyncio.Event().wait()
    if any("fail" in each for each in said):
        raise KeyError("a bug")
    values = [float(sum(each["b"] > other["b"] for other in said)) for each in said]
    return values[1:] if any("lose" in each for each in said) else values

def facts(solution_strs, extra_infos, **more):
    assert {*more} == {"data_source", "ground_truth"}
    return [{"of": len(solution_strs), "b": "b" in text and info["is_validation"]}
            for text, info in zip(solution_strs, extra_infos, strict=True)]
"""
A, B, C, D = {"a": 0, "b": 3}, {"a": 1, "b": 1}, {"a": 2, "b": 0}, {"a": 0, "b": 2}
FAILED = RuntimeError("the server is gone")


@pytest.fixture
def play(stage, tmp_path):
    """Play a case with the functions; `rank` has more keys of its entry."""
    path = tmp_path / "judges.py"
    path.write_text(FILE)

    def play(how, prompts, *, rank=None, settings=None, **more):
        entries = {name: {"path": str(path), "name": name} for name in ("own", "rank", "facts")}
        entries["rank"] |= {"group": True, "weight": 1.0, **(rank or {})}
        entries["facts"] |= {"group": True, "weight": {"of": 0.0, "b": 0.0}}
        alone = {"reward.custom_reward_function.path": None, "reward.reward_functions": entries}
        return how(prompts, settings={**alone, **(settings or {})}, **more)

    return play


def ranked(*prompts):
    """What `own` and `rank` return, by hand."""
    return [[dict(zip(("own", "rank"), pair, strict=True)) for pair in pairs] for pairs in prompts]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_groups_of_different_size_and_sessions_of_several_outputs(stage, play, mode):
    prompts = [[A, B], [C, [A, A, B], D, B], [[C, D], A, C]]
    expected = ranked([(0, 1), (1, 0)], [(2, 0), (1, 1), (0, 3), (1, 1)], [(0, 1), (0, 2), (2, 0)])
    assert play(stage.train, prompts, mode=mode).advantages == oracle_of(expected)


def test_a_session_that_fails_or_is_scored_elsewhere_is_not_compared(stage, play):
    """It neither holds up its group nor counts in it."""
    info = {"own": 1.0, "rank": 7.0, "facts__of": 0.0, "facts__b": 0.0}
    prompts = [[FAILED, A, B, D], [Scored(8.0, info), C, A], [FAILED, FAILED], [B, FAILED]]
    (first, second, last) = ranked([(0, 2), (1, 0), (0, 1)], [(1, 7), (2, 0), (0, 1)], [(1, 0)])
    expected = [[FAILED, *first], second, [FAILED], last]
    assert play(stage.train, prompts).advantages == oracle_of(expected)


def test_validation(stage, play):
    metrics, rows = play(stage.validate, [[A], [B]])
    assert len(rows) == 2 and metrics["val-aux/d/rank/mean@1"] == 0
    assert metrics["val-aux/d/facts__of/mean@1"] == metrics["val-aux/d/facts__b/mean@1"] == 1
    metrics, rows = play(stage.validate, [[A, B], [C, D]])
    assert metrics["val-aux/d/rank/mean@2"] == 0.5 and metrics["val-aux/d/facts__of/mean@2"] == 2


PLAYS = itertools.count(1)


def limits_of_a_play():
    """Limits that no other play has, so that the actor that counts is a new one.

    The worker makes its reward manager anew for each play. Ray removes the actor of the last
    manager some time later, and until then gives it to who asks for the same name.
    """
    return {
        "reward.timeout": 0.05,
        "reward.estimated_tokens_per_request": next(PLAYS),
    }


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fail", r"KeyError: 'a bug' \[.*judges.py:\d+\]"),
        ("lose", r"rank: it returned \[1.0\] for a group of 2; expected a list with a result for"),
        # Ray takes ten seconds for each of its actors that count.
        pytest.param(
            *("hang", "NoAnswerError: no answer within reward.timeout=0.05 s"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_fails_stops_the_run_or_drops_the_group(stage, play, fault, reason):
    """Only the one that hangs needs limits, for which each play starts an actor."""
    is_limited = fault == "hang"

    def play_with(prompts, **rank):
        settings = {"algorithm.gdpo.max_failed": 1.0}
        if is_limited:
            settings.update(limits_of_a_play())
        return play(stage.train, prompts, rank={"limited": is_limited, **rank}, settings=settings)

    prompts = [[A, B, D], [C, {**A, fault: 1}]]
    with pytest.raises(RewardError, match=f"2 of 5 samples .*uid .*extra_info.index 1: .*{reason}"):
        play_with(prompts)
    stage.clean()
    first, second = ranked([(0, 2), (1, 0), (0, 1)], [(2, None), (0, None)])
    played = play_with(prompts, on_error="missing")
    assert played.advantages == oracle_of([first, second])
    assert played.metrics["gdpo/scoring/failed_rank"] == 2 / 5
    stage.clean()
    played = play_with(prompts, on_error="drop")
    of_first = oracle_of([first]).expected
    assert played.advantages == pytest.approx({**of_first, (1, 0): 0, (1, 1): 0}, abs=1e-6)
