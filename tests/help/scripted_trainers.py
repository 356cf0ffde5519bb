"""What verl's trainers do in a step and a validation, with everything else left out.

`past_ours.py` loads it as a module of verl's, so that its functions count as verl's own. What they
leave out needs Ray or a model: dataloaders, worker groups, log-probabilities and updates.
"""

import asyncio
from types import SimpleNamespace

import datasets
import numpy as np
from verl.trainer.ppo import metric_utils, ray_trainer, reward

ROW = {"data_source": "d", "reward_model": {"ground_truth": "4"}}


class OfV1:
    """Methods for verl's `PPOTrainer`; its other methods are verl's own."""

    def _setup(self):
        self._init_dataloader()
        self.reward_loop_manager = self.script.rewards
        self.agent_loop_manager = SimpleNamespace(generate_sequences=self.script.validate)
        self.tokenizer = self.script.tokenizer

    def _init_dataloader(self):
        dataset = SimpleNamespace(dataframe=datasets.Dataset.from_list([ROW]))
        self.train_dataset = self.val_dataset = dataset

    def fit(self, agent_loop_manager):
        self.global_steps, self.metrics = 7, {}
        self._init_dump_executor()
        batch, _ = self.replay_buffer.sample(7, "train", len(self.script.prompts))
        batch = self._compute_advantage(batch, metrics=self.metrics)
        self.script.update(self, batch)
        self._log_rollout_data(batch, {}, self.config.trainer.rollout_data_dir)
        self.val_dataloader = self.script.validation()
        self.validated = self._validate()
        self._shutdown_dump_executor()

    def init(self):
        self._setup()


class OfLegacy:
    """Methods for verl's `RayPPOTrainer`."""

    def __init__(self, config):
        self.config, self.use_rm, self.tokenizer = config, False, self.script.tokenizer
        self._create_dataloader(None, None, None, None)
        self._init_dump_executor()

    def init(self):
        self.reward_loop_manager = self.script.rewards
        self.async_rollout_manager = SimpleNamespace(generate_sequences=self.script.generate)

    def _create_dataloader(self, train_dataset, val_dataset, collate_fn, train_sampler):
        dataset = SimpleNamespace(dataframe=datasets.Dataset.from_list([ROW]))
        self.train_dataset = self.val_dataset = dataset

    def fit(self):
        self.global_steps = 7
        data = self.script.batch()
        generated = self.async_rollout_manager.generate_sequences(self._get_gen_batch(data))
        data = data.union(generated)
        scores, columns = reward.extract_reward(data)
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
        data.non_tensor_batch.update({name: np.array(c) for name, c in columns.items()})
        algorithm = self.config.algorithm
        data = ray_trainer.compute_advantage(
            data,
            adv_estimator=algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        self.script.update(self, data)
        self._log_rollout_data(data, columns, {}, self.config.trainer.rollout_data_dir)
        self.val_dataloader = self.script.validation()
        self.validated = self._validate()
        self.metrics = metric_utils.compute_data_metrics(batch=data, use_critic=False)
        self._shutdown_dump_executor()


class OfFullyAsyncTrainer:
    """Methods for the trainer of `fully_async_policy`. It validates in its rollouter."""

    def __init__(self, config, tokenizer, role_worker_mapping, resource_pool_manager):
        self.config, self.tokenizer, self.validated = config, tokenizer, None
        self.use_rm = self.use_critic = False
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self._init_dump_executor()

    async def fit(self):
        self.global_steps, self.metrics, self.timing_raw = 7, {}, {"step": 1.0}
        data = self.script.batch()
        # The script has an event loop of its own.
        data = data.union(await asyncio.to_thread(self.script.generate, data))
        data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(dim=-1).tolist()
        data = self._fit_compute_advantage(self._fit_compute_reward(data))
        self.script.update(self, data)
        self._fit_dump_data(data)
        self._fit_collect_metrics(data)
        self._shutdown_dump_executor()


class OfFullyAsyncRollouter:
    """Methods for the rollouter of `fully_async_policy`, whose first sample fails."""

    def __init__(self, config, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self._create_dataloader(None, None, None, None)
        self.async_rollout_manager = self.message_queue_client = self
        self.max_concurrent_samples, self.staleness_samples, self.active_tasks = 1, 0, set()
        self.pending_queue = asyncio.Queue()
        self._init_async_objects()

    async def put_sample(self, sample):
        return True

    async def _feed_samples(self):
        await self.pending_queue.put(SimpleNamespace(sample_id="sample_0_1"))
        await self.pending_queue.put(None)

    async def _process_single_sample_streaming(self, rollout_sample):
        raise RuntimeError("cannot be scored")

    async def _async_monitor_loop(self):
        """Nothing is monitored."""

    async def _should_pause_generation(self):
        return False

    def _record_active_count(self):
        """Nothing is recorded."""
