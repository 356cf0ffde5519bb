"""Short sums in words for the CPU run of GSM8K, made from a seed without any download.

    Tom has 31 cups and gets 4 more. How many cups now?           35
    Ann has 47 pens and loses 12. How many pens now?              35
    A shop makes 8,000 bags in May and 6,000 in June. How many?   14,000

A quarter of the results are thousands with a comma, as 1 % of GSM8K's are: there the rewards
integer and correctness disagree unless `normalize_numbers` is on. The test split uses pairs of
numbers that the train split never shows.
"""

from random import Random

from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.rewards.gsm8k import TASK

NAMES = ("Ann", "Ben", "Eva", "Ida", "Jim", "Leo", "Mia", "Tom")
THINGS = ("bags", "caps", "cups", "eggs", "keys", "nuts", "pens", "toys")
THOUSANDS_SHARE = 0.25
TEST_EVERY = 4  # of the pairs of numbers


def make_rows(count: int, *, split: str, seed: int) -> list[Row]:
    """Return `count` rows; row i depends on i, seed and split alone, so that more continue fewer.

    Args:
        count: at least 1.
        split: "train" or "test"; says which pairs of numbers may occur.
        seed: at least 0.
    """
    return [_row(index, split, seed) for index in range(count)]


def _row(index: int, split: str, seed: int) -> Row:
    # a string seeds Random through SHA-512: the same in every process, unlike hash()
    rng = Random(f"verl-gdpo gsm8k {split} {seed} {index}")
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < THOUSANDS_SHARE:
        first, second = _pair(1, 49, split, rng)
        question = f"A shop makes {first},000 {things} in May and {second},000 in June. How many?"
        return _as_row(question, f"{first + second},000")
    first, second = _pair(10, 99, split, rng)
    if rng.random() < 0.5:
        question = f"{name} has {first} {things} and gets {second} more. How many {things} now?"
        return _as_row(question, str(first + second))
    first, second = max(first, second), min(first, second)
    question = f"{name} has {first} {things} and loses {second}. How many {things} now?"
    return _as_row(question, str(first - second))


def _as_row(question: str, result: str) -> Row:
    return make_row(TASK, question, result, TASK.system_prompt)


def _pair(low: int, high: int, split: str, rng: Random) -> tuple[int, int]:
    while True:
        first, second = rng.randint(low, high), rng.randint(low, high)
        if (first * second % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
            return first, second
