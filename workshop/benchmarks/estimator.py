"""Compares the estimator with verl's built-in `gdpo`.

Both get the keyword arguments of verl's `compute_advantage`, with the rewards in columns of
`non_tensor_batch`.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage as built_in

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.metrics import batch_metrics
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.hooks.estimator import compute_gdpo
from workshop.benchmarks.measure import Row, peak_bytes, seconds_of

PROMPT_TOKENS = 16
PAPER_SIZES = ((512, 4), (512, 16))  # (prompts, samples per prompt) of a step
METRICS_SIZES = ((2048, 4), (512, 16))  # both 8,192 samples
BUILT_IN_GOAL, MEMORY_GOAL = 50.0, 1.5
METRICS_LIMIT = 0.010  # seconds, for 8,192 samples with 2 rewards

Draw = Callable[[np.random.Generator, int], Any]  # values of one reward
# whole numbers are exact in the built-in's float32, so the results can be compared
KINDS: dict[str, Draw] = {
    "0 to 3": lambda rng, B: rng.integers(0, 4, B),
    "binary": lambda rng, B: rng.integers(0, 2, B),
    "real": lambda rng, B: rng.random(B),
}


def verl_arguments(
    prompts: int,
    group: int,
    rewards: int,
    tokens: int,
    device: torch.device,
    kind: str = "0 to 3",
    **gdpo: Any,
) -> dict[str, Any]:
    """Return the arguments of verl's `compute_advantage` for a batch with scattered groups."""
    rng = np.random.default_rng(0)
    B = prompts * group
    uids = np.array([str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(prompts)], dtype=object)
    length_B = torch.from_numpy(rng.integers(tokens // 8 + 1, tokens + 1, B))
    mask_BT = (torch.arange(tokens)[None, :] < length_B[:, None]).to(device, torch.int64)
    prompt_mask = torch.ones(B, PROMPT_TOKENS, dtype=torch.int64, device=device)
    columns = {
        f"reward_{k}": np.array(KINDS[kind](rng, B).astype(float).tolist(), dtype=object)
        for k in range(rewards)
    }
    return {
        "token_level_rewards": torch.zeros(B, tokens, device=device),
        "response_mask": mask_BT,
        "index": rng.permutation(uids.repeat(group)),
        "config": OmegaConf.create({"gdpo_reward_keys": list(columns), "gdpo": gdpo}),
        "non_tensor_batch": columns,
        "batch": {
            "prompts": prompt_mask,
            "attention_mask": torch.cat([prompt_mask, mask_BT], dim=1),
        },
    }


def rows(device: torch.device) -> Iterator[Row]:
    check_agreement(device)  # also warms up
    yield from memory_rows(device)  # comes first, while the heap is fresh
    yield from time_rows(device)
    yield from growth_rows(device)


def check_agreement(device: torch.device) -> None:
    """Raise AssertionError unless both give the same advantages, with the built-in's batch norm."""
    arguments = verl_arguments(64, 8, 3, 50, device, batch_norm="token", eps=1e-6)
    ours, theirs = compute_gdpo(**arguments)[0], built_in(**arguments)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def memory_rows(device: torch.device) -> Iterator[Row]:
    arguments = verl_arguments(512, 16, 2, 8000, device)
    output = arguments["response_mask"].numel() * 4  # float32
    peak = peak_bytes(lambda: compute_gdpo(**arguments), device)
    memory = partial(Row, "peak memory", "512x16x2, 8000 tokens", peak, says="the peer's", unit="B")
    yield memory("the output", output, goal=MEMORY_GOAL)
    yield memory("built-in", peak_bytes(lambda: built_in(**arguments), device))


def time_rows(device: torch.device) -> Iterator[Row]:
    # with 128 tokens the arithmetic dominates, with 8000 the memory
    for tokens, (prompts, group), rewards in product((128, 1024, 8000), PAPER_SIZES, (2, 8)):
        arguments = verl_arguments(prompts, group, rewards, tokens, device)
        ours, theirs = seconds_of(
            partial(compute_gdpo, **arguments), partial(built_in, **arguments), device
        )
        is_large = (prompts, group, rewards, tokens) == (512, 16, 2, 1024)
        goal = BUILT_IN_GOAL if is_large else None
        size = f"{prompts}x{group}x{rewards}, {tokens} tokens"
        yield Row("estimator", size, ours, "built-in", theirs, goal=goal)


def growth_rows(device: torch.device) -> Iterator[Row]:
    """Compare the time for ten times the samples with ten times the time."""
    few = verl_arguments(1_000, 10, 2, 16, device)
    for prompts in (10_000, 100_000):
        many = verl_arguments(prompts, 10, 2, 16, device)
        # `partial`, because the loop rebinds both names
        ours, tenth = seconds_of(
            partial(compute_gdpo, **many), partial(compute_gdpo, **few), device
        )
        size, peer = f"{prompts * 10:,} samples", f"10 x {prompts:,} samples"
        yield Row("growth", size, ours, peer, 10 * tenth, says="the peer's")
        few = many


def metrics_rows(device: torch.device) -> Iterator[Row]:
    """Compare the CPU time of all metrics of a step with that of its estimator, and with a limit.

    The metrics get the estimator's z, S and A, as in training.
    """
    for (prompts, group), rewards, kind in product(METRICS_SIZES, (2, 8), ("binary", "real")):
        arguments = verl_arguments(prompts, group, rewards, 1024, device, kind)
        settings = read_settings(arguments["config"])
        rows = BatchRows.from_columns(arguments["non_tensor_batch"], arguments["index"])
        matrix, ids = RewardMatrix.of(rows, settings), arguments["index"]
        length_B = arguments["response_mask"].sum(dim=1).cpu().numpy()
        scalars = scalars_of(matrix, rows.counted_B, ids, settings)
        metrics = partial(
            batch_metrics, matrix, rows.counted_B, ids, length_B, settings, {}, scalars=scalars
        )
        ours, theirs = seconds_of(
            metrics, partial(compute_gdpo, **arguments), device, time.process_time
        )
        row = partial(Row, "metrics", f"{prompts}x{group}x{rewards}, {kind}", ours)
        yield row("estimator", theirs, says="the peer's")
        if rewards == 2:
            yield row("the limit", METRICS_LIMIT, says="the peer's", goal=1.0)
