"""From the gradient of every prompt's logits to their change, for many runs at once.

The logits of a prompt are the sum of two parameters: one of its own, and one that all prompts
share, whose gradient is the sum over the prompts. Shape letters: as in `simulate`.
"""

from collections.abc import Callable, Mapping

import numpy as np

from workshop.experiments.map.settings import PROMPTS

MOMENTUM, SQUARES = 0.9, 0.999  # Adam's


def _over_prompts(gradient: np.ndarray) -> np.ndarray:
    """The gradient of the shared logits."""
    return (gradient @ np.ones(PROMPTS, gradient.dtype))[..., None]


class OneScale:
    """Adam with one second moment for all parameters of a run.

    In a language model every parameter takes part in every reward and prompt. Here each prompt and
    each position has parameters of its own, and Adam itself would bring rewards and prompts to an
    equal scale, one by one.
    """

    def __init__(self, rate_Q: np.ndarray) -> None:
        self.rate_Q, self.steps = rate_Q, 0
        # a plain 0.0 keeps the number format of the gradient
        self.own: np.ndarray | float = 0.0
        self.shared: np.ndarray | float = 0.0
        self.square: np.ndarray | float = 0.0

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        self.steps += 1
        shared = _over_prompts(gradient)
        self.own = MOMENTUM * self.own + (1 - MOMENTUM) * gradient
        self.shared = MOMENTUM * self.shared + (1 - MOMENTUM) * shared
        square = np.einsum("vlqsp,vlqsp->qs", gradient, gradient)
        square += np.einsum("vlqsp,vlqsp->qs", shared, shared)
        square /= gradient[:, :, 0, 0].size + shared[:, :, 0, 0].size
        self.square = SQUARES * self.square + (1 - SQUARES) * square
        scale = np.sqrt(self.square / (1 - SQUARES**self.steps)) + 1e-8
        rate = self.rate_Q[:, None] / (1 - MOMENTUM**self.steps) / scale
        return (self.own + self.shared) * rate[..., None]


class Adam:
    """Adam, one second moment a parameter."""

    def __init__(self, rate_Q: np.ndarray) -> None:
        self.rate_Q, self.steps = rate_Q, 0
        self.mean: list[np.ndarray | float] = [0.0, 0.0]
        self.square: list[np.ndarray | float] = [0.0, 0.0]

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        self.steps += 1
        step: np.ndarray | float = 0.0
        for i, part in enumerate((gradient, _over_prompts(gradient))):
            self.mean[i] = MOMENTUM * self.mean[i] + (1 - MOMENTUM) * part
            self.square[i] = SQUARES * self.square[i] + (1 - SQUARES) * np.square(part)
            scale = np.sqrt(self.square[i] / (1 - SQUARES**self.steps)) + 1e-8
            step = step + self.mean[i] / (1 - MOMENTUM**self.steps) / scale
        return step * self.rate_Q[:, None, None]


class Sgd:
    """Plain gradient steps."""

    def __init__(self, rate_Q: np.ndarray) -> None:
        self.rate_Q = rate_Q

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        step: np.ndarray = (gradient + _over_prompts(gradient)) * self.rate_Q[:, None, None]
        return step


OPTIMIZERS: Mapping[str, Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "one scale": OneScale,
    "adam": Adam,
    "sgd": Sgd,
}
