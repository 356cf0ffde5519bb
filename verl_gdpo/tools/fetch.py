"""Downloads the model of a configuration from its hub, before a training starts.

verl-gdpo fetch [what stands behind `python -m verl.trainer.main_ppo`]
verl-gdpo fetch --gguf FILE FOLDER

Nothing is done where the model is a folder, or is complete in the hub's cache. HF_ENDPOINT names
another hub, HF_HOME another cache. The second command makes a model's folder of a GGUF file, with
weights in float32; it needs the package gguf.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_gdpo.tools.compose import add_config_arguments, compose_accepted

# the weights once, as safetensors; no other framework's
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def main(argv: Sequence[str]) -> int:
    """Download what is missing and print its folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl-gdpo fetch", description=str(__doc__))
    add_config_arguments(parser)
    about = "make the folder of a model out of a GGUF file"
    parser.add_argument("--gguf", nargs=2, type=Path, metavar=("FILE", "FOLDER"), help=about)
    options = parser.parse_args(argv)
    if options.gguf:
        return unpack(*options.gguf)
    config, refused = compose_accepted(options)
    if refused:
        sys.exit("\n".join(f"fetch: {problem}" for problem in refused))
    path = str(config.actor_rollout_ref.model.path)
    if Path(path).expanduser().is_dir():
        print(Path(path).expanduser())
        return 0
    try:
        print(snapshot_download(path, allow_patterns=list(PATTERNS)))
    except Exception as error:  # of the network, the hub or the disk, in many classes
        reason = " ".join(str(error).split())
        sys.exit(
            f"fetch: actor_rollout_ref.model.path={path} cannot be downloaded: "
            f"{type(error).__name__}: {reason}. Without a network, name the folder of a model: "
            "actor_rollout_ref.model.path=FOLDER"
        )
    return 0


def unpack(file: Path, folder: Path) -> int:
    """Write the model and the tokenizer of a GGUF file into a folder; return the exit code."""
    try:
        model, tokenizer = (
            auto.from_pretrained(file.resolve().parent, gguf_file=file.name)
            for auto in (AutoModelForCausalLM, AutoTokenizer)
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        print(f"fetch: --gguf {file}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    # a file may name another token for the tokenizer than the one that ends a turn
    tokenizer.eos_token_id = tokenizer.pad_token_id = model.config.eos_token_id
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    print(folder)
    return 0
