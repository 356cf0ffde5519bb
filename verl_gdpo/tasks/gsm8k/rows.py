"""Grade-school maths (GSM8K): from upstream, from local files, or synthetic.

Upstream is github.com/openai/grade-school-math (MIT) at one commit: 7,473 training and 1,319 test
problems. A problem is {"question": ..., "answer": "48 / 2 = 24 ... #### 72"}; the ground truth is
what stands after the last line's ####.

Synthetic problems are short sums in words:

    Tom has 31 cups and gets 4 more. How many cups now?           35
    Ann has 47 pens and loses 12. How many pens now?              35
    A shop makes 8,000 bags in May and 6,000 in June. How many?   14,000

A quarter of the results are thousands with a comma, as 1 % of GSM8K's are: there the rewards
integer and correctness disagree unless `normalize_numbers` is on. The test split uses pairs of
numbers that the train split never shows.
"""

from random import Random
from typing import Any

from verl_gdpo.tasks.gsm8k.score import GOLD_MARK, TASK
from verl_gdpo.tasks.preparation.schema import Row, require
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded, strings_of

COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
FOLDER = "grade_school_math/data"
NAMES = ("Ann", "Ben", "Eva", "Ida", "Jim", "Leo", "Mia", "Tom")
THINGS = ("bags", "caps", "cups", "eggs", "keys", "nuts", "pens", "toys")
THOUSANDS_SHARE = 0.25
TEST_EVERY = 4  # of the pairs of numbers


def _row_of_problem(item: Any, *_: Any) -> Row:
    fields = strings_of(item, ("question", "answer"))
    solution = fields["answer"]
    expected = f"a solution, {GOLD_MARK!r} once, and the result"
    require(solution.count(GOLD_MARK) == 1, "answer", solution[-78:], expected)
    result = solution.rpartition(GOLD_MARK)[2].strip()
    return make_row(TASK, fields["question"], result, TASK.system_prompt)


def _made_row(rng: Random, split: str) -> Row:
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    if rng.random() < THOUSANDS_SHARE:
        first, second = _pair(1, 49, split, rng)
        result = f"{first + second},000"
        question = f"A shop makes {first},000 {things} in May and {second},000 in June. How many?"
        return make_row(TASK, question, result, TASK.system_prompt)

    first, second = _pair(10, 99, split, rng)
    if rng.random() < 0.5:
        result = str(first + second)
        story = f"has {first} {things} and gets {second} more"
    else:
        more = max(first, second)
        less = min(first, second)
        result = str(more - less)
        story = f"has {more} {things} and loses {less}"
    question = f"{name} {story}. How many {things} now?"
    return make_row(TASK, question, result, TASK.system_prompt)


def _pair(low: int, high: int, split: str, rng: Random) -> tuple[int, int]:
    """Return two numbers of [low, high] that a split may use."""
    while True:
        first = rng.randint(low, high)
        second = rng.randint(low, high)
        is_of_test = first * second % TEST_EVERY == TEST_EVERY - 1
        if is_of_test == (split == "test"):
            return first, second


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(
    task=TASK,
    base_url=f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}",
    files={
        "train": (f"{FOLDER}/train.jsonl", "7d97154b91aef28d01c3301741c81ce90039a4b1"),
        "test": (f"{FOLDER}/test.jsonl", "e4c2ff4942b9a78bd74f04141224c11e28d12dc9"),
    },
    row_of=_row_of_problem,
    make_rows=make_rows,
)
