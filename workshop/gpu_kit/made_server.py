"""What is behind the rollout "made": responses of made-up tokens, at once, whatever the weights.

Relies on what verl_gdpo.cpu.rollout says of verl 0.9.
"""

from typing import Any

import numpy as np
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from verl_gdpo.cpu.rollout import HFReplica, HFServer, HFServerAdapter
from workshop.gpu_kit.made_work import response_length

LOG_PROB = -7.0  # about that of one token of a thousand


class MadeServer(HFServer):
    """Ray actor that answers at once."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        self._longest = omega_conf_to_dataclass(config).response_length
        self._tokens = len(omega_conf_to_dataclass(model_config).tokenizer)
        self._rng = np.random.default_rng(replica_rank)
        self._steps: int | None = None

    async def load_weights(
        self, state: dict[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        self._steps = global_steps

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **extra: Any
    ) -> TokenOutput:
        length = response_length(self._rng, self._longest)
        return TokenOutput(
            token_ids=self._rng.integers(0, self._tokens, length).tolist(),
            log_probs=[LOG_PROB] * length,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self._steps},
        )

    async def set_global_steps(self, global_steps: int, **extra: Any) -> None:
        self._steps = global_steps

    async def abort_all_requests(
        self, reject_request: bool = False, **extra: Any
    ) -> dict[str, Any]:
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self, **extra: Any) -> None:
        """Nothing was stopped."""

    async def wait_for_requests_to_drain(self, **extra: Any) -> None:
        """Nothing is running."""


class MadeReplica(HFReplica):
    server_class = MadeServer


class MadeAdapter(HFServerAdapter):
    """Gathers the weights, as every rollout makes the trainer do, and sends none of them."""

    async def update_weights(self, weights: Any, *args: Any, **extra: Any) -> None:
        await super().update_weights(_gathered(weights), *args, **extra)


async def _gathered(weights: Any) -> Any:
    if hasattr(weights, "__aiter__"):
        async for _ in weights:
            pass
    else:
        for _ in weights:
            pass
    return
    yield  # makes this a generator, of nothing
