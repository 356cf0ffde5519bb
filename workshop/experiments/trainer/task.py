"""The rows and rewards of the experiment. verl loads `compute_score` from this file by its path.

A prompt is a name. A response has six places with four choices each, such as

    <say> big red new </say> .      or      say: short blue old end !

Three places are the *format*: how the response opens, closes and ends. The other three are the
*answer*. A reward is met if its three places have the choices that the row wants, so one response
can meet both. Each row wants an answer of its own. All rows want the same format, except where
both rewards are a prompt's own.
"""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

PLACES = (
    ("<say>", "say:", "so", "well"),
    ("big", "small", "long", "short"),
    ("red", "blue", "green", "white"),
    ("old", "new", "young", "late"),
    ("</say>", ";", "end", "then"),
    (".", "!", "?", "~"),
)
OF_REWARD = {"format": (0, 4, 5), "answer": (1, 2, 3)}
NAMES = tuple(map("".join, product("bdkl", "ao", ("ri", "nu"))))  # bari, banu, bori, ...
FACTOR = 8.0  # a factor that depends on the prompt is between 1/8 and 8
KNOWN = 0.5  # how often a demonstration has the wanted choice in a place

Row = dict[str, Any]


def make_rows(seed: int, *, own_format: bool) -> list[Row]:
    """Return 16 rows in verl's schema.

    Args:
        seed: of what each row wants, and of the factors.
        own_format: if True, the format is a prompt's own too, and each reward of each row has a
            factor from 1/8 to 8, uniform in its logarithm.
    """
    chance = random.Random(seed)
    shared = _choices(chance)
    rows = []
    for index, name in enumerate(NAMES):
        own, answer = _choices(chance), _choices(chance)
        factors = {reward: FACTOR ** chance.uniform(-1, 1) for reward in OF_REWARD}
        wanted = {
            "format": own if own_format else shared,
            "answer": answer,
            "factor": factors if own_format else dict.fromkeys(OF_REWARD, 1.0),
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
    return [chance.randrange(4) for _ in range(3)]


def demonstration(row: Row, chance: random.Random) -> str:
    """Return a response with the wanted choice in half of the places, and any other elsewhere."""
    wanted = json.loads(row["reward_model"]["ground_truth"])
    words = [""] * len(PLACES)
    for reward, places in OF_REWARD.items():
        for k, right in zip(places, wanted[reward], strict=True):
            others = [c for c in range(4) if c != right]
            words[k] = PLACES[k][right if chance.random() < KNOWN else chance.choice(others)]
    return " ".join(words)


def met(response: str, reward: str, choices: Sequence[int]) -> bool:
    """Return whether the places of a reward have the wanted choices, and there are six places."""
    words = response.split()
    wanted = zip(OF_REWARD[reward], choices, strict=True)
    return len(words) == len(PLACES) and all(words[k] == PLACES[k][c] for k, c in wanted)


def ranges_of(row: Row, ranges: Mapping[str, float]) -> dict[str, float]:
    """Return what each reward of a row is worth if it is met."""
    factors = json.loads(row["reward_model"]["ground_truth"])["factor"]
    return {reward: ranges[reward] * factors[reward] for reward in OF_REWARD}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    ranges: Mapping[str, float],
) -> dict[str, float]:
    """Return each reward, which is 0 or its range, and whether the row's rewards are met.

    The small reward is the one of the smaller range in this row; of equal ones, the answer.
    """
    wanted = json.loads(ground_truth)
    range_of = ranges_of({"reward_model": {"ground_truth": ground_truth}}, ranges)
    is_met = {reward: float(met(solution_str, reward, wanted[reward])) for reward in OF_REWARD}
    small, large = sorted(("answer", "format"), key=range_of.__getitem__)
    return {
        **{reward: is_met[reward] * range_of[reward] for reward in OF_REWARD},
        "small_met": is_met[small],
        "large_met": is_met[large],
    }
