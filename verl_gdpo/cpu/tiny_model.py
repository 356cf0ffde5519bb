"""Makes a tiny Qwen2 model and tokenizer from a few texts, without any download.

The result loads with transformers' AutoTokenizer and AutoModelForCausalLM, and behaves like a
Qwen chat model towards verl: ChatML template, `<|im_end|>` ends a turn, `<|endoftext|>` pads,
"\\n" is one token. The same arguments give the same files, byte for byte.
"""

import os
import reprlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
BYTES = 256
# How Qwen2 splits text before merging: single digits, and line ends apart from words.
# AutoTokenizer applies it to every model of type qwen2, so training must use it too.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    intermediate_size: int | None = None,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 1024,
    initializer_range: float = 0.02,
    tie_word_embeddings: bool = False,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised Qwen2 model and a tokenizer trained on `texts` into `path`.

    Args:
        path: folder to create; it appears only once complete.
        texts: what the byte-level BPE merges are learned from, such as prompts and answers.
        whole_tokens: strings that are one token each wherever they occur, the longest first. They
            may span words and are ordinary text: decoding keeps them.
        vocab_size: largest vocabulary without `whole_tokens`, in tokens; few texts may yield fewer.
            The model's vocabulary is the tokenizer's.
        intermediate_size: width of the MLP; default twice `hidden_size`.
        max_position_embeddings: longest prompt plus response, in tokens.
        initializer_range: standard deviation of the initial weights. Small values start near the
            uniform distribution over tokens; larger ones prefer some tokens from the start.
        seed: of the initial weights; torch's global random state is left alone.

    Returns:
        The folder, as a Path.

    Raises:
        ValueError: sizes that do not fit together, or no text.
        FileExistsError: `path` exists.
    """
    if intermediate_size is None:
        intermediate_size = 2 * hidden_size
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": max_position_embeddings,
    }
    _check_sizes(sizes, vocab_size, initializer_range)
    _check_texts(texts)
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another folder")
    tokenizer = _train_tokenizer(texts, vocab_size, max_position_embeddings)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole_tokens])
    model = _init_model(
        tokenizer,
        seed,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        **sizes,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _check_sizes(sizes: dict[str, int], vocab_size: int, initializer_range: float) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    hidden, heads, kv_heads = (
        sizes[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if hidden % (2 * heads):
        raise ValueError(
            f"hidden_size={hidden} must be a multiple of twice num_attention_heads={heads}: "
            "rotary embeddings need heads of even width"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    least = BYTES + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size: got {vocab_size}, expected at least {least} (all bytes and "
            f"{', '.join(SPECIAL_TOKENS)})"
        )
    if not initializer_range > 0:
        raise ValueError(f"initializer_range: got {initializer_range}, expected more than 0")


def _check_texts(texts: Sequence[str]) -> None:
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"texts: got {reprlib.repr(texts)}, expected a non-empty list of str")


def _train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The roles of the chat template occur in every prompt, so they always count as text.
    bpe.train_from_iterator([*texts, "system\nuser\nassistant\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )


def _init_model(tokenizer: Any, seed: int, **config: Any) -> Any:
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                bos_token_id=None,
                dtype="float32",
                **tokens,
                **config,
            )
        ).float()
    model.generation_config = GenerationConfig(**tokens)
    return model
