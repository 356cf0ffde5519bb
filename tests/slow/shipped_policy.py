"""`nox -s policy`: the policy in the package, made again."""

import json

import torch
from safetensors.torch import load_file

from workshop.tiny_policy.train import MARKER, SHIPPED, made_with, make_policy


def test_the_command_makes_the_policy_of_the_package(tmp_path):
    torch.set_num_threads(1)
    folder = make_policy(tmp_path / "policy")
    mine, theirs = (load_file(f / "model.safetensors") for f in (folder, SHIPPED))
    assert mine.keys() == theirs.keys()
    # another CPU rounds otherwise, and 1,000 steps amplify that
    made_alike = json.loads((SHIPPED / MARKER).read_text()).items() >= made_with().items()
    for name, weights in mine.items():
        if made_alike:
            assert torch.equal(weights, theirs[name]), name
        assert weights.shape == theirs[name].shape
