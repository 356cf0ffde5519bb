"""Makes the folder of a model out of a GGUF file, for `./run_demo.sh --model` without the hub.

python -m examples.demonstration.from_gguf FILE FOLDER

The weights are float32. It needs the package gguf.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demonstration.from_gguf", description=str(__doc__)
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        unpack(options.file, options.folder)
    except (OSError, ValueError, ImportError, KeyError) as error:
        print(f"from_gguf: {options.file}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(options.folder)
    return 0


def unpack(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder.

    Raises:
        OSError, ValueError, ImportError, KeyError: transformers cannot read the file.
    """
    inside = file.resolve().parent
    model = AutoModelForCausalLM.from_pretrained(inside, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(inside, gguf_file=file.name)
    # a file may name another token for the tokenizer than the one that ends a turn
    tokenizer.eos_token_id = model.config.eos_token_id
    tokenizer.pad_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
