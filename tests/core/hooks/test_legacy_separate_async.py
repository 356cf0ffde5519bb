"""The separate_async trainer, which needs GPUs, as far as a CPU allows.

verl's own constructor, replay buffer, `step` and `_compute_advantage` run. Doubles replace
TransferQueue, the workers (log-probs, update) and the sender of prompts. These tests do not run the
rollout on its own GPUs, the transfer of weights to it, or switching between the two.
"""

from types import SimpleNamespace

import oracle
import pytest
from composed_recipes import composed
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

from verl_gdpo.hooks.extend import record_of

# rewards (a, b) of the samples of each prompt, oldest first; 4 prompts are 2 mini-batches
GROUPS = {
    "u": [(0, 0), (1, 1)],
    "opposed": [(0, 1), (1, 0)],  # S = 0: dropped
    "v": [(0, 0), (0, 1)],
    "w": [(1, 0), (3, 0)],
    "x": [(0, 2), (5, 5)],
}


@pytest.fixture
def rows(queue):
    for step, (uid, rewards) in enumerate(GROUPS.items()):
        infos = [{"a": float(a), "b": float(b), "score": float(a + b)} for a, b in rewards]
        queue.add_group(uid, infos, lengths=(2, 3), step=step)
    return queue.rows


@pytest.fixture
def refills(monkeypatch):
    counts = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda _, n: counts.append(n))
    return counts


def make_trainer():
    config = composed(
        "hardware=cpu",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
    )
    trainer = get_trainer_cls("separate_async")(config)
    trainer.global_steps = 7
    trainer.current_mode = HybridEngineMode.TRAINER
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer._add_batch_to_generate = lambda: None
    for name in (
        "_balance_batch",
        "_compute_old_log_prob",
        "_compute_ref_log_prob",
        "_update_actor",
    ):
        setattr(trainer, name, lambda batch, metrics: batch)
    return trainer


def test_the_batch_is_a_mini_batch(rows, refills):
    metrics = {}
    trainer = make_trainer()
    trainer.on_step_begin()
    batch = trainer.step(metrics, {})
    assert len(batch.keys) == 8
    for mini_batch in (["u", "v"], ["w", "x"]):
        keys = [f"{uid}_{session}_0" for uid in mini_batch for session in range(2)]
        rewards = [rewards for uid in mini_batch for rewards in GROUPS[uid]]
        expected = oracle.gdpo(rewards, [key[0] for key in keys])
        actual = [rows[key]["advantages"][0].item() for key in keys]
        assert actual == pytest.approx(expected, abs=1e-6)
    dumped = record_of(trainer).dump_rows.columns([*batch.keys])["batch"]
    assert dict(zip((key[0] for key in batch.keys), dumped, strict=True)) == {
        **dict.fromkeys("uv", 0),
        **dict.fromkeys("wx", 1),
    }
    assert metrics["gdpo/a/max"] == 5.0
    assert refills == [1]
    assert "advantages" not in rows["opposed_0_0"]
