"""The batch on which implementations are compared."""

import torch

# method: 3 groups of 4, rewards (correctness, format)
PARITY_REWARDS = [
    *([1, 1], [1, 0], [0, 1], [0, 0]),
    *([3, 1], [3, 1], [-3, 1], [0.5, 1]),
    *([2, 0], [2, 0], [2, 0], [2, 0]),
]
PARITY_GROUPS = list("aaaabbbbcccc")
PARITY_LENGTHS = [6, 2, 6, 2, 8, 3, 5, 1, 4, 4, 4, 4]


def mask_of(lengths):
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
