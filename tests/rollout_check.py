"""What verl's rollout dump says of each row, against the scorer and the oracle."""

import oracle
import pytest
import varied_reward

from verl_gdpo.rewards import tool_rl

# 6 prompts x 4 samples in mini-batches of 4 x 4: verl pads 24 rows to 32
BATCH, MINI_BATCH, SAMPLES = 6, 4, 4
PADDING = 8
SIZES = [
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
]
GRPO = {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6}  # to the oracle


def check_rollouts(rows, weights, trained_on=dict):
    """Each row has the rewards of `varied_reward.compute_score`, their sum, and gdpo's advantage.

    `trained_on` makes the values in the sum from the raw rewards.
    """
    real = [row for row in rows if not row["is_padding"]]
    assert [row["advantage"] for row in rows if row["is_padding"]] == [0.0] * PADDING
    assert {row["session"] for row in real} == set(range(SAMPLES))
    for row in real:
        again = tool_rl.score(row["output"], row["gts"])
        again["letters"] = varied_reward.letters(row["output"])
        again["brevity"] = varied_reward.brevity(row["response_tokens"])
        assert row["rewards"] == pytest.approx(again, abs=1e-6)
        total = sum(weights[name] * trained_on(row["rewards"])[name] for name in weights)
        assert row["score"] == pytest.approx(total, abs=1e-5)
    rewards = [[trained_on(row["rewards"])[name] for name in weights] for row in real]
    check_advantages(real, rewards, weights=list(weights.values()))


def check_advantages(rows, rewards, tolerance=1e-5, **options):
    """The advantages of rows without padding are the oracle's."""
    assert len(rows) == BATCH * SAMPLES
    groups = [row["group"] for row in rows]
    assert len({*groups}) == BATCH
    actual = [row["advantage"] for row in rows]
    expected = oracle.gdpo(rewards, groups, **options)
    assert actual == pytest.approx(expected, abs=tolerance)
    assert sum(abs(a) > 0.01 for a in actual) > len(actual) / 2
