"""What a training step of a recipe should take on GPUs: computed, not measured.

python -m benchmarks.step_model

A forward pass costs 2 FLOPs a parameter and token, a backward pass twice that, and gradient
checkpointing one forward pass more. Passes in rows are padded: `padding` is how many tokens are
computed for one that counts. Decoding reads all weights and the keys and values of all running
sequences once a token.
"""

import itertools
from dataclasses import dataclass, replace

FLOPS_SHARE = 0.4  # of the peak that dense passes reach
BANDWIDTH_SHARE = 0.6  # of the peak that decoding reaches


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # dense bfloat16, a second
    bytes_per_s: float
    memory_gb: float


@dataclass(frozen=True)
class Work:
    """One step of a recipe; token counts are means over the samples."""

    name: str
    parameters: float
    kv_bytes: float  # keys and values of one token, bfloat16
    prompts: int
    samples: int  # of each prompt
    prompt_tokens: float
    response_tokens: float
    longest_response: float
    padding: float  # of micro-batches in rows


GPUS = (
    Gpu("A100 80 GB", 312e12, 2.04e12, 80),
    Gpu("H100 SXM", 989e12, 3.35e12, 80),
    Gpu("H200", 989e12, 4.8e12, 141),
)
# of 399 rows of ToolRL: characters by 4, answers as long as ground truths, micro-batches of 8
TOOL_RL = Work(
    name="tool_rl",
    parameters=1.54e9,
    kv_bytes=2 * 28 * 2 * 128 * 2,
    prompts=512,
    samples=4,
    prompt_tokens=780,
    response_tokens=85,
    longest_response=1024,
    padding=1.7,
)


def seconds(work: Work, gpu: Gpu, count: int) -> dict[str, float]:
    """{stage: seconds} of one step on `count` GPUs, without start, transfers and Python."""
    flops, bandwidth = FLOPS_SHARE * gpu.flops * count, BANDWIDTH_SHARE * gpu.bytes_per_s
    rows = work.prompts * work.samples
    tokens = rows * (work.prompt_tokens + work.response_tokens) * work.padding
    forward = 2 * work.parameters * tokens / flops
    prefill = 2 * work.parameters * work.prompts * work.prompt_tokens / flops
    # half of the GPU's memory holds weights and cache; what does not fit waits
    cache = 0.5 * gpu.memory_gb * 1e9 - 2 * work.parameters
    held = work.kv_bytes * (work.prompt_tokens / work.samples + work.response_tokens)
    running = min(rows / count, cache / held)
    reads = 2 * work.parameters + running * held
    waves = rows / count / running
    decoding = waves * work.response_tokens * reads / bandwidth
    # the longest answer goes on when the others are done, and reads the weights alone
    tail = (work.longest_response - work.response_tokens) * 2 * work.parameters / bandwidth
    return {
        "rollout": prefill + decoding + tail,
        "log-probabilities, twice": 2 * forward,
        "update": 4 * forward,
    }


def table() -> str:
    """As Markdown: a line for each number of each GPU, in rows and packed without padding."""
    lines = ["| task | GPUs | attention | rollout | log-probabilities, twice | update | step |"]
    lines.append("|---|---|---|---|---|---|---|")
    for gpu, count in itertools.product(GPUS, (1, 8)):
        for attention, work in (("sdpa", TOOL_RL), ("flash_attn", replace(TOOL_RL, padding=1.0))):
            stages = seconds(work, gpu, count)
            cells = [f"{value:.1f} s" for value in stages.values()]
            cells = [work.name, f"{count} x {gpu.name}", attention, *cells]
            lines.append(f"| {' | '.join(cells)} | {sum(stages.values()):.0f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
