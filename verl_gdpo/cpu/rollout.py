"""verl's rollout "hf": a Ray actor that generates with `Engine`, and what verl needs around it.

Relies on verl 0.9: verl.workers.rollout.replica (RolloutReplica, RolloutMode, TokenOutput),
verl.workers.rollout.base.BaseRollout, verl.workers.rollout.utils.ensure_async_iterator, and on how
verl.workers.rollout.llm_server and verl.checkpoint_engine call a server. After each update, full
weights are sent through Ray to the server by the worker beside it: a worker of the trainer in
verl's hybrid mode, and one that gets them from the checkpoint engine in its standalone mode.
Methods that verl calls by name accept further keywords, because their signatures grow between
versions of verl.
"""

import asyncio
import os
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_gdpo.cpu.engine import Engine
from verl_gdpo.cpu.sampler import end_ids

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16}
# Keys of actor_rollout_ref.rollout that can have one value only.
ONLY_VALUES = {
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "logprobs_mode": "processed_logprobs",
    "repetition_penalty": 1.0,
    "quantization": None,
    "enable_rollout_routing_replay": False,
}


def server_name(replica_rank: int) -> str:
    """Name of the Ray actor by which a training worker finds its server."""
    return f"hf_server_{replica_rank}_0"


def check_rollout_config(config: Any) -> None:
    """Refuse what this rollout cannot do.

    Raises:
        ValueError: names every offending key of actor_rollout_ref.rollout.
    """
    bad = []
    for name, expected in ONLY_VALUES.items():
        got = getattr(config, name)
        if got != expected:
            bad.append(f"{name}={got} (expected {expected})")
    mtp = config.get("mtp")
    if mtp and mtp.enable:
        bad.append("mtp.enable=True (expected False)")
    if config.dtype not in DTYPES:
        bad.append(f"dtype={config.dtype} (expected one of {', '.join(DTYPES)})")
    if bad:
        raise ValueError(f"the rollout 'hf' cannot do actor_rollout_ref.rollout: {', '.join(bad)}")


def build_engine(config: Any, model_config: Any, replica_rank: int) -> Engine:
    """Make the engine of one replica; the model's weights are random until the first update."""
    from transformers import AutoModelForCausalLM

    hf_config = model_config.hf_config
    context = int(hf_config.get_text_config().max_position_embeddings)
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ValueError(
            f"rollout.max_model_len={max_model_len} exceeds the model's {context} positions"
        )
    model = AutoModelForCausalLM.from_config(
        hf_config,
        attn_implementation="sdpa",
        dtype=DTYPES[config.dtype],
        trust_remote_code=model_config.trust_remote_code,
    )
    return Engine(
        model,
        eos_ids=end_ids(model_config.generation_config, hf_config),
        pad_id=getattr(model_config.tokenizer, "pad_token_id", None) or 0,
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        max_model_len=max_model_len,
        max_batch=config.max_num_seqs,
        # As verl seeds vLLM: replicas that share a prompt must not draw the same responses.
        seed=config.seed + replica_rank,
        ignore_eos=config.ignore_eos,
    )


async def _nothing_to_do(_self: Any, *_args: Any, **_extra: Any) -> None:
    """Memory stays where it is, no cache outlives a batch, and there is no profiler."""


