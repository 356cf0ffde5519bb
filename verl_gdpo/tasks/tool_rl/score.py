"""Tool calling in the ToolRL format: format, correctness and, on request, length rewards.

The format and its correctness score come from ToolRL (arXiv 2504.13958); GDPO (arXiv 2601.05242)
trains on the first two as separate rewards. Plain text in, plain floats out: no tensors, no
environment variables, no randomness, no state between calls.

The task's output contract (tags and JSON keys) is defined in `form.py`.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from verl_gdpo.tasks import Task
from verl_gdpo.tasks.tool_rl import DATA_SOURCES, form

Granularity = Literal["fine", "refined", "intermediate", "coarse"]
Schedule = Literal["constant", "linear", "two_stage"]
LengthSchedule = Literal["constant", "linear"]
CHOICES = {
    "granularity": get_args(Granularity),
    "schedule": get_args(Schedule),
    "length_schedule": get_args(LengthSchedule),
}

# Constants of ToolRL's released experiments.
LINEAR_SCHEDULE_STEPS = 150
TWO_STAGE_SWITCH_STEP = 30
# {length_schedule: (words at the start, more words each step)}
LENGTH_WORDS = {"constant": (512.0, 0.0), "linear": (384.0, (640 - 384) / 105)}


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    granularity: Granularity = "fine",
    max_correctness: float = 3.0,
    schedule: Schedule = "constant",
    length: bool = False,
    length_schedule: LengthSchedule = "constant",
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
        response_tokens: not used, because `length` counts words; every scorer has this argument.
        granularity: what correctness C compares. M is `max_correctness`, n counts the gold calls.
            "fine": C = 2 M s / D - M, s = J(names) + sum over matched pairs of [J(keys) + number of
            equal values], D = 1 + sum over gold calls of (1 + number of parameters); J is the
            multiset Jaccard index. "refined": the same, but J is 1 for lists equal in order or 0.
            "intermediate": a matched pair scores 1 if the two calls are equal, D = 1 + n.
            "coarse": M if all calls are equal in order, else -M. Each gold call, in order, is
            matched with the first best unused predicted call of the same name.
        max_correctness: M > 0, correctness is in [-M, M]; 3 in both papers, 1 in ToolRL's ablation.
        schedule: how the range of the rewards changes with t = `step`. "constant": format is 0 or
            1, M is `max_correctness`. "linear": format is min(-1, -2 + t/75) or max(1, 2 - t/150),
            and M moves from 2 at t = 0 to `max_correctness` at t = 150. "two_stage": format is 0 or
            1 and correctness uses M/3 while t < 30; then format is 0 or 0.5 and correctness uses M.
            Source: ToolRL's released code.
        length: if True, also return "length" = min(1, round(words in the last think block / target,
            2)), in [0, 1]. It is 0 if a think tag is missing. The target is 512 words.
        length_schedule: "linear" changes the target to 384 + 256 t/105 words, without a limit.
        step: training step t >= 0. It is only needed if a schedule is not "constant".

    Degenerate cases:
    - A ground truth without a tool call gives correctness 0.
    - Equal lists of calls give M under every granularity.
    - Values compare with ==, so 1 == 1.0 == true, but "1" != 1.
    - Correctness is -M if a tool-call tag is missing, or if a line of the first block is not a JSON
      object with a scalar name. With "fine" and "refined" it is also -M if the parameters of a
      predicted call are not an object and a gold call has the same name.

    Raises:
        TypeError: an option is unknown.
        ValueError: the ground truth is malformed, or an option has a bad value.

    Sources: ToolRL, arXiv 2504.13958 (all options); GDPO, arXiv 2601.05242.
    """
    chosen: dict[str, str] = {"granularity": granularity, "schedule": schedule}
    _check_options({**chosen, "length_schedule": length_schedule}, max_correctness, step)
    format_low, format_high, bound = _reward_ranges(schedule, step or 0, max_correctness)
    gold = form.parse_ground_truth(ground_truth)
    response = response.strip()

    scores = {"format": format_high if _has_layout(response, ground_truth) else format_low}
    scores["correctness"] = 0.0
    if gold:
        scores["correctness"] = 2 * bound * form.share_of_best(response, gold, granularity) - bound
    if length:
        scores["length"] = _length(response, length_schedule, step or 0)
    return scores


def bounds(**options: Any) -> dict[str, tuple[float, float]]:
    """Return {reward: (lowest, highest)} over all steps, for these options of `score`."""
    call = inspect.signature(score).bind("", "", **options, step=0)
    call.apply_defaults()
    chosen = call.arguments
    _check_options(chosen, chosen["max_correctness"], step=0)
    # between these steps, every range changes in one direction only
    steps = (0, TWO_STAGE_SWITCH_STEP, LINEAR_SCHEDULE_STEPS)
    ranges = [_reward_ranges(chosen["schedule"], t, chosen["max_correctness"]) for t in steps]
    lows, highs, correct = zip(*ranges, strict=True)
    result = {"format": (min(lows), max(highs)), "correctness": (-max(correct), max(correct))}
    return {**result, "length": (0.0, 1.0)} if chosen["length"] else result


def _check_options(chosen: Mapping[str, Any], max_correctness: float, step: int | None) -> None:
    """Raise ValueError if an option has a bad value."""
    for name, choices in CHOICES.items():
        if chosen[name] not in choices:
            raise ValueError(f"tool_rl {name}: got {chosen[name]!r}; expected one of {choices}")
    if not 0 < max_correctness < math.inf:
        raise ValueError(f"tool_rl max_correctness: got {max_correctness}; expected finite and > 0")
    schedules = {name: chosen[name] for name in ("schedule", "length_schedule")}
    if {*schedules.values()} != {"constant"} and (step is None or step < 0):
        because = ", ".join(f"{name}={value!r}" for name, value in schedules.items())
        raise ValueError(
            f"tool_rl step: got {step}; expected the training step, >= 0, because {because}"
        )


def _reward_ranges(schedule: str, step: int, bound: float) -> tuple[float, float, float]:
    """Return the value of a wrong format, the value of a right format, and correctness's bound."""
    if schedule == "linear":
        progress = min(step / LINEAR_SCHEDULE_STEPS, 1.0)
        # In ToolRL's code the lower end moves twice as fast as the upper end; we keep this.
        return min(-1.0, -2 + 2 * progress), 2 - progress, 2 + (bound - 2) * progress
    if schedule == "two_stage":
        return (0.0, 1.0, bound / 3) if step < TWO_STAGE_SWITCH_STEP else (0.0, 0.5, bound)
    return 0.0, 1.0, bound


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


def _length(response: str, length_schedule: str, step: int) -> float:
    if form.THINK_OPEN not in response or form.THINK_CLOSE not in response:
        return 0.0
    at_start, per_step = LENGTH_WORDS[length_schedule]
    thought = response.rpartition(form.THINK_OPEN)[2].partition(form.THINK_CLOSE)[0]
    return min(1.0, round(len(thought.split()) / (at_start + per_step * step), 2))


TASK = Task(
    name="tool_rl",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("format", "correctness", "length"),
    rows="verl_gdpo.tasks.tool_rl.rows",
    main_reward="correctness",
    good_response=str,  # ToolRL's ground truths have the form of a response
    system_prompt=None,  # each row lists its own tools; see `form.compact_system_prompt`
    verl_names={"accuracy_reward": "correctness", "format_reward": "format"},
    labels=form.labels,
)
