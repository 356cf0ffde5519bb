"""Tool calling in the ToolRL format: format, correctness and, on request, length rewards.

The format and its correctness score come from ToolRL (arXiv 2504.13958); GDPO (arXiv 2601.05242)
trains on the first two as separate rewards. Plain text in, plain floats out: no tensors, no
environment variables, no randomness, no state between calls.

The task's output contract (tags and JSON keys) is defined in `tool_rl_format.py`.
"""

import importlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from verl_gdpo.tasks.task import Task, check_texts
from verl_gdpo.tasks.tool_rl import DATA_SOURCES
from verl_gdpo.tasks.tool_rl import form as form
from verl_gdpo.tasks.tool_rl.form import NAME_KEY, PARAMETERS_KEY

Granularity = Literal["fine", "refined", "intermediate", "coarse"]
Matching = Literal["greedy", "optimal"]
Schedule = Literal["constant", "linear", "two_stage"]
LengthSchedule = Literal["constant", "linear"]
CHOICES = {
    "granularity": get_args(Granularity),
    "matching": get_args(Matching),
    "schedule": get_args(Schedule),
    "length_schedule": get_args(LengthSchedule),
}

# Constants of ToolRL's released experiments.
LINEAR_SCHEDULE_STEPS = 150
TWO_STAGE_SWITCH_STEP = 30
# {length_schedule: (words at the start, more words each step)}
LENGTH_WORDS = {"constant": (512.0, 0.0), "linear": (384.0, (640 - 384) / 105)}

_decode = json.JSONDecoder().decode  # faster than json.loads, which checks its options at each call

