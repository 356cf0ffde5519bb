"""Grade-school maths (GSM8K): from upstream, from local files, or synthetic.

Upstream is github.com/openai/grade-school-math (MIT) at one commit: 7,473 training and 1,319 test
problems. A problem is {"question": ..., "answer": "48 / 2 = 24 ... #### 72"}; the ground truth is
what stands after the last line's ####.
"""

from typing import Any

from verl_gdpo.data_prep import DataError
from verl_gdpo.data_prep.gsm8k_synthetic import make_rows
from verl_gdpo.data_prep.local_files import make_row, strings_of
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.data_prep.sources import Sources
from verl_gdpo.rewards.gsm8k import GOLD_MARK, TASK

COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"


def _row_of_problem(item: Any, where: str, *_: Any) -> Row:
    fields = strings_of(item, ("question", "answer"), where)
    solution, mark, result = fields["answer"].rpartition(GOLD_MARK)
    if not mark or GOLD_MARK in solution:
        raise DataError(
            f"{where}, field answer: got {fields['answer'][-80:]!r}; expected a solution, "
            f"{GOLD_MARK!r} once, and the result"
        )
    return make_row(TASK, fields["question"], result.strip(), TASK.system_prompt)


SOURCES = Sources(
    task=TASK,
    base_url=f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}",
    files={
        "train": (
            "grade_school_math/data/train.jsonl",
            "7d97154b91aef28d01c3301741c81ce90039a4b1",
        ),
        "test": ("grade_school_math/data/test.jsonl", "e4c2ff4942b9a78bd74f04141224c11e28d12dc9"),
    },
    row_of=_row_of_problem,
    make_rows=make_rows,
)
