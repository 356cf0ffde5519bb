"""The rewards of the end-to-end runs: ToolRL's, and two that vary for an untrained model.

verl loads it through `reward.custom_reward_function.path`.
"""

import asyncio
import itertools

import ray

from verl_gdpo.tasks.tool_rl import score as tool_rl

# rewards (a, b, c) of the samples of a prompt, by its index modulo 5
PATTERNS = {
    "constant": [(0.1, 0.1, 0.1)] * 4,
    "opposed": [(0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 0, 0)],
    "tied": [(0, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)],
    "ordinary": [(0, 0, 0), (0, 0, 1), (0, 0, 1), (1, 1, 1)],
    "stairs": [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)],
}
turns: dict[int, itertools.count] = {}


def letters(response):
    """Share of ASCII letters, in [0, 1]."""
    return sum(c.isascii() and c.isalpha() for c in response) / max(1, len(response))


def brevity(response_tokens):
    """1 for an empty response, falling with its length in tokens."""
    return 1 / (1 + response_tokens)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    rewards = tool_rl.score(solution_str, ground_truth)
    rewards["letters"] = letters(solution_str)
    rewards["brevity"] = brevity(extra_info["response_tokens"])
    return rewards


def without_signal_for_some(data_source, solution_str, ground_truth, extra_info):
    """Every third prompt gets the same whatever the response, so that filtering drops it."""
    rewards = compute_score(data_source, solution_str, ground_truth, extra_info)
    return dict.fromkeys(rewards, 0.0) if extra_info["index"] % 3 == 0 else rewards


def with_score(data_source, solution_str, ground_truth, extra_info):
    """As verl's own reward manager wants it."""
    rewards = {"letters": letters(solution_str), "brevity": 1 / (1 + len(solution_str))}
    return {"score": sum(rewards.values()), **rewards}


def nan_in_validation(data_source, solution_str, ground_truth, extra_info):
    rewards = compute_score(data_source, solution_str, ground_truth, extra_info)
    if extra_info["split"] == "test":
        rewards["letters"] = float("nan")
    return rewards


def letters_alone(solution_str):
    return letters(solution_str)


def service_fails(response):
    return len(response) % 7 == 3


def two(solution_str):
    """Two rewards, and an error for some responses."""
    if service_fails(solution_str):
        raise ConnectionError("a service that is not there")
    return {"two": 1.0, "letters": letters(solution_str)}


async def ask_service(log):
    """Writes + when it is asked, and - at its end, with the node of Ray that asks."""
    for sign in "+-":
        with open(log, "a") as file:
            file.write(f"{sign}{ray.get_runtime_context().get_node_id()}\n")
        await asyncio.sleep(0.02 if sign == "+" else 0)


def asked_at_once(log):
    """How many requests the service had at each of its lines, and the nodes that asked."""
    lines = log.read_text().splitlines()
    at_once = itertools.accumulate(1 if line[0] == "+" else -1 for line in lines)
    return [*at_once], {line[1:] for line in lines}


async def compute_score_after_service(data_source, solution_str, ground_truth, extra_info, log):
    await ask_service(log)
    return compute_score(data_source, solution_str, ground_truth, extra_info)


async def service(solution_str, log):
    """Fails for some responses."""
    await ask_service(log)
    if service_fails(solution_str):
        raise ConnectionError("a service that is not there")
    return {"digits": sum(map(str.isdigit, solution_str))}


def fails_for_one_row(data_source, solution_str, ground_truth, extra_info, index=30):
    """Raises for a single row of the training data, which is not in the first batches."""
    if extra_info["split"] == "train" and extra_info["index"] == index:
        raise KeyError("a bug in the scorer")
    return compute_score(data_source, solution_str, ground_truth, extra_info)


def patterned(data_source, solution_str, ground_truth, extra_info):
    """Whatever the response: the next row of the prompt's pattern, so 4 samples have all of it.

    One data source has a reward more, which applies to every other of its samples.
    """
    index = extra_info["index"]
    turn = next(turns.setdefault(index, itertools.count()))
    pattern = list(PATTERNS.values())[index % len(PATTERNS)]
    rewards = dict(zip("abc", map(float, pattern[turn % 4]), strict=True))
    if data_source == "rlla":
        rewards["rare"] = 0.0 if (index // 2 + turn) % 2 else None
    return rewards


def patterned_but_for_one_row(data_source, solution_str, ground_truth, extra_info):
    fails_for_one_row(data_source, solution_str, ground_truth, extra_info, index=20)
    return patterned(data_source, solution_str, ground_truth, extra_info)
