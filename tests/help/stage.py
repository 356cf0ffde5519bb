"""Plays rollouts through verl's own agent loops, reward loop, TransferQueue, buffer and trainer.

A case is a list of prompts, a prompt is a list of sessions, and a session is one of
- `{"a": 1.0, "b": 0.0}`: the model says this, and the scorer gets it and returns it unchanged;
- a text: the model says it, for scorers of our own tasks;
- a list of such dicts: a session with several outputs, of which verl scores the last;
- an exception: the agent loop raises it;
- `Scored(score, info)`: the agent loop gives the reward itself.

To add a case, write a test that takes the fixture `stage`:

    def test_a_group_without_signal(stage):
        prompts = [[{"a": 1}, {"a": 1}], [{"a": 0}, {"a": 2}]]
        assert stage.train(prompts).advantages == oracle_of(prompts)
"""

import contextlib
import copy
import inspect
import json
import signal
import time
from dataclasses import dataclass
from unittest.mock import Mock

import oracle
import pytest
import ray
import scripted
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import collate_fn
from verl_batch import verl_config

from verl_gdpo.algorithm.values import ERROR_KEY

SETTINGS = {
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "scripted",
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": "pkg://scripted",
    "transfer_queue.enable": True,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu",
}


@dataclass
class Played:
    """What a training step left.

    advantages: {(prompt, session): its advantage}, with the places in the case.
    rows: rows of verl's dump, padding included.
    metrics: of the step.
    """

    advantages: dict
    rows: list
    metrics: dict


class Stage:
    """verl's workers, which all cases share; Ray must be running."""

    def __init__(self, folder, model):
        loops = folder / "agent_loops.yaml"
        loops.write_text(scripted.AGENT_LOOPS)
        self.folder, self.tokenizer = folder, hf_tokenizer(str(model))
        more = {
            "actor_rollout_ref.model.path": str(model),
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(loops),
        }
        self.base = with_settings(verl_config(), {**SETTINGS, **more})
        self.rewards = RewardLoopManager(self.base)
        tq.init(self.base.transfer_queue)  # while the reward worker starts
        handles = self.rewards.reward_loop_worker_handles
        model = scripted.ScriptedModel(self.tokenizer)
        self.loops = AgentLoopManagerTQ.create(self.base, model, reward_loop_worker_handles=handles)
        ray.get([w.__ray_ready__.remote() for w in (*handles, *self.loops.agent_loop_workers)])
        self.is_clean = True

    def train(self, prompts, score=dict, **how):
        """Play `prompts` as one training step; `how` is of `trainer`."""
        return self.step(self.trainer(prompts, score, **how))

    def train_late(self, prompts, score=dict):
        """Train step 9 on two prompts, if the first two were sent out at step 1: too long ago."""
        settings = {"data.train_batch_size": 2, "trainer.v1.sampler.max_off_policy_threshold": 3}
        trainer = self.trainer(prompts, score, mode="colocate_async", settings=settings)
        trainer._add_prompts_to_generate(2)
        self.wait_until_settled()
        trainer.global_steps = 9
        trainer.prepare_step = dict  # they are enough for a batch
        return self.step(trainer)

    def validate(self, prompts, score=dict, **how):
        """Play `prompts` as verl's validation, all at once, and return its metrics and dump."""
        trainer = self.trainer(prompts, score, **how)
        trainer.val_dataloader = [collate_fn(rows_of(prompts, how.get("sources")))]
        metrics = trainer._validate()
        trainer._shutdown_dump_executor()
        return metrics, read_dump(self.folder / "validation", trainer.global_steps)

    def trainer(self, prompts, score=dict, *, mode="sync", step=1, sources=None, settings=None):
        """verl's trainer for `prompts`, without models: log-probabilities and updates do nothing.

        Args:
            score: the scorer, sync or async: what the model said -> its result.
            mode: `trainer.v1.trainer_mode`.
            sources: the data source of each prompt.
            settings: {dotted key: value} of verl's configuration.
        """
        config = self.tell(
            score,
            {
                "data.train_batch_size": len(prompts),
                "data.gen_batch_size": 1,  # as verl sets it if prompts may be sent out later
                "actor_rollout_ref.rollout.n": max(2, *map(len, prompts)),
                "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
                "trainer.v1.trainer_mode": mode,
                "trainer.rollout_data_dir": str(self.folder / "rollouts"),
                "trainer.validation_data_dir": str(self.folder / "validation"),
                **(settings or {}),
            },
        )
        trainer = get_trainer_cls(mode)(config)
        trainer.replay_buffer.poll_interval = 0.01
        trainer.global_steps, trainer.timing_raw = step, {}
        trainer.reward_loop_manager, trainer.agent_loop_manager = self.rewards, self.loops
        trainer.tokenizer, trainer.curr_step_profile = self.tokenizer, False
        trainer.checkpoint_manager = Mock()
        trainer.actor_rollout_wg = Mock(_dispatch_info={"actor": [0]})
        for name in ("_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor"):
            setattr(trainer, name, lambda batch, metrics: batch)
        trainer.train_dataloader = [collate_fn([row]) for row in rows_of(prompts, sources)]
        trainer.train_dataloader_it = None
        trainer._init_dump_executor()
        return trainer

    def tell(self, score, settings):
        """Give verl's workers the scorer and the configuration, which is returned."""
        if inspect.iscoroutinefunction(score):
            name = {"reward.custom_reward_function.name": "compute_score_async"}
            settings = {**name, **settings}
        config = with_settings(copy.deepcopy(self.base), settings)
        if inspect.isfunction(score):  # the workers do not have the module of the case
            ray.cloudpickle.register_pickle_by_value(inspect.getmodule(score))
        loops, rewards = self.loops.agent_loop_workers, self.rewards.reward_loop_workers
        ray.get([loops[0].__ray_call__.remote(scripted.configure, config)])
        ray.get([rewards[0].__ray_call__.remote(scripted.tell, config, score)])
        return config

    def step(self, trainer):
        """Make one step of `trainer`, and read what it left in TransferQueue and on disk."""
        metrics = {}
        batch = trainer.step(metrics, trainer.timing_raw)
        trainer._log_rollout_data(batch, {}, trainer.config.trainer.rollout_data_dir)
        trainer._shutdown_dump_executor()
        names = ["advantages", "response_mask", "extra_info"]
        data = tq.kv_batch_get(batch.keys, "train", names)
        columns = [[*data[name]] for name in names]
        advantages = {}
        for key, tag, tokens, mask, info in zip(batch.keys, batch.tags, *columns, strict=True):
            (advantage,) = set(tokens[mask != 0].tolist()) or {0.0}
            if not tag.get("is_padding"):
                place = info["index"], int(key.split("_")[1])
                assert advantages.setdefault(place, advantage) == advantage
        rows = read_dump(self.folder / "rollouts", trainer.global_steps)
        return Played(advantages, rows, metrics)

    def errors(self, partition="train"):
        """Why samples could not be scored: {(prompt, session): message}."""
        keys = [key for key in tq.kv_list()[partition] if "_" in key]
        data = tq.kv_batch_get(keys, partition, ["extra_fields", "extra_info"])
        places = [
            (info["index"], int(key.split("_")[1]))
            for key, info in zip(keys, data["extra_info"], strict=True)
        ]
        messages = [fields["reward_extra_info"].get(ERROR_KEY) for fields in data["extra_fields"]]
        found = zip(places, messages, strict=True)
        return {place: message for place, message in found if message is not None}

    def wait_until_settled(self):
        """Wait until no prompt is being played."""
        while any(
            tag.get("status") in ("pending", "running")
            for tags in (tq.kv_list() or {}).values()
            for tag in tags.values()
        ):
            time.sleep(0.01)  # verl's buffer polls too: TransferQueue tells nobody

    def clean(self):
        """Leave nothing to the next case."""
        self.wait_until_settled()
        for partition, tags in (tq.kv_list() or {}).items():
            if tags:
                tq.kv_clear([*tags], partition)


