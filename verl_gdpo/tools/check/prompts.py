"""Counts the prompts that are longer than a run allows."""

import functools
from typing import Any

import numpy as np

from verl_gdpo.tools.check.data import DataFile

MOST_ROWS = 1000  # of a file, evenly spread: this takes a second, where 50,000 rows take a minute


def long_prompts(config: Any, key: str, files: list[DataFile]) -> list[str]:
    """Return a remark for each file of `data.<key>` in which verl drops or cuts prompts.

    Without the tokenizer it counts words, of which each is at least one token.

    Raises:
        ValueError: verl drops so many that fewer rows than one batch are left.
    """
    model = config.actor_rollout_ref.model
    path = str(model.get("tokenizer_path") or model.path)
    tokenizer = load_tokenizer(path, bool(model.get("trust_remote_code")))
    unit, remarks, too_long, left = "tokens", [], [], 0
    if tokenizer is None:
        unit = "words, which are one token or more"
        remarks = [f"data.{key}: tokens not counted, because the tokenizer is not on this machine"]
    limit, drops = config.data.max_prompt_length, config.data.get("filter_overlong_prompts", False)
    for file in files:
        lengths = prompt_lengths(config, tokenizer, file)
        share = float(np.mean(lengths > limit))
        left += round(file.table.num_rows * (1 - share if drops else 1))
        if share:
            about = "" if len(lengths) == file.table.num_rows else "about "
            too_long.append(
                f"data.{key}: {about}{round(file.table.num_rows * share)} of "
                f"{file.table.num_rows} prompts in {file.path} are longer than "
                f"data.max_prompt_length={limit} {unit} (longest: {lengths.max()}); verl "
                + ("leaves them out" if drops else "cuts off their beginnings")
            )
    least = config.data.train_batch_size if key == "train_files" else 1
    if too_long and left < least:
        raise ValueError(
            f"{'; '.join(too_long)}. {left} rows are left, and {least} are needed: raise "
            "data.max_prompt_length, or use shorter prompts"
        )
    return remarks + too_long


@functools.cache  # training and validation files have the same
def load_tokenizer(path: str, trusts: bool) -> Any:
    """Return the tokenizer of a model, None if it is not on this machine."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusts)
    except (OSError, ValueError):
        return None


def prompt_lengths(config: Any, tokenizer: Any, file: DataFile) -> Any:
    """Return the lengths of up to `MOST_ROWS` prompts in tokens, as verl 0.9's RLHFDataset does.

    Without a tokenizer, the lengths are in words.
    """
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    count = file.table.num_rows
    places = np.linspace(0, count - 1, min(count, MOST_ROWS)).round().astype(int)
    prompts = file.table[config.data.prompt_key].take(places).to_pylist()
    if tokenizer is None:
        return np.array([sum(map(_words, prompt)) for prompt in prompts])
    return np.array(
        [
            len(
                tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
                )
            )
            for prompt in prompts
        ]
    )


def _words(message: Any) -> int:
    content = message["content"]
    return len(content.split()) if isinstance(content, str) else 0
