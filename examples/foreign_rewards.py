"""Reward functions that ask a server of another framework; the folders beside have the servers.

They raise where the server is down, or answers in another form; `on_error` of the list decides.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

MOST_TEXT = 500  # characters of a bad answer that a message quotes
printed = set()  # entries whose weights this process has printed


async def verifiers(
    solution_str: str, ground_truth: str, url: str, entry: str, timeout: float = 60
) -> dict[str, Any]:
    """Ask examples/verifiers/server.py; `ground_truth` is the key of the task."""
    url = f"{url.rstrip('/')}/score"
    answer = await post(url, {"task": ground_truth, "response": solution_str}, timeout)
    return named(url, entry, answer, "rewards", "metrics")


async def openenv(
    solution_str: str, ground_truth: str, url: str, entry: str, timeout: float = 60
) -> dict[str, Any]:
    """Ask an environment of OpenEnv that returns the scores of its rubrics as metadata."""
    url = f"{url.rstrip('/')}/step"
    action = {"text": solution_str, "expected": ground_truth}
    answer = await post(url, {"action": action}, timeout)
    return named(url, entry, answer.get("metadata"), "rewards")


async def nemo_gym(
    solution_str: str, ground_truth: str, url: str, timeout: float = 60
) -> dict[str, Any]:
    """Ask a resources server of NeMo Gym; `ground_truth` is its row as JSON."""
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": solution_str, "annotations": []}],
    }
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 0.0,
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    answer = await post(
        f"{url}/verify", {**json.loads(ground_truth), "response": response}, timeout
    )
    if "_ng_failure_class" in answer:  # its reward is 0 then
        reason = {key: value for key, value in answer.items() if key.startswith("_ng_failure")}
        raise RuntimeError(f"{url}: the verifier failed, and its reward does not count: {reason}")
    components = answer.get("reward_components") or {"reward": answer.get("reward")}
    return numbers(url, components)


async def post(url: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return the JSON object that the server answers; raise if it is down, late or wrong."""
    limit = aiohttp.ClientTimeout(total=timeout)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url, json=body) as response,
    ):
        text = await response.text()
    if response.status != 200:
        raise RuntimeError(f"{url} answered {response.status}: {text[:MOST_TEXT]}")
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError(f"{url}: expected a JSON object, got {text[:MOST_TEXT]}")
    return answer


def named(url: str, entry: str, answer: Any, *parts: str) -> dict[str, Any]:
    """Return the numbers of an answer's parts, and print its weights once."""
    keys = (*parts, "weights")
    if not isinstance(answer, dict) or not all(isinstance(answer.get(key), dict) for key in keys):
        raise ValueError(f"{url}: expected {', '.join(keys)}, got {str(answer)[:MOST_TEXT]}")
    scores = {}
    for part in parts:
        if twice := scores.keys() & answer[part].keys():
            raise ValueError(f"{url}: {sorted(twice)} is a reward and a metric; rename one")
        scores |= numbers(url, answer[part])
    if entry not in printed:
        printed.add(entry)
        print(override(entry, {key: answer["weights"].get(key, 0.0) for key in scores}), flush=True)
    return scores


def numbers(url: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return scores under names that an override can have; raise for what is no number."""
    for key, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ValueError(f"{url}: expected a number for {key}, got {value!r}")
    renamed = {re.sub(r"\W", "_", key): value for key, value in scores.items()}
    if len(renamed) < len(scores) or not scores:
        raise ValueError(f"{url}: expected scores with different names, got {[*scores]}")
    return renamed


def override(entry: str, weights: Mapping[str, float]) -> str:
    """Return the line that gives the rewards of an entry of the list these weights."""
    pairs = ", ".join(f"{entry}__{key}: {weight}" for key, weight in weights.items())
    return f"the server's own weights: '++algorithm.gdpo.rewards={{{pairs}}}'"
