"""What a training step of a recipe should take on GPUs: computed, not measured.

python -m workshop.benchmarks.step_model

A forward pass costs 2 FLOPs a parameter and token, and attention 4 FLOPs a layer, token, token that
it looks at, and unit of its width. A backward pass costs twice that, and gradient checkpointing one
forward pass more. Rows are packed, so that no padding is computed. Decoding reads all weights and
the keys and values of all running sequences once a token.

What share of a GPU's peak the passes reach decides most, so a range is computed. Its anchors are
the paper's tool calling on 8 x A100, which took 36 s a step, and a quarter of that step on one
H200: its update took as long as the share of 0.25 says, its log-probabilities 1.5 times as long.
"""

from dataclasses import dataclass

FLOPS_SHARES = (0.5, 0.25)  # of the peak that dense passes reach, at best and at worst
BANDWIDTH_SHARE = 0.6  # of the peak that decoding reaches
MOST_AT_ONCE = 256  # sequences of one vLLM: verl's rollout.max_num_seqs


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about its work; `parameters` counts tied ones once."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    tied: bool  # one matrix for the embeddings and the output


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # dense bfloat16, a second
    bytes_per_s: float
    memory_gb: float


@dataclass(frozen=True)
class Work:
    """One step of a recipe; token counts are means over the samples."""

    shape: ModelShape
    attention: int  # width of all heads together
    keys: int  # width of the heads of keys together; values have the same
    prompts: int
    samples: int  # of each prompt
    prompt_tokens: float
    response_tokens: float
    longest_response: float

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token, in bfloat16."""
        return 2.0 * self.shape.layers * self.keys * 2

    @property
    def in_products(self) -> float:
        """Parameters that each token is multiplied with; embeddings are looked up."""
        looked_up = 0 if self.shape.tied else self.shape.vocabulary * self.shape.hidden
        return self.shape.parameters - looked_up


GPUS = (
    Gpu("A100 80 GB", 312e12, 2.04e12, 80),
    Gpu("H100 SXM", 989e12, 3.35e12, 80),
    Gpu("H200", 989e12, 4.8e12, 141),
)
QWEN_1_5B = ModelShape(1_543_714_304, 28, 1536, 151_936, tied=True)
# of 399 rows of ToolRL: characters by 4, and answers as long as ground truths
TOOL_RL = Work(QWEN_1_5B, 1536, 256, 512, 4, 780, 85, 1024)


def forward_flops(work: Work) -> float:
    """Of one forward pass over a step's rows."""
    row = work.prompt_tokens + work.response_tokens
    # a token looks at those before it
    attention = 4 * work.shape.layers * work.attention * row / 2
    return work.prompts * work.samples * row * (2 * work.in_products + attention)


def seconds(work: Work, gpu: Gpu, count: int, flops_share: float) -> dict[str, float]:
    """{stage: seconds} of one step on `count` GPUs, without start, transfers and Python."""
    flops, bandwidth = flops_share * gpu.flops * count, BANDWIDTH_SHARE * gpu.bytes_per_s
    weights = 2.0 * work.shape.parameters
    rows = work.prompts * work.samples
    forward = forward_flops(work) / flops
    prefill = 2 * work.in_products * work.prompts * work.prompt_tokens / flops
    # half of the GPU's memory holds weights and cache; what does not fit waits
    cache = 0.5 * gpu.memory_gb * 1e9 - weights
    # a response is on average half written, and the samples of a prompt share its keys and values
    held = work.kv_bytes * (work.prompt_tokens / work.samples + work.response_tokens / 2)
    running = min(rows / count, cache / held, MOST_AT_ONCE)
    reads = weights + running * held
    waves = rows / count / running
    decoding = waves * work.response_tokens * reads / bandwidth
    # the longest answer goes on when the others are done, and reads the weights alone
    tail = (work.longest_response - work.response_tokens) * weights / bandwidth
    return {
        "rollout": prefill + decoding + tail,
        "log-probabilities, twice": 2 * forward,
        "update": 4 * forward,
    }


def table() -> str:
    """As Markdown: from and to how many seconds each part of a step of ToolRL takes on 8 GPUs."""
    lines = [
        "| GPUs | rollout | log-probabilities, twice | update | step |",
        "|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        best, worst = ({**seconds(TOOL_RL, gpu, 8, share)} for share in FLOPS_SHARES)
        cells = [span(best[stage], worst[stage]) for stage in best]
        cells = [f"8 x {gpu.name}", *cells, span(sum(best.values()), sum(worst.values()))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def span(least: float, most: float) -> str:
    return f"{least:.0f} to {most:.0f} s" if round(least) < round(most) else f"{most:.0f} s"


if __name__ == "__main__":
    print(table())
