"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at a fixed commit.
"""

from typing import Any, get_args

from verl_gdpo.data_prep.local_files import make_row, strings_of
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.data_prep.sources import Sources
from verl_gdpo.data_prep.tool_rl_synthetic import Size, make_rows
from verl_gdpo.rewards.tool_rl import TASK

COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
JSON_KEYS = ("instruction", "input", "output")


def _row_of_item(item: Any, where: str, *_: Any) -> Row:
    fields = strings_of(item, JSON_KEYS, where)
    # upstream's parquet files have the ability "math", and our rows must be the same
    return make_row(TASK, fields["input"], fields["output"], fields["instruction"], ability="math")


SOURCES = Sources(
    task=TASK,
    base_url=f"https://raw.githubusercontent.com/qiancheng0/ToolRL/{COMMIT}",
    files={
        "train": ("dataset/rlla_4k/train.parquet", "0ddc730c556e4d26449dbdb55a1b28be824a8bfe"),
        "test": ("dataset/rlla_4k/test.parquet", "ccdac1cc0112fb54dd68cbc88d9abfe28ce3d749"),
    },
    row_of=_row_of_item,
    make_rows=make_rows,
    synthetic_choices={"size": get_args(Size)},
    # in upstream's and in synthetic `extra_info`: prompt and ground truth once more
    dropped=(*JSON_KEYS, "kind", "calls"),
)
