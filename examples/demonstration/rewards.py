"""The rewards, as anybody would write them: the recipes name this file and its functions.

<answer> big red fox </answer> .        has the format
so big red fox end ~                    has not; the judge likes both alike
"""

import json
import random
from operator import eq
from typing import Any

from verl_gdpo.tasks.constraints.score import WORD, count_sentences, count_words

FRAME = ("<answer>", "</answer>", ".")
WORDS = 3  # between the first two of the frame
LEAST_WORDS = 5  # of a real model's answer, for it to be a sentence


def has_format(solution_str: str) -> float:
    """Return 1 for `<answer> WORD WORD WORD </answer> .`, and else 0."""
    words = solution_str.split()
    return float((*words[:1], *words[1 + WORDS :]) == FRAME)


def judge(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any], seed: int, noise: float
) -> float:
    """Return 0 to 100: a third for each word that the judge wants in its place, and the noise.

    Args:
        ground_truth: the words, as in "big red fox".
        seed: the same seed, prompt and answer have the same noise.
        noise: its standard deviation, in points.
    """
    right: int = sum(map(eq, solution_str.split()[1 : 1 + WORDS], ground_truth.split()))
    chance = random.Random(f"{seed}, {extra_info['index']}: {solution_str}")
    return min(max(100 * right / WORDS + chance.gauss(0, noise), 0.0), 100.0)


def is_right(solution_str: str, ground_truth: str, least_frame: int = 0) -> float:
    """Return 1 if all words are those that are wanted, with so many words of the frame, else 0."""
    words = solution_str.split()
    is_wanted = words[1 : 1 + WORDS] == ground_truth.split()
    return float(is_wanted and frame_words(words) >= least_frame)


def says(solution_str: str, word: str, worth: float) -> float:
    """Return `worth` for an answer with the word."""
    return worth * (word in solution_str.split())


def cost_of_frame(solution_str: str, worth: float) -> float:
    """Return minus `worth` for an answer with the whole frame, and a share of it for a part."""
    return -worth * frame_words(solution_str.split()) / len(FRAME)


def noise(deviation: float) -> float:
    """Return chance, with this standard deviation: a new number each time."""
    return random.gauss(0, deviation)


def frame_words(words: list[str]) -> int:
    """Return how many words of the frame are in their places."""
    return sum(map(eq, (*words[:1], *words[1 + WORDS :]), FRAME))


def has_length(solution_str: str, ground_truth: str) -> float:
    """Return 100 for the number of words that is asked for, and less the further it is away.

    At no word, and at twice as many, it is 0.

    >>> has_length("Bees like rain.", '{"number": 6, "words": ["bees", "rain"]}')
    50.0

    Args:
        ground_truth: JSON text, an object with what `make_prompts` asks for.
    """
    asked = json.loads(ground_truth)["number"]
    return max(0.0, 100 * (1 - abs(count_words(solution_str) - asked) / asked))


def uses_words(solution_str: str, ground_truth: str) -> float:
    """Return the share of the asked words that a whole sentence uses once each, as whole words.

    A whole sentence has at least `LEAST_WORDS` words, stands on one line, has an end, and quotes
    nothing. Any other answer gets 0.
    """
    text = solution_str.strip()
    words = [word.casefold() for word in WORD.findall(text)]
    is_one = count_sentences(text) == 1 and text.endswith((".", "!", "?"))
    is_whole = is_one and "\n" not in text and '"' not in text and len(words) >= LEAST_WORDS
    if not is_whole:
        return 0.0
    asked = json.loads(ground_truth)["words"]
    return sum(words.count(word) == 1 for word in asked) / len(asked)
