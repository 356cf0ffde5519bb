"""Groups and sessions of all kinds end in the oracle's advantages, or in a message.

To add a case: prompts as `stage.py` lists them, `stage.train(prompts)`, and what must come out.
"""

import pytest
from scripted import Scored
from stage import oracle_of

from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.hooks.rollout_guard import RolloutError

A, B, C = {"a": 0.0, "b": 3.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": -1.0}
FAILED = RuntimeError("the server is gone")


def test_groups_of_different_size_and_padding(stage):
    prompts = [[A], [A, B], [C, B, A], [A, A, B, B, C]]
    played = stage.train(prompts)
    assert played.advantages == oracle_of(prompts)
    padding = [row["advantage"] for row in played.rows if row["is_padding"]]
    assert padding == [0.0] * 4  # verl fills up to a multiple of n = 5


def test_sessions_with_several_outputs(stage):
    prompts = [[[C, A, A], B], [A, [B, C]], [[A], [C, B]]]
    played = stage.train(prompts)
    assert played.advantages == oracle_of(prompts)
    assert len([row for row in played.rows if not row["is_padding"]]) == 10


# --- sessions that fail --------------------------------------------------------------------------


def test_sync_trains_on_what_is_left_of_failed_groups(stage):
    prompts = [[A, FAILED, B], [FAILED, FAILED], [C, A, A], [B, FAILED, FAILED]]
    assert stage.train(prompts).advantages == oracle_of(prompts)


def test_asynchronous_trainers_replace_failed_groups(stage):
    prompts = [[A, B], [C, FAILED], [A, C]]
    played = stage.train(prompts, mode="colocate_async", settings={"data.train_batch_size": 2})
    prompts[1] = [FAILED]
    assert played.advantages == oracle_of(prompts)


def test_asynchronous_trainers_replace_groups_that_are_too_old(stage):
    prompts = [[A, B], [C, B], [A, C], [B, A]]
    played = stage.train_late(prompts)
    assert played.advantages == oracle_of([[FAILED], [FAILED], *prompts[2:]])


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_nothing_is_left(stage, mode):
    with pytest.raises(RolloutError, match=r"prompts .*failed.* for uid="):
        stage.train([[FAILED, FAILED]] * 2, mode=mode)


def test_a_large_validation_goes_on_without_a_few_prompts(stage):
    """verl goes on with the 48 of 50; the training batch has two prompts."""
    prompts = [[B], [FAILED], *[[A]] * 23, [FAILED], *[[A]] * 23, [C]]
    metrics, rows = stage.validate(prompts, settings={"data.train_batch_size": 2})
    assert len(rows) == 48
    assert metrics["val-aux/d/a/mean@1"] == pytest.approx(2 / 48)
    assert metrics["val-aux/d/b/mean@1"] == pytest.approx(46 * 3 / 48)


def test_a_validation_in_which_all_fail_ends(stage):
    with pytest.raises(RolloutError, match=r"prompts .*failed.* for uid="):
        stage.validate([[FAILED]] * 3)


# --- agent loops that score themselves, as environments do ---------------------------------------


def scored(*values, **how):
    """Sessions with the rewards (a, b), which the agent loop gives."""
    named = [dict(zip("ab", pair, strict=True)) for pair in values]
    return [Scored(sum(v or 0 for v in info.values()), info, **how) for info in named]


@pytest.mark.parametrize("outputs", [1, 3])
def test_rewards_of_an_environment(stage, outputs):
    prompts = [scored((0, 3), (1, 1), outputs=outputs), scored((2, 0), (1, None))]
    expected = oracle_of([[one.info for one in sessions] for sessions in prompts])
    assert stage.train(prompts).advantages == expected
    metrics, _ = stage.validate(prompts)
    assert metrics["val-aux/d/a/mean@2"] == (0 + 1 + 2 + 1) / 4


def test_an_environment_and_the_reward_manager_in_one_group(stage):
    prompts = [[A, *scored((2, 2))], [*scored((0, 1)), [C, B]]]
    expected = [[A, {"a": 2, "b": 2}], [{"a": 0, "b": 1}, B]]
    assert stage.train(prompts).advantages == oracle_of(expected)


def test_conditions_on_rewards_of_an_environment(stage):
    rewards = {"a": 2.0, "b": {"weight": 1.0, "when": {"reward": "a", "at_least": 1}}}
    prompts = [scored((0, 3), (1, 1), (2, 2)), scored((2, 0), (1, 4), (0, 5))]
    for session in (session for sessions in prompts for session in sessions):
        session.score = 2 * session.info["a"] + (session.info["b"] if session.info["a"] else 0)
    met = [[(0, 0), (1, 1), (2, 2)], [(2, 0), (1, 4), (0, 0)]]
    expected = [[dict(zip("ab", pair, strict=True)) for pair in pairs] for pairs in met]
    played = stage.train(prompts, settings={"algorithm.gdpo.rewards": rewards})
    assert played.advantages == oracle_of(expected, {"a": 2.0, "b": 1.0})


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("info", [..., {}, None, {"num_turns": 2}], ids=repr)
def test_an_environment_without_names(stage, info, outputs):
    """The message is about the agent loop, because no scorer ran."""
    prompts = [[Scored(float(n), info, outputs) for n in range(2)]] * 2
    with pytest.raises(RewardError, match=r"_0_\d: the agent loop set reward_score=0 itself"):
        stage.train(prompts)


def test_an_environment_whose_score_is_another_sum(stage):
    prompts = [scored((0, 3), (1, 1)), scored((2, 0), (1, 2))]
    prompts[1][1].score = 7.0
    with pytest.raises(RewardError, match=r"_1_0: the agent loop set reward_score=7"):
        stage.train(prompts)


def test_an_environment_with_a_bad_value(stage):
    prompts = [scored((0, 3), (1, float("nan"))), scored((2, 0), (1, 2))]
    with pytest.raises(RewardError, match=r"_1_0: reward 'b' is nan"):
        stage.train(prompts, settings={"algorithm.gdpo.rewards": {"a": 1.0, "b": 1.0}})
