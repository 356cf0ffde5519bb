"""The policy of the no-GPU run: a tiny Qwen2, taught tool calls from imperfect demonstrations.

    python -m verl_gdpo.cpu.warm_start --out DIR [--seed S] [--steps N] [--data train.parquet]

Reinforcement learning needs a policy that is sometimes right. This one learns to read a request
and to copy its tools, keys and values, from demonstrations with independent bad habits (see
`demonstrations.HABITS`). A habit of the majority shows in the policy's most likely answer too, so
that training on the rewards has something to unlearn in greedy answers as well as in samples.

The same arguments, code, library versions and kind of CPU give the same files, byte for byte; a
finished policy is recognised by the hash of all these in its `warm_start.json`, and kept.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from verl_gdpo.cpu import demonstrations, tiny_model
from verl_gdpo.cpu.demonstrations import (
    MAX_TOKENS,
    WHOLE_TOKENS,
    Example,
    answer_of,
    batches_of,
    load_rows,
    texts_of,
)
from verl_gdpo.cpu.tiny_model import make_tiny_model
from verl_gdpo.run.lock import locked
from verl_gdpo.terminal import printing

MARKER = "warm_start.json"
ROWS = 16384  # made where no data is given
WARM_UP_STEPS, LAST_LR_SHARE = 50, 0.05


def make_policy(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    data: str | os.PathLike[str] | None = None,
    steps: int = 1000,
    batch_size: int = 32,
    lr: float = 3e-3,
    hidden_size: int = 128,
    num_hidden_layers: int = 3,
    threads: int = 1,
) -> Path:
    """Make the policy in the folder `path`, or return at once if it is there already.

    The folder appears only once complete, and replaces a policy made from anything else; a link
    stays one. A second call for the same folder waits for the first.

    Args:
        seed: at least 0; of the initial weights, the habits and the order of the rows.
        data: parquet file in verl's schema with short rows; without it, rows of
            `data_prep.tool_rl_synthetic` in size "tiny" are made from the seed.
        steps: supervised optimiser steps, at least 1; 0.15 to 0.3 s each at the default sizes.
        batch_size: demonstrations per step.
        lr: peak learning rate; warms up for 50 steps, then falls along a cosine.
        threads: of torch; more than one helps little at this size and hurts on a busy machine.

    Raises:
        ValueError: an argument out of range, or rows that are too long for the tiny policy.
        FileExistsError: `path` exists and holds something else.
    """
    for name, value, least in (
        ("seed", seed, 0),
        ("steps", steps, 1),
        ("batch_size", batch_size, 1),
        ("threads", threads, 1),
    ):
        if value < least:
            raise ValueError(f"warm start, {name}: got {value}; expected at least {least}")
    if not 0 < lr < math.inf:
        raise ValueError(f"warm start, lr: got {lr}; expected finite and above 0")
    target = Path(path).resolve()
    settings = {"seed": seed, "steps": steps, "batch_size": batch_size, "lr": lr}
    settings |= {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    if target.exists() and not (target / MARKER).is_file():
        raise FileExistsError(f"{target} exists and is no warm start; choose another folder")
    rows = load_rows(data) if data is not None else _make_rows(seed)
    marker = {"fingerprint": _fingerprint({**settings, "threads": threads}, rows), **settings}
    if _fingerprint_of(target) == marker["fingerprint"]:
        return Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}.lock"), str(target), wait=True):
        if _fingerprint_of(target) != marker["fingerprint"]:  # nobody else made it meanwhile
            _make(target, rows, marker, threads)
    return Path(path)


def _make(
    target: Path, rows: Sequence[dict[str, Any]], marker: dict[str, Any], threads: int
) -> None:
    """Make the policy beside `target`, and put it there."""
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        folder = make_tiny_model(
            partial / "policy",
            texts=texts_of(rows),
            whole_tokens=WHOLE_TOKENS,
            vocab_size=1024,
            hidden_size=marker["hidden_size"],
            num_hidden_layers=marker["num_hidden_layers"],
            num_key_value_heads=4,
            max_position_embeddings=MAX_TOKENS,
            seed=marker["seed"],
        )
        _train(folder, rows, marker["seed"], marker["steps"], marker["batch_size"], marker["lr"])
        (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        if target.exists():
            target.rename(partial / "replaced")
        folder.rename(target)
    finally:
        torch.set_num_threads(threads_before)
        shutil.rmtree(partial, ignore_errors=True)


def _make_rows(seed: int) -> list[dict[str, Any]]:
    from verl_gdpo.data_prep.tool_rl_synthetic import make_rows  # which imports pyarrow

    return make_rows(ROWS, split="train", seed=seed, size="tiny")


def _fingerprint(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Hash what determines the files."""
    digest = sha256()
    for source in (__file__, demonstrations.__file__, tiny_model.__file__):
        digest.update(Path(source).read_bytes())
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    prompts_answers = [(row["prompt"], answer_of(row)) for row in rows]
    digest.update(
        json.dumps([settings, versions, platform.machine(), prompts_answers]).encode("utf-8")
    )
    return digest.hexdigest()


def _fingerprint_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MARKER).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _train(
    folder: Path, rows: Sequence[dict[str, Any]], seed: int, steps: int, batch_size: int, lr: float
) -> None:
    """Train the model in `folder` in place."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each of two tiny files
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.monotonic()
    batches = batches_of(rows, tokenizer, batch_size, random.Random(seed))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * _lr_share(step, steps)
        loss = _loss(model, next(batches), tokenizer.pad_token_id)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            _show_progress(step + 1, steps, loss.item(), time.monotonic() - start)
    model.save_pretrained(folder)


def _lr_share(step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return warm_up * (LAST_LR_SHARE + (1 - LAST_LR_SHARE) * cosine)


def _loss(model: Any, batch: Sequence[Example], pad_id: int) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens."""
    width = max(len(ids) for ids, _ in batch)
    # padded on the right: a causal model needs no mask for what comes after
    ids_BL = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in batch])
    place_L = torch.arange(1, width)
    first_B1 = torch.tensor([[prompt_length] for _, prompt_length in batch])
    end_B1 = torch.tensor([[len(ids)] for ids, _ in batch])
    wanted_BL = (place_L >= first_B1) & (place_L < end_B1)
    hidden_BLH = model.model(input_ids=ids_BL[:, :-1], use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BLH[wanted_BL])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BL[:, 1:][wanted_BL])


def _show_progress(step: int, steps: int, loss: float, seconds: float) -> None:
    left = seconds / step * (steps - step)
    line = f"warm start: step {step}/{steps}, loss {loss:.3f}, {seconds:.0f} s, {left:.0f} s left"
    overwrite = sys.stderr.isatty() and step < steps
    print(f"{line:79}", end="\r" if overwrite else "\n", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl_gdpo.cpu.warm_start")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="gets the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--data", metavar="PARQUET", type=Path, help="default: rows of its own")
    args = parser.parse_args(argv)
    # by default it ends the process at once, and the half-made folder stays
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        print(make_policy(args.out, seed=args.seed, data=args.data, steps=args.steps))
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"warm start: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(printing(main))
