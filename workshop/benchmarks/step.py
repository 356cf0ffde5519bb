"""Measures what verl-gdpo adds to a step of verl's V1 trainer, with a real TransferQueue and Ray.

verl's constructor makes two trainers, which alternate on the same rows in the same queue: verl's
own class with `grpo`, and our extension of it with `gdpo`. The steps only have the parts in which
the two differ: sampling with `algorithm.filter_groups`, the advantage with its metrics, and the
dump until its file is closed. There is no model: rollouts, log-probabilities and rewards
are made up.
"""

import contextlib
import io
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_gdpo.tools.compose import compose_config
from verl_gdpo.tools.run.resume import quoted
from workshop.benchmarks.measure import Row, peak_bytes
from workshop.tiny_policy.model import make_tiny_model

PARTITION = "train"
PROMPT_TOKENS = 64
PARTS = ("sample", "advantage", "dump")
OVER_GRPO_GOAL = 1.10
GDPO = ("algorithm.adv_estimator=gdpo", "reward.reward_manager.name=gdpo")
GRPO = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    prompts: int
    group: int
    rewards: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts}x{self.group}x{self.rewards}, {self.tokens} tokens"

    @property
    def column_bytes(self) -> int:
        """The size of one int64 column of tokens."""
        return 8 * self.prompts * self.group * self.tokens


MANY = Size(512, 16, 2, 1024)
PAIRS_AT = {  # {size: number of pairs of steps}; MANY has the goal
    MANY: 5,
    Size(512, 4, 2, 8000): 3,
    Size(512, 16, 2, 128): 3,
    Size(4096, 16, 8, 128): 1,
    Size(512, 16, 2, 8000): 1,
}


def rows() -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="vg", dir="/tmp"))  # Ray's sockets need short paths
    texts = ["The weather in Oslo is cold. "]
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder / "model", texts=texts))
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            _temp_dir=str(folder / "ray"),
        )
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        for size, pairs in PAIRS_AT.items():
            yield from _rows_of_pair(size, *_median_pair(size, pairs, tokenizer, folder))
    finally:
        tq.close()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _rows_of_pair(size: Size, ours: "Step", grpos: "Step") -> Iterator[Row]:
    row = partial(Row, size=str(size), peer="verl's grpo", says="the peer's")
    goal = OVER_GRPO_GOAL if size == MANY else None
    yield row("step", ours=ours.total, peers=grpos.total, goal=goal)
    yield row("step: CPU time", ours=ours.cpu_seconds, peers=grpos.cpu_seconds)
    for part in PARTS:
        yield row(f"step: {part}", ours=ours.seconds[part], peers=grpos.seconds[part])
    yield Row(
        "step: peak memory",
        str(size),
        ours.peak_bytes,
        "grpo's, and 8 B a token",
        grpos.peak_bytes + size.column_bytes,
        says="the peer's",
        goal=1.0 if size == MANY else None,
        unit="B",
    )


