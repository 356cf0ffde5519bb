"""Short sums for the CPU run of the maths task, made from a seed without any download.

    What is 7 + 8?    15

The test split uses pairs of numbers that the train split never shows.
"""

from random import Random

from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.rewards.math_length import INSTRUCTION, TASK

HIGHEST = 20
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
    rng = Random(f"verl-gdpo math_length {split} {seed} {index}")
    while True:
        first, second = rng.randint(0, HIGHEST), rng.randint(0, HIGHEST)
        if ((first + 2 * second) % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
            problem = f"What is {first} + {second}?\n\n{INSTRUCTION}"
            return make_row(TASK, problem, str(first + second))
