"""Groups and sessions of all kinds end in the oracle's advantages, or in a message.

To add a case: prompts as `stage.py` lists them, `stage.train(prompts)`, and what must come out.
"""

import pytest
from stage import oracle_of

A, B = {"a": 0.0, "b": 3.0}, {"a": 1.0, "b": 1.0}
C = {"a": 1.0, "b": -1.0}


def test_healthy_groups(stage):
    prompts = [[A, B], [B, C]]
    assert stage.train(prompts).advantages == oracle_of(prompts)


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


def test_validation(stage):
    metrics, rows = stage.validate([[A], [B], [C]])
    assert metrics["val-aux/d/a/mean@1"] == pytest.approx(2 / 3)
    assert sorted(row["b"] for row in rows) == [-1.0, 1.0, 3.0]


FAILED = RuntimeError("the server is gone")


def test_sync_trains_on_what_is_left_of_failed_groups(stage):
    prompts = [[A, FAILED, B], [FAILED, FAILED], [C, A, A], [B, FAILED, FAILED]]
    assert stage.train(prompts).advantages == oracle_of(prompts)


def test_asynchronous_trainers_replace_failed_groups(stage):
    prompts = [[A, B], [C, FAILED], [A, C]]
    played = stage.train(prompts, mode="colocate_async", settings={"data.train_batch_size": 2})
    prompts[1] = [FAILED]
    assert played.advantages == oracle_of(prompts)
