"""Makes a tiny Qwen2 model and tokenizer from a few texts, without any download.

The result loads with transformers' AutoTokenizer and AutoModelForCausalLM, and behaves like a
Qwen chat model towards verl: ChatML template, `<|im_end|>` ends a turn, `<|endoftext|>` pads,
"\\n" is one token. The same arguments give the same files, byte for byte.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    path: str | os.PathLike[str],
    *,
    texts: Sequence[str],
    whole_tokens: Sequence[str] = (),
    vocab_size: int = 512,
    hidden_size: int = 64,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a randomly initialised Qwen2 model and a tokenizer trained on `texts` into `path`.

    Args:
        path: folder to create.
        texts: what the byte-level BPE merges are learned from, such as prompts and answers.
        whole_tokens: strings that are one token each wherever they occur, the longest first. They
            may span words and are ordinary text: decoding keeps them.
        vocab_size: largest vocabulary without `whole_tokens`, in tokens; all bytes belong to it,
            and few texts may yield fewer. The model's vocabulary is the tokenizer's.
        seed: of the initial weights; torch's global random state is left alone.
        config: other arguments of transformers' Qwen2Config, which checks them.

    Returns:
        The folder, as a Path.

    Raises:
        FileExistsError: `path` exists.
    """
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    folder = Path(path)
    folder.mkdir(parents=True)
    tokenizer = _train_tokenizer(texts, whole_tokens, vocab_size)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=hidden_size,
                dtype="float32",
                **tokens,
                **{**sizes, **config},
            )
        )
    model.generation_config = GenerationConfig(**tokens)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _train_tokenizer(texts: Sequence[str], whole_tokens: Sequence[str], vocab_size: int) -> Any:
    from transformers import AddedToken, Qwen2Tokenizer

    untrained = Qwen2Tokenizer(eos_token=TURN_END, pad_token=PAD, chat_template=CHAT_TEMPLATE)
    tokenizer = untrained.train_new_from_iterator(
        # the roles of the chat template occur in every prompt, so they always count as text
        [*texts, "system\nuser\nassistant\n"],
        vocab_size,
        new_special_tokens=[TURN_START],
        show_progress=False,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole_tokens])
    return tokenizer
