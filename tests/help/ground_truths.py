"""Ground truths of each task."""

from verl_gdpo.tasks.coding import rows as coding
from verl_gdpo.tasks.constraints import rows as constraints
from verl_gdpo.tasks.gsm8k import rows as gsm8k
from verl_gdpo.tasks.math_length import rows as math_length
from verl_gdpo.tasks.tool_rl import rows as tool_rl


def ground_truths(make_rows, count=20):
    return [row["reward_model"]["ground_truth"] for row in make_rows(count, split="train", seed=0)]


GROUND_TRUTHS = {  # of some rows of each task
    "coding": ground_truths(coding.make_rows, 6),  # each answer starts a sandbox
    "constraints": ground_truths(constraints.make_rows, 60),
    "gsm8k": ground_truths(gsm8k.make_rows),
    "math_length": ground_truths(math_length.make_rows),
    "tool_rl": ground_truths(tool_rl.make_rows),
}
