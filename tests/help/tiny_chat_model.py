"""A Hugging Face folder with a tiny untrained model that knows bytes, and has a chat template."""

import torch
from byte_tokenizer import make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if polite is defined %}please{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_chat_model(folder, *, positions=256, seed=0, dtype=torch.float32):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        initializer_range=0.3,
        eos_token_id=256,
        pad_token_id=257,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder
