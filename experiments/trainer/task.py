"""The rows and rewards of the experiment. verl loads `compute_score` from this file by its path.

A prompt is a name. A response has six places with two choices each, such as

    <say> big red new </say> .      or      say: small red old ; .

Three places are the *format*: how the response opens, closes and ends. The other three are the
*answer*. A reward is met if its three places have the choices that the row wants, so a policy that
picks at random meets it in 1 of 8 responses, and one response meets both. Each row wants an answer
of its own. All rows want the same format, except where both rewards are a prompt's own.
"""

import json
import random
from collections.abc import Mapping
from itertools import product
from typing import Any

PLACES = (
    ("<say>", "say:"),
    ("big", "small"),
    ("red", "blue"),
    ("old", "new"),
    ("</say>", ";"),
    (".", "!"),
)
OF_REWARD = {"format": (0, 4, 5), "answer": (1, 2, 3)}
NAMES = tuple(map("".join, product("bdklmrtv", "ao", ("ri", "nu"))))  # bari, banu, bori, ...
FACTOR = 8.0  # a factor that depends on the prompt is between 1/8 and 8


def make_rows(seed: int, *, of_prompt: bool) -> list[dict[str, Any]]:
    """Return 32 rows in verl's schema.

    Args:
        seed: of what each row wants, and of the factors.
        of_prompt: if True, the format is a prompt's own too, and each reward of each row has a
            factor from 1/8 to 8, uniform in its logarithm.
    """
    chance = random.Random(seed)
    shared = _choices(chance)
    rows = []
    for index, name in enumerate(NAMES):
        own, answer = _choices(chance), _choices(chance)
        factors = {reward: FACTOR ** chance.uniform(-1, 1) for reward in OF_REWARD}
        wanted = {
            "format": own if of_prompt else shared,
            "answer": answer,
            "factor": factors if of_prompt else dict.fromkeys(OF_REWARD, 1.0),
        }
        rows.append(
            {
                "data_source": "experiment",
                "prompt": [{"role": "user", "content": name}],
                "ability": "experiment",
                "reward_model": {"style": "rule", "ground_truth": json.dumps(wanted)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return rows


def _choices(chance: random.Random) -> list[int]:
    return [chance.randrange(2) for _ in range(3)]


def any_response(chance: random.Random) -> str:
    """Return a response with random choices."""
    return " ".join(map(chance.choice, PLACES))


def met(response: str, reward: str, choices: list[int]) -> bool:
    """Return whether the places of a reward have the wanted choices, and there are six places."""
    words = response.split()
    wanted = zip(OF_REWARD[reward], choices, strict=True)
    return len(words) == len(PLACES) and all(words[k] == PLACES[k][c] for k, c in wanted)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    ranges: Mapping[str, float],
) -> dict[str, float]:
    """Return each reward, which is 0 or its range, and whether it is met (`format_met`)."""
    row = json.loads(ground_truth)
    result = {}
    for reward in OF_REWARD:
        is_met = float(met(solution_str, reward, row[reward]))
        result[reward] = is_met * ranges[reward] * row["factor"][reward]
        result[f"{reward}_met"] = is_met
    return result
