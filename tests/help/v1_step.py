"""A step of verl's V1 trainer on rows in a queue in memory, and its dump."""

from pathlib import Path
from types import SimpleNamespace

from verl.trainer.ppo.v1 import get_trainer_cls
from verl_batch import verl_config

from verl_gdpo.tools.run.resume import quoted

# the README's batch, whose advantages are -+ .5477 and -+ 1.0954
REWARDS = {"u": [(0, 0), (0, 1)], "v": [(0, 0), (1, 1)]}
A_OF = {"u_0_0": -0.54768, "u_1_0": 0.54768, "v_0_0": -1.09536, "v_1_0": 1.09536}


def fill(queue, copies=1):
    """Groups with the rewards of `REWARDS`, rows of 2 and 3 tokens; returns their prompts."""
    uids = [f"{uid}{copy or ''}" for copy in range(copies) for uid in REWARDS]
    for uid in uids:
        rewards = REWARDS[uid[0]]
        infos = [{"a": float(a), "b": float(b), "score": float(a + b)} for a, b in rewards]
        queue.add_group(uid, infos, lengths=(2, 3))
    return uids


def make_trainer(cls, folder, *overrides):
    config = verl_config(
        "data.train_batch_size=2",
        f"trainer.rollout_data_dir={quoted(str(folder))}",
        f"trainer.validation_data_dir={quoted(str(folder))}",
        *overrides,
    )
    trainer = cls(config)
    trainer.global_steps = 7
    trainer.tokenizer = SimpleNamespace(
        pad_token_id=0, decode=lambda ids, skip_special_tokens: f"{len(ids)} tokens"
    )
    trainer._init_dump_executor()
    return trainer


def step_of(trainer, prompts=2):
    """The batch of a step and its metrics."""
    batch, _ = trainer.replay_buffer.sample(7, "train", prompts)
    metrics = {}
    return trainer._compute_advantage(batch, metrics), metrics


def sample_and_train(trainer, prompts):
    return step_of(trainer, prompts)[0]


def dump(trainer, batch):
    folder = Path(trainer.config.trainer.rollout_data_dir)
    trainer._log_rollout_data(batch, {}, str(folder))
    trainer._shutdown_dump_executor()  # raises what the writing thread raised
    return folder / "7.jsonl"


def ours(folder, *overrides):
    return make_trainer(get_trainer_cls("sync"), folder, *overrides)