_Call = dict[str, Any]
_PairScores = list[dict[int, float]]  # per gold call: predicted index -> score of that pair


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    granularity: Granularity = "fine",
    matching: Matching = "greedy",
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
            "coarse": M if all calls are equal in order, else -M.
        matching: "greedy" gives each gold call, in order, the first best unused predicted call of
            the same name (the reference); "optimal" maximises the sum of pair scores (needs scipy).
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
        TypeError: an option is unknown, or a text is not a str.
        ValueError: the ground truth is malformed, or an option has a bad value.
        ImportError: matching="optimal" is set, and scipy is missing.

    Sources: ToolRL, arXiv 2504.13958 (all options but `matching`); GDPO, arXiv 2601.05242.
    """
    check_texts("tool_rl", response=response, ground_truth=ground_truth)
    chosen: dict[str, str] = {"granularity": granularity, "matching": matching}
    chosen |= {"schedule": schedule, "length_schedule": length_schedule}
    _check_options(chosen, max_correctness, step)
    total = _total_optimal() if matching == "optimal" else _total_greedy
    format_low, format_high, bound = _reward_ranges(schedule, step or 0, max_correctness)
    gold = _parse_ground_truth(ground_truth)
    response = response.strip()

    scores = {"format": format_high if _has_layout(response, ground_truth) else format_low}
    scores["correctness"] = 0.0
    if gold:
        scores["correctness"] = 2 * bound * _share(response, gold, granularity, total) - bound
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


def _parse_ground_truth(ground_truth: str) -> list[_Call]:
    """Return the gold calls, or [] without a tool-call block; raise ValueError if malformed."""
    for opening, closing in (form.CALL_TAGS, form.RESPONSE_TAGS):
        counts = ground_truth.count(opening), ground_truth.count(closing)
        if counts not in ((0, 0), (1, 1)):
            raise ValueError(
                f"tool_rl ground truth: got {counts[0]} {opening} and {counts[1]} {closing}; "
                f"expected one of each or none, also inside the think text: {ground_truth[:200]!r}"
            )
    if form.CALL_TAGS[0] not in ground_truth:
        return []
    lines = form.first_block_lines(ground_truth)
    return [_parse_gold_call(line, i, len(lines)) for i, line in enumerate(lines, 1)]


def _parse_gold_call(line: str, number: int, count: int) -> _Call:
    reason = ""
    try:
        call = _decode(line)
        if isinstance(call[NAME_KEY], str) and isinstance(call[PARAMETERS_KEY], dict):
            return dict(call)
    except (ValueError, RecursionError) as error:
        reason = f" ({error})"
    except (TypeError, KeyError):
        pass  # another value than an object, or one without these keys
    raise ValueError(
        f"tool_rl ground truth, tool_call line {number} of {count}: got {line[:200]!r}{reason}; "
        f'expected one JSON object with a string "{NAME_KEY}" and an object "{PARAMETERS_KEY}"'
    )


def _parse_response(response: str) -> list[_Call] | None:
    """Return the predicted calls, or None if one of them cannot be read."""
    if not all(tag in response for tag in form.CALL_TAGS):
        return None
    calls: list[_Call] = []
    for line in form.first_block_lines(response):
        try:
            call = _decode(line)
        except ValueError:  # also raised for an int with too many digits
            return None
        # Check each line at once, so that a long worthless block ends at its first line.
        if not isinstance(call, dict) or isinstance(call.get(NAME_KEY, {}), dict | list):
            return None
        calls.append(call)
    return calls


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


def _share(
    response: str, gold: list[_Call], granularity: str, total: Callable[[_PairScores], float]
) -> float:
    """Return the share of the highest correctness, in [0, 1]; 0 if calls cannot be compared.

    Args:
        total: function that sums the scores of the matched pairs.
    """
    try:
        predicted = _parse_response(response)
        if predicted is None:
            return 0.0
        if granularity == "coarse" or gold == predicted:
            return float(gold == predicted)
        pairs = _pair_scores(gold, predicted, granularity)
    except RecursionError:  # the JSON is nested too deep for Python
        return 0.0
    if pairs is None:
        return 0.0
    gold_names = [call[NAME_KEY] for call in gold]
    predicted_names = [call[NAME_KEY] for call in predicted]
    reached = _name_similarity(gold_names, predicted_names, granularity == "refined")
    reachable = 1 + len(gold)
    if granularity != "intermediate":
        reachable += sum(len(call[PARAMETERS_KEY]) for call in gold)
    return (reached + total(pairs)) / reachable


def _pair_scores(gold: list[_Call], predicted: list[_Call], granularity: str) -> _PairScores | None:
    """Score each gold call with each predicted call of its name; None if one cannot be compared."""
    places: dict[str, list[int]] = {call[NAME_KEY]: [] for call in gold}
    for i, call in enumerate(predicted):
        if call[NAME_KEY] in places:
            places[call[NAME_KEY]].append(i)
            if granularity != "intermediate" and not isinstance(call.get(PARAMETERS_KEY), dict):
                return None
    return [
        {i: _pair_score(call, predicted[i], granularity) for i in places[call[NAME_KEY]]}
        for call in gold
    ]


def _pair_score(gold: _Call, predicted: _Call, granularity: str) -> float:
    if granularity == "intermediate":
        return float(gold == predicted)
    wanted, given = gold[PARAMETERS_KEY], predicted[PARAMETERS_KEY]
    shared = [key for key in wanted if key in given]
    keys = _jaccard(len(shared), len(wanted), len(given))
    if granularity == "refined":
        keys = float(list(wanted) == list(given))
    return keys + len([key for key in shared if given[key] == wanted[key]])


def _name_similarity(gold: list[str], predicted: list[Any], in_order: bool) -> float:
    if in_order or gold == predicted:
        return float(gold == predicted)
    # gold names are texts; other names of a response could slow this down with colliding hashes
    common = Counter(gold) & Counter(name for name in predicted if isinstance(name, str))
    return _jaccard(common.total(), len(gold), len(predicted))


def _jaccard(common: int, size: int, other_size: int) -> float:
    """Return the Jaccard index of two multisets, given their sizes; 1 if both are empty."""
    union = size + other_size - common
    return common / union if union else 1.0


def _total_greedy(pairs: _PairScores) -> float:
    """Sum each gold call's best unused pair, in order; a pair with score 0 uses no call."""
    total, used = 0.0, set()
    for row in pairs:
        best, best_score = -1, 0.0
        for i, pair_score in row.items():
            if pair_score > best_score and i not in used:
                best, best_score = i, pair_score
        used.add(best)
        total += best_score
    return total


def _total_optimal() -> Callable[[_PairScores], float]:
    """Return a function that computes the largest sum over all one-to-one assignments."""
    try:
        solve = importlib.import_module("scipy.optimize").linear_sum_assignment
    except ImportError as error:
        raise ImportError(
            "tool_rl matching='optimal' needs scipy, which cannot be imported: "
            "pip install 'verl-gdpo[optimal-matching]', or use matching='greedy'"
        ) from error

    def total(pairs: _PairScores) -> float:
        columns = sorted({i for row in pairs for i in row})
        table = [[row.get(i, 0.0) for i in columns] for row in pairs]
        rows, chosen = solve(table, maximize=True)
        return float(sum(table[r][c] for r, c in zip(rows, chosen, strict=True)))

    return total


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
    system_prompt=None,  # each row lists its own tools; see `tool_rl_format.system_prompt`
    verl_names={"accuracy_reward": "correctness", "format_reward": "format"},
    labels=form.labels,
)