class Queue:
    """Puts the rollouts of one step into TransferQueue, as verl's agent loop does."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        self.size = size
        self.keys: list[str] = []
        rng = np.random.default_rng(0)
        self.uids = [str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(size.prompts)]
        for first in range(0, size.prompts, 32):  # few rows at a time, to save memory
            rows = [
                (f"{uid}_{session}_0", *_rollout(uid, session, size, vocabulary, rng))
                for uid in self.uids[first : first + 32]
                for session in range(size.group)
            ]
            keys, fields, tags = zip(*rows, strict=True)
            tq.kv_batch_put(
                keys=list(keys),
                partition_id=PARTITION,
                fields=list_of_dict_to_tensordict(list(fields)),
                tags=list(tags),
            )
            self.keys += keys

    def finish_groups(self) -> None:
        """Mark all prompts as finished; sampling removes this mark."""
        tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
        tq.kv_batch_put(keys=self.uids, partition_id=PARTITION, tags=[tag] * len(self.uids))

    def clear(self) -> None:
        tq.kv_clear(keys=self.keys, partition_id=PARTITION)


def _rollout(
    uid: str, session: int, size: Size, vocabulary: int, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields and tag of one rollout. A prompt's first rollout has the highest rewards."""
    length = int(rng.integers(size.tokens // 8 + 1, size.tokens + 1))
    values = rng.integers(0, 4, size.rewards) + 4 * (session == 0)  # so that no group is dropped
    rewards = {f"reward_{k}": float(value) for k, value in enumerate(values)}
    score = sum(rewards.values())
    rm_scores = torch.zeros(length)
    rm_scores[-1] = score
    steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
    fields = {
        "uid": uid,
        "data_source": "made",
        "prompts": torch.from_numpy(rng.integers(0, vocabulary, PROMPT_TOKENS)),
        "responses": torch.from_numpy(rng.integers(0, vocabulary, length)),
        "response_mask": torch.ones(length, dtype=torch.int64),
        "rm_scores": rm_scores,
        "old_log_probs": torch.zeros(length),
        "reward_model": {"ground_truth": "42"},
        "extra_fields": {"reward_extra_info": {**rewards, "score": score}, **steps},
    }
    return fields, {"status": "success", "response_len": length, **steps}


@dataclass(frozen=True)
class Step:
    seconds: Mapping[str, float]  # {part: seconds}, see `PARTS`
    cpu_seconds: float  # CPU time of this process; other work on the machine hardly changes it
    peak_bytes: int  # memory of this process, without the queue's processes

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def _median_pair(size: Size, pairs: int, tokenizer: Any, folder: Path) -> tuple[Step, Step]:
    """Return our step and grpo's step of the pair with the median ratio of times."""
    queue = Queue(size, len(tokenizer))
    ours = make_trainer(get_trainer_cls("sync"), size, folder / "gdpo", tokenizer, *GDPO)
    grpos = make_trainer(PPOTrainerSync, size, folder / "grpo", tokenizer, *GRPO)
    if pairs > 1:
        run_step(grpos, queue)  # warms up
    measured = []
    for _ in range(pairs):
        of_grpo = run_step(grpos, queue)
        measured.append((run_step(ours, queue), of_grpo))
    queue.clear()
    measured.sort(key=lambda pair: pair[0].total / pair[1].total)
    return measured[len(measured) // 2]


def make_trainer(cls: type, size: Size, folder: Path, tokenizer: Any, *overrides: str) -> Any:
    config = compose_config(
        Path(verl.__file__).parent / "trainer" / "config",
        "ppo_trainer",
        [
            f"data.train_batch_size={size.prompts}",
            f"actor_rollout_ref.rollout.n={size.group}",
            f"trainer.rollout_data_dir={quoted(str(folder))}",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=score",
            *overrides,
        ],
    )
    trainer = cls(config)
    trainer.global_steps, trainer.tokenizer = 1, tokenizer
    return trainer


def run_step(trainer: Any, queue: Queue) -> Step:
    trainer.replay_buffer._dapo_classification_cache.clear()  # these groups are new
    trainer._init_dump_executor()
    queue.finish_groups()
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        seconds[part] += time.perf_counter() - start
        return result

    def step() -> None:
        batch, _ = timed("sample", trainer.replay_buffer.sample, 1, PARTITION, len(queue.uids))
        if len(batch.keys) != len(queue.keys):
            raise AssertionError(f"{len(batch.keys)} of {len(queue.keys)} rollouts were sampled")
        batch = timed("advantage", trainer._compute_advantage, batch, {})
        folder = trainer.config.trainer.rollout_data_dir
        timed("dump", trainer._log_rollout_data, batch, {}, folder)
        timed("dump", trainer._shutdown_dump_executor)  # waits for the file

    with contextlib.redirect_stdout(io.StringIO()):  # verl prints where it dumps
        before = time.process_time()
        peak = peak_bytes(step, CPU)
        cpu_seconds = time.process_time() - before
    return Step(seconds, cpu_seconds, peak)
