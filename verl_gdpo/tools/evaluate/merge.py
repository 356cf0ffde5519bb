"""Merges a checkpoint of verl's FSDP engine into a Hugging Face folder, in the precision it has.

python -m verl_gdpo.tools.evaluate.merge CHECKPOINT TARGET [--trust]

CHECKPOINT is a folder `global_step_N/actor`. `verl-gdpo evaluate` starts this in a process of its
own, because the shards and the merged weights are in memory together.

A file of `torch.save` is a pickle, which can run any code where it is loaded. The shards of a run
hold tensors, and what says how they are distributed: torch loads these with `weights_only=True`,
which calls nothing else. Whatever else is in a shard is loaded with --trust alone.

Relies on verl 0.9 `verl.model_merger`: `FSDPModelMerger` loads each shard with `torch.load` and
`weights_only=False`, casts every tensor with `bfloat16()` while it joins the shards, and names
bfloat16 in config.json. A run in float32 would be read in another precision than it was trained in.
What is written here is compared with the shards.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.tensor  # lets torch load what a distributed tensor consists of

from verl_gdpo.tools.run.checkpoints import model_fault


def merge(checkpoint: Path, target: Path, *, trust: bool = False) -> None:
    """Write the model and its tokenizer to the folder `target`.

    An adapter (LoRA) is added to the weights that it belongs to.

    Args:
        trust: whether to run code that the shards name.

    Raises:
        ValueError: a file is missing, empty or cut, or a shard has more than tensors in it and is
            not trusted, or the weights have another precision than the shards.
    """
    fault = model_fault(checkpoint)
    if fault:
        raise ValueError(fault)
    # All are loaded before verl reads any: then a verl that loaded them in another way would find
    # nothing to run.
    shards = sorted(checkpoint.glob("model_world_size_*.pt"))
    dtypes = [_dtype_of(shard, trust) for shard in shards]
    dtype = dtypes[0]

    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(checkpoint),
        target_dir=str(target),
        hf_model_config_path=str(checkpoint / "huggingface"),
    )
    merger = FSDPModelMerger(config)
    # That of the run may not be installed here, as flash-attn.
    merger.model_config._attn_implementation = None
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor))
        if not trust:
            stack.enter_context(patch.object(torch, "load", _loading_weights_only(torch.load)))
        merger.merge_and_save()
    _name_dtype(target / "config.json", dtype)
    adapter = target / "lora_adapter"
    if adapter.is_dir():
        _add_adapter(target, adapter, dtype)
    _compare(target, dtype)


def _loading_weights_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` with `weights_only`, whatever its caller says of it."""

    def load_weights_only(*args: Any, **options: Any) -> Any:
        options["weights_only"] = True
        return load(*args, **options)

    return load_weights_only


def _dtype_of(shard: Path, trust: bool) -> torch.dtype:
    """Return the precision of a shard.

    Raises:
        ValueError: it has more than tensors in it, and is not trusted.
    """
    try:
        weights = torch.load(shard, map_location="cpu", weights_only=not trust, mmap=True)
    except UnpicklingError:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(shard)
        runs = ", ".join(names) or "something"
        raise ValueError(
            f"{shard}: it is a program, and not only tensors: to load it runs {runs}. A "
            "checkpoint of verl's FSDP engine does not need that. If you know who wrote it, "
            "--trust loads it all the same"
        ) from None
    return next(iter(weights.values())).dtype  # type: ignore[no-any-return]


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Let a model's config.json name the precision of its weights."""
    config = json.loads(path.read_bytes())
    # This was its name before transformers 5.
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2))


def _add_adapter(target: Path, adapter: Path, dtype: torch.dtype) -> None:
    """Add an adapter to the weights of its folder, and remove it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(target)
    rmtree(adapter)


def _compare(target: Path, dtype: torch.dtype) -> None:
    """Raise ValueError if a merged weight has another precision than the shards."""
    from safetensors import safe_open

    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                precision = file.get_tensor(name).dtype
                if precision != dtype:
                    raise ValueError(
                        f"{path}: {name} is {precision}, and {dtype} in the checkpoint: this "
                        "version of verl casts it in a way that verl-gdpo does not know"
                    )


def main() -> int:
    parser = argparse.ArgumentParser(
        "verl_gdpo.tools.evaluate.merge", description=__doc__.splitlines()[0]
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="global_step_N/actor")
    parser.add_argument("target", metavar="TARGET", type=Path, help="a new folder")
    parser.add_argument("--trust", action="store_true", help="run code that the shards name")
    arguments = parser.parse_args()
    try:
        merge(arguments.checkpoint, arguments.target, trust=arguments.trust)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