class HFServer:
    """Ray actor behind one replica. Called by verl.workers.rollout.llm_server and the replica."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._engine = build_engine(omega_conf_to_dataclass(config), model, replica_rank)

    async def node_ip(self) -> str:
        return str(ray.util.get_node_ip_address())

    async def load_weights(
        self, state: dict[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        await self._engine.load_weights(state, global_steps)

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **extra: Any
    ) -> TokenOutput:
        """Continue one prompt; see `Engine.generate` for the errors."""
        media = sorted(name for name, value in extra.items() if name.endswith("_data") and value)
        if media:
            raise NotImplementedError(f"the rollout 'hf' takes text only; request with {media}")
        done = await self._engine.generate(normalize_token_ids(prompt_ids), sampling_params)
        log_probs = None
        if sampling_params.get("logprobs"):
            log_probs = done.log_probs
        # verl knows no difference between a stop token and the length limit here.
        stop_reason = "completed"
        if done.finish == "aborted":
            stop_reason = "aborted"
        global_steps = done.global_steps
        if global_steps is None:
            # The request was handed back before it was in a batch.
            global_steps = self._engine.global_steps
        return TokenOutput(
            token_ids=done.token_ids,
            log_probs=log_probs,
            stop_reason=stop_reason,
            num_preempted=0,
            extra_fields={"global_steps": global_steps},
        )

    async def abort_all_requests(
        self, reject_request: bool = False, **extra: Any
    ) -> dict[str, Any]:
        """Hand unfinished responses back, and hold new requests until `resume_generation`.

        With `reject_request`, those are handed back too, for another server to take.
        """
        aborted = await self._engine.batcher.abort(hand_back=reject_request)
        return {"aborted_count": aborted, "request_ids": []}

    async def resume_generation(self, **extra: Any) -> None:
        self._engine.batcher.resume()

    async def set_global_steps(self, global_steps: int, **extra: Any) -> None:
        self._engine.global_steps = global_steps

    async def wait_for_requests_to_drain(self, **extra: Any) -> None:
        async with self._engine.batcher.idle:
            await asyncio.sleep(0)

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing_to_do
    start_profile = stop_profile = _nothing_to_do


class HFReplica(RolloutReplica):  # type: ignore[misc, unused-ignore]
    """Starts one `HFServer` beside its worker."""

    server_class: type = HFServer

    async def launch_servers(self) -> None:
        is_actor = not (self.is_reward_model or self.is_teacher_model)
        if not is_actor or self.rollout_mode not in (RolloutMode.HYBRID, RolloutMode.STANDALONE):
            raise NotImplementedError("the rollout 'hf' is for actors, hybrid or standalone")
        options = {"name": server_name(self.replica_rank), "max_concurrency": self.max_concurrency}
        actor = ray.remote(self.server_class).options(**options)
        server = actor.remote(self.config, self.model_config, self.replica_rank)
        self.servers = [server]
        self._server_handle = server
        # Only a unique label: requests go through Ray, there is no HTTP server.
        self._server_address = f"hf://{await server.node_ip.remote()}/{self.replica_rank}"


class HFServerAdapter(BaseRollout):  # type: ignore[misc, unused-ignore]
    """Lives in a worker that has weights, or gets them, and sends them to its server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **extra: Any
    ) -> None:
        # verl makes this adapter before all servers, so that it refuses first.
        check_rollout_config(config)
        super().__init__(config, model_config, device_mesh)
        # One worker per replica: check_rollout_config allows no parallelism inside a replica.
        self.replica_rank = replica_rank
        if replica_rank < 0:
            self.replica_rank = int(os.environ["RANK"])
        self.is_leader_rank = True
        self.dtype = DTYPES[config.dtype]
        self._server: Any = None

    resume = release = _nothing_to_do

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **extra: Any,
    ) -> None:
        """Send all weights, given as (name, tensor) pairs, and wait until they are in use."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError(
                f"the rollout 'hf' takes full weights only; got wire_format={wire_format!r}, "
                f"peft_config={peft_config!r}. For LoRA set actor_rollout_ref.model.lora.merge=true"
            )
        state = {}
        async for name, tensor in ensure_async_iterator(weights):
            # A copy: the trainer may reuse or free the tensor once the iterator moves on.
            state[name] = tensor.detach().to("cpu", self.dtype, copy=True)
        if self._server is None:
            # verl creates the server after this adapter.
            self._server = ray.get_actor(server_name(self.replica_rank))
        await self._server.load_weights.remote(state, global_steps)
