"""Asks verl's vLLM server, without a trainer, what scorers depend on; prints the answers as JSON.

The server has `max_num_seqs=2`. All answers are token ids unless their name says otherwise.
"""

import asyncio
import json

import ray
from omegaconf import OmegaConf
from ray_session import ray_session
from repository import REPO
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_gdpo.run.resume_command import quoted
from verl_gdpo.tasks.tool_rl.rows import make_rows
from verl_gdpo.tools.compose import compose_config

POLICY = REPO / "verl_gdpo" / "cpu" / "tool_rl_policy"
SAMPLES = 4
OVERRIDES = (
    "hardware=cpu",
    "rollout_engine=vllm_cpu",
    f"actor_rollout_ref.model.path={quoted(str(POLICY))}",
    "actor_rollout_ref.rollout.load_format=auto",
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "actor_rollout_ref.rollout.max_model_len=136",
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
GREEDY = {**SAMPLING, "temperature": 0.0}


def determine(server):
    """Let verl give its seed to each request; vLLM itself has no such mode on a CPU."""
    object.__setattr__(server.config, "full_determinism", True)


async def answers():
    config = compose_config(REPO / "recipes", "train", OVERRIDES)
    OmegaConf.resolve(config)
    parts = config.actor_rollout_ref
    server = ray.remote(num_cpus=0)(vLLMHttpServer).remote(
        parts.rollout,
        parts.model,
        rollout_mode=RolloutMode.HYBRID,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="",
    )
    await server.launch_server.remote()
    tokenizer = hf_tokenizer(str(POLICY))
    rows = [*make_rows(SAMPLES, split="test", seed=0)]
    prompts = [
        tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]
    number = 0

    async def ask(prompt, sampling):
        nonlocal number
        number += 1
        return await server.generate.remote(prompt, dict(sampling), str(number))

    async def ask_all(prompts, sampling):
        return await asyncio.gather(*(ask(prompt, sampling) for prompt in prompts))

    first = await ask(prompts[0], GREEDY)
    marker = "</think>"
    stopped = await ask(prompts[0], {**GREEDY, "stop": [marker]})
    without = await ask(prompts[0], {**GREEDY, "logprobs": False})
    short = prompts[0] * 10
    try:
        await ask(short[:136], GREEDY)
        refused = ""
    except Exception as error:
        refused = str(error)
    got = {
        "samples": [done.token_ids for done in await ask_all(prompts[:1] * SAMPLES, SAMPLING)],
        "alone": [(await ask(prompt, GREEDY)).token_ids for prompt in prompts],
        "together": [done.token_ids for done in await ask_all(prompts, GREEDY)],
        "log_probs": first.log_probs,
        "without_log_probs": without.log_probs,
        "eos_id": tokenizer.eos_token_id,
        "scored_text": tokenizer.decode(first.token_ids, skip_special_tokens=True),
        "stopped_text": tokenizer.decode(stopped.token_ids, skip_special_tokens=True),
        "length_at_the_models_limit": len((await ask(short[:130], SAMPLING)).token_ids),
        "longest": max(len(done.token_ids) for done in await ask_all(prompts, SAMPLING)),
        "refused": refused,
    }
    await server.__ray_call__.remote(determine)
    determined = await ask_all(prompts[:1] * SAMPLES, SAMPLING)
    got["samples_with_full_determinism"] = [done.token_ids for done in determined]
    await server.__ray_call__.remote(lambda server: server.engine.shutdown())
    return got


if __name__ == "__main__":
    with ray_session():
        print("ANSWERS " + json.dumps(asyncio.run(answers())), flush=True)