@contextlib.contextmanager
def limit(seconds):
    """Let the test fail if the block takes longer, and again each second, whatever catches that.

    By a SystemExit, as `ray.get` ignores what else a handler of signals raises, and waits on.
    """

    def stop(*_):
        raise SystemExit(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def with_settings(config, settings):
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def rows_of(prompts, sources=None):
    """Rows of verl's dataset for `prompts`."""
    return [
        {
            "dummy_tensor": torch.tensor([0]),
            "raw_prompt": [{"role": "user", "content": f"prompt {index}"}],
            "data_source": sources[index] if sources else "d",
            "reward_model": {"ground_truth": str(index)},
            "extra_info": {"index": index, "sessions": sessions},
            "index": index,
            "__rollout_n__": len(sessions),
        }
        for index, sessions in enumerate(prompts)
    ]


def read_dump(folder, step):
    return [*map(json.loads, (folder / f"{step}.jsonl").read_text().splitlines())]


def oracle_of(prompts, weights=None, **options):
    """What `Played.advantages` must be; `options` are of `oracle.gdpo`.

    Args:
        prompts: as in the case, or with the rewards that the scorer made of them. Exceptions are
            sessions that failed, and None is a reward that does not apply.
        weights: {reward: weight}; the default is 1 for each reward of the first session.
    """
    said = {
        (prompt, session): one[-1] if isinstance(one, list) else one
        for prompt, sessions in enumerate(prompts)
        for session, one in enumerate(sessions)
        if not isinstance(one, BaseException)
    }
    weights = weights or dict.fromkeys(next(iter(said.values())), 1.0)
    rewards = [[one.get(name) for name in weights] for one in said.values()]
    advantages = oracle.gdpo(
        [[value or 0.0 for value in row] for row in rewards],
        [prompt for prompt, _ in said],
        weights=[*weights.values()],
        present=[[value is not None for value in row] for row in rewards],
        **options,
    )
    return pytest.approx(dict(zip(said, advantages, strict=True)), abs=1e-6)
