"""A tiny Qwen2 that is taught to answer from imperfect demonstrations.

Reinforcement learning needs a policy that is sometimes right. This one learns to read a request
and to copy what is asked for, from demonstrations with independent bad habits (see
`demonstrations.HABITS`). A habit of the majority shows in the policy's most likely answer too, so
that training on the rewards has something to unlearn in greedy answers as well as in samples.

The policy of tool_rl is in the package, `SHIPPED`, made with the defaults:
tests/slow/shipped_policy.py makes it again and compares the two.

The same arguments, code, library versions, kind of CPU and number of threads give the same files,
byte for byte; a finished policy is recognised by the hash of all these in its `warm_start.json`,
and kept.
"""

import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import verl_gdpo
from verl_gdpo.tasks.tool_rl.rows import make_rows
from verl_gdpo.tools.run.processes import locked
from workshop.tiny_policy import demonstrations, model
from workshop.tiny_policy.demonstrations import (
    MAX_TOKENS,
    WHOLE_TOKENS,
    Demonstrations,
    answer_of,
    load_rows,
    texts_of,
)
from workshop.tiny_policy.model import make_tiny_model

MARKER = "warm_start.json"
SHIPPED = Path(verl_gdpo.__file__).parent / "cpu" / "tool_rl_policy"
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
) -> Path:
    """Make the policy in the folder `path`, or return at once if it is there already.

    The folder appears only once complete, and replaces a policy made from anything else; a link
    stays one. A second call for the same folder waits for the first.

    Args:
        seed: of the initial weights, the habits and the order of the rows.
        data: parquet file in verl's schema with short rows; without it, rows of
            `data_prep.tool_rl` in size "tiny" are made from the seed.
        steps: supervised optimiser steps; 0.15 to 0.3 s each at the default sizes.
        batch_size: demonstrations per step.
        lr: peak learning rate; warms up for 50 steps, then falls along a cosine.

    Raises:
        ValueError: an argument out of range, or rows that are too long for the tiny policy.
        FileExistsError: `path` exists and holds something else.
    """
    target = Path(path).resolve()
    settings: dict[str, Any] = {"seed": seed, "steps": steps, "batch_size": batch_size, "lr": lr}
    settings |= {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    if target.exists() and not (target / MARKER).is_file():
        raise FileExistsError(f"{target} exists and is no warm start; choose another folder")
    rows = [*make_rows(ROWS, split="train", seed=seed)] if data is None else load_rows(data)
    if not rows:
        raise ValueError(f"warm start, data {data}: got no rows; expected at least one")
    fingerprint = _fingerprint(settings, rows)
    if _marker_of(target).get("fingerprint") == fingerprint:
        return Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}.lock"), str(target), wait=True):
        if _marker_of(target).get("fingerprint") != fingerprint:  # nobody made it meanwhile
            with _replaced(target) as folder:
                _initialise(folder, rows, seed, hidden_size, num_hidden_layers)
                _train(folder, rows, seed, steps, batch_size, lr)
                marker = {"fingerprint": fingerprint, "settings": settings, **made_with()}
                (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    return Path(path)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield a place beside `folder` for what becomes it once the block is done."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial / "new"
        if folder.exists():
            folder.rename(partial / "old")
        (partial / "new").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fingerprint(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Hash what determines the files."""
    digest = sha256()
    for source in (__file__, demonstrations.__file__, model.__file__):
        digest.update(Path(source).read_bytes())
    prompts_answers = [(row["prompt"], answer_of(row)) for row in rows]
    digest.update(json.dumps([settings, made_with(), prompts_answers]).encode("utf-8"))
    return digest.hexdigest()


def made_with() -> dict[str, Any]:
    """What the bytes of the files depend on besides arguments and code."""
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {**versions, "machine": platform.machine(), "threads": torch.get_num_threads()}


def _marker_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _initialise(
    folder: Path, rows: Sequence[dict[str, Any]], seed: int, hidden_size: int, layers: int
) -> None:
    make_tiny_model(
        folder,
        texts=texts_of(rows),
        whole_tokens=WHOLE_TOKENS,
        vocab_size=1024,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        max_position_embeddings=MAX_TOKENS,
        seed=seed,
    )


def _train(
    folder: Path, rows: Sequence[dict[str, Any]], seed: int, steps: int, batch_size: int, lr: float
) -> None:
    """Train the model in `folder` in place.

    transformers' Trainer takes as long and as many lines, and seeds all global random states.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        get_cosine_with_min_lr_schedule_with_warmup,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each of two tiny files
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, WARM_UP_STEPS, steps, min_lr_rate=LAST_LR_SHARE
    )
    shown = Demonstrations(rows, tokenizer, random.Random(seed))
    padded = DataCollatorForSeq2Seq(tokenizer)
    start = time.monotonic()
    for step, batch in enumerate(islice(shown.batches(batch_size), steps), 1):
        loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            _show_progress(step, steps, loss.item(), time.monotonic() - start)
    model.save_pretrained(folder)


def _show_progress(step: int, steps: int, loss: float, seconds: float) -> None:
    left = seconds / step * (steps - step)
    line = f"warm start: step {step}/{steps}, loss {loss:.3f}, {seconds:.0f} s, {left:.0f} s left"
    overwrite = sys.stderr.isatty() and step < steps
    print(f"{line:79}", end="\r" if overwrite else "\n", file=sys.stderr, flush=True)
