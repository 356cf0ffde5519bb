"""A tokenizer that needs no file of others."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

# verl 0.9.0 and its main ask for a chat template
CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(folder, chat_template=CONTENTS):
    """Of bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    tokenizer.train_from_iterator([], BpeTrainer(initial_alphabet=ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chat_template
    fast.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    fast.save_pretrained(folder)
