"""The format of a ToolRL answer: its tags, its JSON keys, the system prompt that asks for it; and
its calls, with how near they come to those of the ground truth.

The scorer, data preparation and the warm start of the CPU policy all import this module, so that
prompt, ground truths and parser cannot disagree. `score.py` turns the nearness into the reward
`correctness`, and explains it there. Ground truths have this format, whichever format the calls of
a response have: `call_formats.py` reads those.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<response>", "</response>"
NAME_KEY, PARAMETERS_KEY = "name", "parameters"

COMPACT_HEADING = "Tools:\n"  # of a synthetic row's system message

CALL_TAGS = (TOOL_CALL_OPEN, TOOL_CALL_CLOSE)
RESPONSE_TAGS = (RESPONSE_OPEN, RESPONSE_CLOSE)

_decode = json.JSONDecoder().decode  # faster than json.loads, which checks its options at each call

Call = dict[str, Any]


def render_answer(
    thought: str, calls: Sequence[Mapping[str, Any]] = (), response_text: str | None = None
) -> str:
    r"""Return an answer in the format: a think block, then a block of calls, a response, or both.

    >>> render_answer("x", [{"name": "f", "parameters": {"a": 1}}])
    '<think> x </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    >>> render_answer("x", response_text="Hi.")
    '<think> x </think>\n<response> Hi. </response>'

    Args:
        thought: text of the think block.
        calls: objects with a string "name" and an object "parameters". If it is empty, the answer
            has no block of calls.
        response_text: text of the response block. With None, the answer has no such block.
    """
    blocks = [f"{THINK_OPEN} {thought} {THINK_CLOSE}"]
    if calls:
        lines = "\n".join(map(as_json, calls))
        blocks.append(f"{TOOL_CALL_OPEN}\n{lines}\n{TOOL_CALL_CLOSE}")
    if response_text is not None:
        blocks.append(f"{RESPONSE_OPEN} {response_text} {RESPONSE_CLOSE}")
    return "\n".join(blocks)


def as_json(value: Any) -> str:
    """Return JSON on one line, as the templates of models write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def compact_system_prompt(tools: Mapping[str, Mapping[str, str]]) -> str:
    r"""Return {tool: {parameter: type}}, one short line each, for a model trained on the format.

    >>> compact_system_prompt({"f": {"a": "integer"}})
    'Tools:\nf {"a": "integer"}'
    """
    lines = [f"{name} {as_json(types)}" for name, types in tools.items()]
    return COMPACT_HEADING + "\n".join(lines)


def first_block_lines(text: str) -> list[str]:
    """Return the lines of the first tool-call block, up to a closing or a second opening tag."""
    block = text.split(TOOL_CALL_OPEN, 2)[1].split(TOOL_CALL_CLOSE, 1)[0]
    # splitlines() would also cut at characters such as U+2028, which JSON allows in a string.
    return block.strip().split("\n")


def parse_ground_truth(ground_truth: str) -> list[Call]:
    """Return the gold calls, or [] without a tool-call block; raise ValueError if malformed."""
    if not isinstance(ground_truth, str):
        raise ValueError(f"tool_rl ground truth: got {ground_truth!r}; expected an answer")
    for opening, closing in (CALL_TAGS, RESPONSE_TAGS):
        opened = ground_truth.count(opening)
        closed = ground_truth.count(closing)
        if opened > 1 or opened != closed:
            raise ValueError(
                f"tool_rl ground truth: got {opened} {opening} and {closed} {closing}; "
                f"expected one of each or none, also inside the think text: {ground_truth[:200]!r}"
            )
    if TOOL_CALL_OPEN not in ground_truth:
        return []
    lines = first_block_lines(ground_truth)
    calls = []
    for number, line in enumerate(lines, 1):
        calls.append(_parse_gold_call(line, number, len(lines)))
    return calls


def _parse_gold_call(line: str, number: int, count: int) -> Call:
    call: Any = None
    reason = ""
    try:
        call = _decode(line)
    except (ValueError, RecursionError) as error:
        reason = f" ({error})"
    if isinstance(call, dict):
        is_named = isinstance(call.get(NAME_KEY), str)
        if is_named and isinstance(call.get(PARAMETERS_KEY), dict):
            return call
    raise ValueError(
        f"tool_rl ground truth, tool_call line {number} of {count}: got {line[:200]!r}{reason}; "
        f'expected one JSON object with a string "{NAME_KEY}" and an object "{PARAMETERS_KEY}"'
    )


def share_of_best(predicted: list[Call], gold: list[Call]) -> float:
    """Return the share of the highest correctness, in [0, 1]; 0 if calls cannot be compared.

    It is s / D of the equation in `score.score`.

    Args:
        predicted: calls whose name may be any value of JSON but a list or an object, and whose
            parameters may be any value or missing.
        gold: see `parse_ground_truth`; at least one.
    """
    try:
        if gold == predicted:
            return 1.0
        return _share_of_pairs(predicted, gold)
    except RecursionError:  # the JSON is nested too deep for Python
        return 0.0


def _share_of_pairs(predicted: list[Call], gold: list[Call]) -> float:
    # {name of a gold call: the parameters of each predicted call of this name}
    unused: dict[str, list[Any]] = {call[NAME_KEY]: [] for call in gold}
    for call in predicted:
        if call[NAME_KEY] in unused:
            unused[call[NAME_KEY]].append(call.get(PARAMETERS_KEY))
    for of_name in unused.values():
        if not all(isinstance(parameters, dict) for parameters in of_name):
            return 0.0

    gold_counts = Counter(call[NAME_KEY] for call in gold)
    common = sum(min(gold_counts[name], len(of_name)) for name, of_name in unused.items())
    nearness_of_names = _jaccard(common, len(gold), len(predicted))
    nearness_of_pairs = sum(
        _take_best(call[PARAMETERS_KEY], unused[call[NAME_KEY]]) for call in gold
    )
    highest = 1 + sum(1 + len(call[PARAMETERS_KEY]) for call in gold)
    return (nearness_of_names + nearness_of_pairs) / highest


def _take_best(wanted: Mapping[str, Any], unused: list[Any]) -> float:
    """Take the parameters that score best, the first of them, and return their score; 0 takes none.

    The score is the nearness of the keys, and the number of equal values.
    """
    scores = []
    for parameters in unused:
        shared = [key for key in wanted if key in parameters]
        equal = sum(parameters[key] == wanted[key] for key in shared)
        nearness_of_keys = _jaccard(len(shared), len(wanted), len(parameters))
        scores.append(nearness_of_keys + equal)
    best = max(scores, default=0.0)
    if best > 0:
        del unused[scores.index(best)]
    return best


def _jaccard(common: int, size: int, other_size: int) -> float:
    """Return the Jaccard index of two multisets, given their sizes; 1 if both are empty."""
    union = size + other_size - common
    if union == 0:
        return 1.0
    return common / union
