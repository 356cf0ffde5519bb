"""Tool calling in the ToolRL format, with two rewards: format and correctness.

The format and its correctness score come from ToolRL (arXiv 2504.13958); GDPO (arXiv 2601.05242)
trains on the two as separate rewards. Plain text in, plain floats out: no tensors, no environment
variables, no randomness, no state between calls.

The task's output contract (tags and JSON keys) is defined in `form.py`. A model may write its calls
in a format of its own: `call_formats.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_gdpo.tasks import Task
from verl_gdpo.tasks.tool_rl import DATA_SOURCES, form
from verl_gdpo.tasks.tool_rl.call_formats import REASONS, TOOLRL, CallFormat, call_format_of


@dataclass
class CallNotes:
    """Why the calls of a response could not be read, for the log. No reward depends on it.

    why: the first reason, one of `call_formats.REASONS`; "" if all were read, or none were asked.
    """

    why: str = ""

    def numbers(self) -> dict[str, float]:
        """What is logged: each reason, 1 for the one that holds."""
        return {reason: float(reason == self.why) for reason in REASONS}


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    max_correctness: float = 3.0,
    call_format: str = TOOLRL,
    step: int | None = None,
    notes: CallNotes | None = None,
    closed_thought: bool = False,
) -> dict[str, float]:
    r"""Score one response against one ground truth; every value is a finite float.

    >>> call = '{"name": "f", "parameters": {"a": 1}}'
    >>> gold = f"<think> x </think>\n<tool_call>\n{call}\n</tool_call>"
    >>> score(gold.replace("1", "2"), gold)
    {'format': 1.0, 'correctness': 1.0}
    >>> score(gold.replace("parameters", "arguments"), gold, call_format="hermes")
    {'format': 1.0, 'correctness': 3.0}

    Args:
        response: decoded text without special tokens. Every string gets a score.
        ground_truth: text in ToolRL's format, whatever `call_format` is. The response must contain
            the same blocks (tool call, response, both or neither).
        response_tokens, step: part of every scorer's signature; unused.
        closed_thought: whether the prompt has closed the thought. The format is then that of the
            other blocks alone.
        max_correctness: M > 0, correctness is in [-M, M]; 3 in both papers, 1 in ToolRL's ablation.
        call_format: how the model writes calls, a key of `call_formats.CALL_FORMATS`.
        notes: filled in with the reason, if calls cannot be read.

    The correctness is C = 2 M s / D - M, with s = J(names) + sum over matched pairs of [J(keys) +
    number of equal values], and D = 1 + sum over gold calls of (1 + number of parameters); J is the
    multiset Jaccard index. Each gold call, in order, is matched with the first best unused
    predicted call of the same name.

    Degenerate cases of the correctness:
    - A ground truth without a tool call gives 0.
    - Equal lists of calls give M.
    - Values compare with ==, so 1 == 1.0 == true, but "1" != 1.
    - Without any call it is -M, and also if one that stands there cannot be read. In `toolrl` that
      is a missing tag, or a line of the first block that is not a JSON object with a scalar name.
    - It is -M if the parameters of a predicted call are not an object and a gold call has the same
      name.

    The format is 1 for a thought, calls and a response, as far as the ground truth has them, in
    this order, with nothing else, and with each of their tags nowhere else. In `toolrl` it is
    ToolRL's pattern, to the character. In the other formats the thought ends at its first closing
    tag, each call may have its own block, and empty lines may stand between the blocks, where chat
    templates write them.

    Raises:
        TypeError: an option is unknown.
        ValueError: the ground truth is malformed, or an option has a bad value.

    Sources: ToolRL, arXiv 2504.13958; GDPO, arXiv 2601.05242.
    """
    bounds_of = bounds(max_correctness=max_correctness, call_format=call_format)
    highest = bounds_of["correctness"][1]
    calls_as = call_format_of(call_format)
    gold = form.parse_ground_truth(ground_truth)
    response = response.strip()
    has_layout = _has_layout(calls_as, response, ground_truth, closed_thought)
    correctness = 0.0
    if gold:
        correctness = 2 * highest * _share(response, gold, calls_as, notes) - highest
    return {"format": float(has_layout), "correctness": correctness}


def bounds(
    *, max_correctness: float = 3.0, call_format: str = TOOLRL
) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    if not 0 < max_correctness < math.inf:
        raise ValueError(f"tool_rl max_correctness: got {max_correctness}; expected finite and > 0")
    call_format_of(call_format)
    return {"format": (0.0, 1.0), "correctness": (-max_correctness, max_correctness)}


def _share(
    response: str, gold: list[form.Call], calls_as: CallFormat, notes: CallNotes | None
) -> float:
    """Return the share of the highest correctness, and note what cannot be read."""
    right_values: dict[str, dict[str, list[Any]]] = {}
    for call in gold:
        values = right_values.setdefault(call[form.NAME_KEY], {})
        for key, value in call[form.PARAMETERS_KEY].items():
            values.setdefault(key, []).append(value)
    read = calls_as.read(response, right_values)
    if read.unread:
        if notes is not None:
            notes.why = read.unread[0]
        return 0.0
    return form.share_of_best(read.calls, gold)


def _has_layout(
    calls_as: CallFormat, response: str, ground_truth: str, closed_thought: bool
) -> bool:
    """Return whether the stripped response has the ground truth's blocks, in order and once each.

    Args:
        closed_thought: whether the prompt has the thought, so that the response may have none.
    """
    if closed_thought:
        if form.THINK_OPEN in response or form.THINK_CLOSE in response:
            return False
        # Each layout begins with a thought, which is the empty one of the prompt.
        response = f"{form.THINK_OPEN}{form.THINK_CLOSE}\n{response}".strip()
    if calls_as.is_block is None:
        return _has_toolrl_layout(response, ground_truth)
    return _has_own_layout(calls_as.is_block, calls_as.tags, response, ground_truth)


def _has_toolrl_layout(response: str, ground_truth: str) -> bool:
    """Whether a response has ToolRL's pattern, and each tag of its calls and response once.

    The result is that of `^<think>.*?</think>\\n<tool_call>\\n.*?\\n</tool_call>$` with DOTALL, and
    of the patterns for the other blocks. These patterns are fixed pieces with any text between, so
    it is enough to find each piece at its first place. This takes linear time; the patterns do not.
    """
    pieces = [form.THINK_OPEN, form.THINK_CLOSE]
    tags: list[str] = []
    if form.TOOL_CALL_OPEN in ground_truth:
        pieces[-1] += f"\n{form.TOOL_CALL_OPEN}\n"
        pieces.append(f"\n{form.TOOL_CALL_CLOSE}")
        tags += form.CALL_TAGS
    if form.RESPONSE_OPEN in ground_truth:
        pieces[-1] += f"\n{form.RESPONSE_OPEN}"
        pieces.append(form.RESPONSE_CLOSE)
        tags += form.RESPONSE_TAGS

    last_piece = pieces.pop()
    if not (response.startswith(form.THINK_OPEN) and response.endswith(last_piece)):
        return False
    position = 0
    for piece in pieces:
        start = response.find(piece, position)
        if start < 0:
            return False
        position = start + len(piece)
    if position > len(response) - len(last_piece):
        return False
    return all(response.count(tag) == 1 for tag in tags)


def _has_own_layout(
    is_block: Callable[[str], bool], call_tags: Sequence[str], response: str, ground_truth: str
) -> bool:
    """Whether a response has the layout of a model with calls of its own format.

    White space may stand around blocks.
    """
    wants_calls = form.TOOL_CALL_OPEN in ground_truth
    wants_response = form.RESPONSE_OPEN in ground_truth
    thought, closing, answer = response.partition(form.THINK_CLOSE)
    if not (closing and thought.startswith(form.THINK_OPEN)):
        return False
    tags: list[str] = []
    if wants_calls:
        tags += call_tags
    if wants_response:
        tags += form.RESPONSE_TAGS
    if any(tag in thought for tag in tags):
        return False
    calls = answer
    if wants_response:
        calls, opening, rest = answer.partition(form.RESPONSE_OPEN)
        text, closing, after = rest.partition(form.RESPONSE_CLOSE)
        if not (opening and closing and _ends_above(calls)):
            return False
        if after or form.RESPONSE_OPEN in text:
            return False
    if not wants_calls:
        return not calls.strip()
    return _starts_below(calls) and is_block(calls)


def _starts_below(text: str) -> bool:
    """Whether what a text says begins on a line below."""
    white_space = text[: len(text) - len(text.lstrip())]
    return "\n" in white_space


def _ends_above(text: str) -> bool:
    """Whether what a text says ends on a line above."""
    white_space = text[len(text.rstrip()) :]
    return "\n" in white_space


def _good_response(ground_truth: str, *, call_format: str = TOOLRL) -> str:
    """ToolRL's ground truths have the form of a response; here, with the calls in a format."""
    calls = form.parse_ground_truth(ground_truth)
    if call_format == TOOLRL or not calls:
        return ground_truth
    before, _, rest = ground_truth.partition(form.TOOL_CALL_OPEN)
    _, _, after = rest.partition(form.TOOL_CALL_CLOSE)
    return before + call_format_of(call_format).write(calls) + after


TASK = Task(
    name="tool_rl",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("format", "correctness"),
    rows="verl_gdpo.tasks.tool_rl.rows",
    scores="response",  # its format asks for the thought too
    kept_tokens=form.CALL_TAGS + form.RESPONSE_TAGS,
    main_reward="correctness",
    good_response=_good_response,
    good_response_options=("call_format",),
    notes=CallNotes,
    system_prompt=None,  # each row lists its own tools; see `form.compact_system_prompt`
    verl_names={"accuracy_reward": "correctness", "format_reward": "format"},
)
