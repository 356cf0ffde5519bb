"""The no-GPU rollout engine: a model that gets weights, and continues prompts in batches.

Knows neither Ray nor verl; `rollout.py` connects it to them.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_gdpo.cpu import sampler
from verl_gdpo.cpu.sampler import Completion, Request

# The place of a request in its batch, and its response.
Outcomes = Iterable[tuple[int, Completion | Exception]]
# Runs a batch; must give an outcome for each request, and ask the given function whether to stop.
RunBatch = Callable[[Sequence[Request], Callable[[], bool]], Outcomes]


class Waiting(NamedTuple):
    """A request, and the future of the event loop that waits for its response."""

    request: Request
    future: "asyncio.Future[Completion]"


@dataclass
class Batcher:
    """Feeds `run`, in a thread, with batches of up to `max_batch` concurrent requests, one by one.

    Each response is handed back as it comes, while `run` goes on with the others.

    A batch starts once no request has arrived for `quiet_s` seconds, or after `max_wait_s`. If the
    last batch took n > 1 seconds, both are n times as long, but at most 60 times. Must be used from
    one event loop. Abort and resume follow verl's contract for partial rollouts (verl 0.9:
    vLLMHttpServer.abort_all_requests, FullyAsyncLLMServerClient.generate): the running responses
    come back unfinished, and requests wait until `resume`.
    """

    run: RunBatch
    max_batch: int
    quiet_s: float = 0.02
    max_wait_s: float = 0.5
    #: Held while a batch runs: whoever changes the model takes it first.
    idle: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch: got {self.max_batch}, expected at least 1")
        self._waiting: list[Waiting] = []
        self._running: list[asyncio.Future[Completion]] = []
        # How long the last batch took.
        self._took_s = 0.0
        self._worker: asyncio.Task[None] | None = None
        # Whether batches may start, and whether the running one has to stop: `run` is in a thread.
        self._open = asyncio.Event()
        self._open.set()
        self._abort = threading.Event()
        self._hands_back = False

    async def submit(self, request: Request) -> Completion:
        """Wait for the response; raises what the model raised for this request."""
        if self._hands_back:
            return Completion()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def abort(self, hand_back: bool = False) -> int:
        """Stop the running batch and start no other until `resume`; returns how many it stopped.

        With `hand_back`, requests that wait or arrive come back empty instead of waiting. Returns
        after the batch has ended.
        """
        self._open.clear()
        self._hands_back = hand_back
        aborted = sum(not future.done() for future in self._running)
        self._abort.set()
        async with self.idle:
            self._abort.clear()
        if hand_back:
            for waiting in self._waiting:
                _settle(waiting.future, Completion())
            self._waiting = []
        return aborted

    def resume(self) -> None:
        """Let batches start again."""
        self._hands_back = False
        self._open.set()

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._open.wait()
                await self._gather_burst()
                async with self.idle:
                    # An abort may have come while we waited.
                    if self._open.is_set():
                        await self._run_one_batch()
        except BaseException as error:
            # Nobody may wait for a worker that is gone.
            for waiting in self._waiting:
                death = RuntimeError(f"the rollout's batch worker died: {error!r}")
                _settle(waiting.future, death)
            self._waiting = []
            raise

    async def _gather_burst(self) -> None:
        """Wait until no request has arrived for a while, or a batch is full."""
        # A request that misses a long batch waits long for the next one.
        patience = min(max(1.0, self._took_s), 60.0)
        deadline = time.monotonic() + patience * self.max_wait_s
        counted = 0
        while counted < len(self._waiting) < self.max_batch and time.monotonic() < deadline:
            counted = len(self._waiting)
            await asyncio.sleep(patience * self.quiet_s)

    async def _run_one_batch(self) -> None:
        # A future that is done already has a caller that has left.
        waiting = [each for each in self._waiting if not each.future.done()]
        batch = waiting[: self.max_batch]
        self._waiting = waiting[self.max_batch :]
        self._running = [each.future for each in batch]
        start = time.monotonic()
        why = "no response came"
        try:
            await asyncio.to_thread(self._answer, batch, asyncio.get_running_loop())
        except Exception as error:
            why = f"generating a batch of {len(batch)} responses failed: {error!r}"
        except BaseException:
            # Cancelled: `_work` gets the batch back, and fails whoever waits.
            self._waiting = batch + self._waiting
            raise
        finally:
            self._running = []
            self._took_s = time.monotonic() - start
        # It changes nothing for those whose response has come.
        for each in batch:
            _settle(each.future, RuntimeError(why))

    def _answer(self, batch: Sequence[Waiting], loop: asyncio.AbstractEventLoop) -> None:
        """Run the batch, in a thread, and hand each response to the event loop as it comes."""
        requests = [each.request for each in batch]
        for place, outcome in self.run(requests, self._abort.is_set):
            loop.call_soon_threadsafe(_settle, batch[place].future, outcome)


def _settle(future: "asyncio.Future[Completion]", outcome: Completion | Exception) -> None:
    """Give a future its outcome, if it has none yet."""
    if future.done():
        return
    if isinstance(outcome, Completion):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


@dataclass
class Engine:
    """Generates with `model`, whose weights come from `load_weights`.

    model: a transformers causal language model; its present weights are not used.
    eos_ids: tokens that end a response.
    pad_id: any token id; padding is masked out.
    prompt_length: verl's `rollout.prompt_length`, in tokens.
    response_length: verl's `rollout.response_length`, in tokens.
    max_model_len: longest prompt plus response that the model can hold, in tokens.
    max_batch: most requests per batch.
    seed: seed of all sampling that does not bring its own.
    ignore_eos: whether responses run on past `eos_ids` by default.

    Sampling is reproducible: under the weights of one step, the k-th request of a session for a
    prompt draws from a random stream made of (seed, step, session, k, prompt), in whatever order
    requests arrive. `batcher` can abort and resume them.
    """

    model: Any
    _: KW_ONLY
    eos_ids: Collection[int]
    pad_id: int
    prompt_length: int
    response_length: int
    max_model_len: int
    max_batch: int
    seed: int = 0
    ignore_eos: bool = False
    global_steps: int | None = None

    def __post_init__(self) -> None:
        self.model = self.model.eval()
        self._vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        # How many complete sets of weights have arrived; 0 while there is none.
        self._syncs = 0
        # {(session, prompt): how many requests there were under the present weights}
        self._seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self.batcher = Batcher(self._run, max_batch=self.max_batch)

    async def load_weights(
        self, state: Mapping[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        """Replace all weights, between batches.

        Raises:
            ValueError, RuntimeError: a parameter is missing, unknown or of another shape; the
                engine then refuses to generate until a complete set of weights has arrived.
        """
        async with self.batcher.idle:
            syncs = self._syncs
            # If the weights do not fit, there is no complete set, and `generate` refuses.
            self._syncs = 0
            load_full_state(self.model, state)
            self._syncs = syncs + 1
            if global_steps is not None:
                self.global_steps = global_steps
            self._seen.clear()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> Completion:
        """Continue one prompt.

        Raises:
            RuntimeError: no weights yet, or the batch failed.
            ValueError: an empty, too long or out-of-vocabulary prompt, or a bad sampling option.
            FloatingPointError: the logits of this request are not finite.
        """
        if not self._syncs:
            raise RuntimeError(
                "the rollout was asked to generate before a complete set of weights was loaded; "
                "verl's trainer must call update_weights first"
            )
        prompt = tuple(int(token) for token in prompt_ids)
        self._check_prompt(prompt)
        params = sampler.parse_sampling_params(
            sampling_params, eos_ids=self.eos_ids, ignore_eos=self.ignore_eos
        )
        in_row = self.prompt_length + self.response_length - len(prompt)
        max_tokens = sampler.parse_max_tokens(
            sampling_params,
            default=min(self.response_length, in_row),
            room=self.max_model_len - len(prompt),
        )
        seed = self._seed_of(prompt, sampling_params)
        return await self.batcher.submit(Request(prompt, params, max_tokens, seed))

    def _seed_of(self, prompt: tuple[int, ...], options: Mapping[str, Any]) -> int:
        """The request's own seed, or one made of the server's and of what is asked for."""
        if options.get("seed") is not None:
            entropy = [options["seed"]]
        else:
            step = self.global_steps
            if step is None:
                step = self._syncs
            session = options.get("session", 0)
            entropy = [self.seed, step, session, self._seen[session, prompt]]
            entropy.extend(prompt)
            self._seen[session, prompt] += 1
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def _run(self, requests: Sequence[Request], should_abort: Callable[[], bool]) -> Outcomes:
        """Sample those with equal options together."""
        for params in {request.params for request in requests}:
            places = [k for k, request in enumerate(requests) if request.params == params]
            alike = [requests[k] for k in places]
            for k, outcome in sampler.sample(self.model, alike, self.pad_id, should_abort):
                if isinstance(outcome, Completion):
                    outcome.global_steps = self.global_steps
                yield places[k], outcome

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not 0 < len(prompt) < self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; expected 1 at least, and room for a "
                f"response within rollout.max_model_len={self.max_model_len}"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise ValueError(f"a prompt token is outside the vocabulary of {self._vocab_size}")


def load_full_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy `state` into `model`; a tied parameter has to be given under one of its names only.

    Raises:
        ValueError: a parameter is missing or unknown.
        RuntimeError: a parameter has another shape.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(own[name]) for name in state if name in own}
    result = model.load_state_dict(state, strict=False)
    missing = []
    for name in result.missing_keys:
        # A buffer may be missing, and so may a parameter that came under another name.
        if name in own and id(own[name]) not in loaded:
            missing.append(name)
    if missing or result.unexpected_keys:
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: missing {len(missing)}, e.g. "
            f"{missing[:3]}; unknown {len(result.unexpected_keys)}, e.g. "
            f"{result.unexpected_keys[:3]}"
        )
