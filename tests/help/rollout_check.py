"""Compares each row of verl's dump with the scorer and the oracle."""

import oracle
import pytest
import varied_reward

from verl_gdpo.tasks.tool_rl import score as tool_rl

# 6 prompts x 4 samples in mini-batches of 4 x 4: verl pads 24 rows to 32, and 36 to 48
BATCH, MINI_BATCH, SAMPLES = 6, 4, 4
SIZES = [
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
]
GRPO = {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6}  # to the oracle


def last_outputs(rows):
    """The row that stands for each session; the session's other rows have what it has."""
    sessions = {}
    for row in rows:
        sessions.setdefault((row["group"], row["session"]), []).append(row)
    for session in sessions.values():
        session.sort(key=lambda row: int(row["uid"].rsplit("_", 1)[1]))
        for key in ("rewards", "score", "advantage"):
            assert all(row[key] == session[-1][key] for row in session)
    return [session[-1] for session in sessions.values()]


def check_rollouts(rows, weights, trained_on=dict):
    """Each session has the rewards of `varied_reward.compute_score`, their sum, gdpo's advantage.

    `trained_on` makes the values in the sum from the raw rewards. The result is that of
    `check_advantages`.
    """
    padding = [row["advantage"] for row in rows if row["is_padding"]]
    assert padding == [0.0] * len(padding)
    assert len(padding) > 0 == len(rows) % (MINI_BATCH * SAMPLES)
    real = last_outputs(row for row in rows if not row["is_padding"])
    assert {row["session"] for row in real} == set(range(SAMPLES))
    for row in real:
        again = tool_rl.score(row["output"], row["gts"])
        again["letters"] = varied_reward.letters(row["output"])
        again["brevity"] = varied_reward.brevity(row["response_tokens"])
        assert row["rewards"] == pytest.approx(again, abs=1e-6)
        total = sum(weights[name] * trained_on(row["rewards"])[name] for name in weights)
        assert row["score"] == pytest.approx(total, abs=1e-5)
    rewards = [[trained_on(row["rewards"])[name] for name in weights] for row in real]
    return check_advantages(real, rewards, weights=list(weights.values()))


def check_advantages(rows, rewards, tolerance=1e-5, **options):
    """The advantages of rows without padding are the oracle's; return the largest difference."""
    assert len(rows) == BATCH * SAMPLES
    groups = [row["group"] for row in rows]
    assert len({*groups}) == BATCH
    actual = [row["advantage"] for row in rows]
    expected = oracle.gdpo(rewards, groups, **options)
    assert actual == pytest.approx(expected, abs=tolerance)
    assert sum(abs(a) > 0.01 for a in actual) > len(actual) / 2
    return max(abs(a - b) for a, b in zip(actual, expected, strict=True))
