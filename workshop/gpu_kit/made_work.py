"""A model of Qwen2.5-1.5B's shape with random weights, and rows of the lengths of ToolRL's.

    python -m workshop.gpu_kit.made_work FOLDER --tokenizer FOLDER [--tiny]

Nothing is downloaded. Time and memory of a step depend on shapes and lengths, not on what is said.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Qwen/Qwen2.5-1.5B-Instruct, config.json
QWEN_1_5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
ROWS = 1024
PROMPT_TOKENS, LONGEST_PROMPT = 780, 2048  # the mean, and the recipe's limit
RESPONSE_TOKENS, LONGEST_RESPONSE = 85, 1024
SPREAD = 0.45  # of the logarithm: micro-batches of 8 compute 1.7 times their tokens, as ToolRL's do
TEMPLATE_TOKENS = 16  # what the chat template adds, at most


def prompt_length(rng: np.random.Generator, longest: int) -> int:
    """Tokens of a prompt; `longest` other than the recipe's scales them all."""
    return _length(rng, PROMPT_TOKENS / LONGEST_PROMPT * longest, longest - TEMPLATE_TOKENS)


def response_length(rng: np.random.Generator, longest: int) -> int:
    """Tokens of a response; `longest` other than the recipe's scales them all."""
    return _length(rng, RESPONSE_TOKENS / LONGEST_RESPONSE * longest, longest)


def _length(rng: np.random.Generator, mean: float, longest: int) -> int:
    drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)
    return int(np.clip(round(drawn), 1, longest))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Two rewards on which the responses to a prompt differ; verl loads this by the file's path."""
    return {"short": 1 / (1 + extra_info["response_tokens"]), "even": float(len(solution_str) % 2)}


def make_rows(path: Path, longest: int) -> None:
    import pandas as pd

    rng = np.random.default_rng(0)
    rows = [
        {
            "data_source": "made",
            # a digit is a token of its own in every tokenizer of Qwen2
            "prompt": [{"role": "user", "content": _digits(rng, prompt_length(rng, longest))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "none"},
            "extra_info": {"index": index, "split": "train"},
        }
        for index in range(ROWS)
    ]
    pd.DataFrame(rows).to_parquet(path)


def _digits(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(0, 10, count)))


def make_model(folder: Path, tokenizer: Path, sizes: Mapping[str, Any]) -> None:
    """Write the model with another model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config

    words = AutoTokenizer.from_pretrained(tokenizer)
    if len(words) > sizes["vocab_size"]:
        raise ValueError(f"{tokenizer} has {len(words)} tokens, the model {sizes['vocab_size']}")
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = Qwen2Config(**sizes, **ends, bos_token_id=None, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    words.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="workshop.gpu_kit.made_work", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the folder of a model")
    parser.add_argument("--longest", type=int, default=LONGEST_PROMPT, help="prompt, in tokens")
    parser.add_argument("--tiny", action="store_true", help="two layers, to try it out")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    make_rows(options.folder / "train.parquet", options.longest)
    sizes = TINY if options.tiny else QWEN_1_5B
    make_model(options.folder / "model", options.tokenizer, sizes)


if __name__ == "__main__":
    main()
