"""Tool calling in the ToolRL format, with two rewards: format and correctness.

The format and its correctness score come from ToolRL (arXiv 2504.13958); GDPO (arXiv 2601.05242)
trains on the two as separate rewards. Plain text in, plain floats out: no tensors, no environment
variables, no randomness, no state between calls.

The task's output contract (tags and JSON keys) is defined in `form.py`.
"""

import math

from verl_gdpo.tasks import Task
from verl_gdpo.tasks.tool_rl import DATA_SOURCES, form


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    max_correctness: float = 3.0,
    step: int | None = None,
) -> dict[str, float]:
    r"""Score one response against one ground truth; every value is a finite float.

    >>> call = '{"name": "f", "parameters": {"a": 1}}'
    >>> gold = f"<think> x </think>\n<tool_call>\n{call}\n</tool_call>"
    >>> score(gold.replace("1", "2"), gold)
    {'format': 1.0, 'correctness': 1.0}

    Args:
        response: decoded text without special tokens. Every string gets a score.
        ground_truth: text of the same form. The response must contain the same blocks (tool call,
            response, both or neither).
        response_tokens, step: part of every scorer's signature; unused.
        max_correctness: M > 0, correctness is in [-M, M]; 3 in both papers, 1 in ToolRL's ablation.

    The correctness is C = 2 M s / D - M, with s = J(names) + sum over matched pairs of [J(keys) +
    number of equal values], and D = 1 + sum over gold calls of (1 + number of parameters); J is the
    multiset Jaccard index. Each gold call, in order, is matched with the first best unused
    predicted call of the same name.

    Degenerate cases:
    - A ground truth without a tool call gives correctness 0.
    - Equal lists of calls give M.
    - Values compare with ==, so 1 == 1.0 == true, but "1" != 1.
    - Correctness is -M if a tool-call tag is missing, if a line of the first block is not a JSON
      object with a scalar name, or if the parameters of a predicted call are not an object and a
      gold call has the same name.

    Raises:
        TypeError: an option is unknown.
        ValueError: the ground truth is malformed, or `max_correctness` has a bad value.

    Sources: ToolRL, arXiv 2504.13958; GDPO, arXiv 2601.05242.
    """
    bound = bounds(max_correctness=max_correctness)["correctness"][1]
    gold = form.parse_ground_truth(ground_truth)
    response = response.strip()
    correctness = 2 * bound * form.share_of_best(response, gold) - bound if gold else 0.0
    return {"format": float(_has_layout(response, ground_truth)), "correctness": correctness}


def bounds(*, max_correctness: float = 3.0) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    if not 0 < max_correctness < math.inf:
        raise ValueError(f"tool_rl max_correctness: got {max_correctness}; expected finite and > 0")
    return {"format": (0.0, 1.0), "correctness": (-max_correctness, max_correctness)}


def _has_layout(response: str, ground_truth: str) -> bool:
    """Return whether the stripped response has the ground truth's blocks, in order and once each.

    The result is that of `^<think>.*?</think>\\n<tool_call>\\n.*?\\n</tool_call>$` with DOTALL, and
    of the patterns for the other blocks. These patterns are fixed pieces with any text between, so
    it is enough to find each piece at its first place. This takes linear time; the patterns do not.
    """
    pieces, tags = [form.THINK_OPEN, form.THINK_CLOSE], []
    for (opening, closing), line in ((form.CALL_TAGS, "\n"), (form.RESPONSE_TAGS, "")):
        if opening in ground_truth:
            pieces = [*pieces[:-1], f"{pieces[-1]}\n{opening}{line}", f"{line}{closing}"]
            tags += [opening, closing]
    *inner, tail = pieces
    if not (response.startswith(form.THINK_OPEN) and response.endswith(tail)):
        return False
    position = 0
    for piece in inner:
        start = response.find(piece, position)
        if start < 0:
            return False
        position = start + len(piece)
    fits = position <= len(response) - len(tail)
    return fits and all(response.count(tag) == 1 for tag in tags)


TASK = Task(
    name="tool_rl",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("format", "correctness"),
    rows="verl_gdpo.tasks.tool_rl.rows",
    main_reward="correctness",
    good_response=str,  # ToolRL's ground truths have the form of a response
    system_prompt=None,  # each row lists its own tools; see `form.compact_system_prompt`
    verl_names={"accuracy_reward": "correctness", "format_reward": "format"},
)
