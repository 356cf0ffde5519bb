r"""Competition maths with a length limit: correctness and length.

    ... so the sum is \boxed{\frac{14}{3}}.

The rewards of GDPO's experiment on DeepScaleR (arXiv 2601.05242): does the boxed answer equal the
gold one, as `math-verify` sees it, and has the response at most 4,000 tokens? The comparison runs
in processes of its own, whose program is `inside.py`.
"""

import importlib.util
import json
import re
import zlib
from functools import cache
from pathlib import Path

from verl_gdpo.tasks import Evaluation, Task
from verl_gdpo.tasks.math_length import DATA_SOURCES
from verl_gdpo.tasks.sandbox.limited_pool import LimitedPool
from verl_gdpo.terminal import install_line

BOX = "\\boxed{"
INSTRUCTION = f"Let's think step by step and put the final answer within {BOX}}}."
LIMIT_TOKENS = 4000
# The limits of a comparison. Most take milliseconds.
LIMIT_CPU_S = 3.0
LIMIT_BYTES = 4 << 30
# It has few processes, because reward workers are many already: verl starts 8.
_pool = LimitedPool(str(Path(__file__).with_name("inside.py")), LIMIT_CPU_S, LIMIT_BYTES)
# Longer texts are no answers: the longest gold of MATH, AIME, AMC, Minerva and OlympiadBench has
# 204 characters.
MAX_ANSWER_CHARS = 1000
SPACE = r"(?:\\[,;: ]|\\thinspace(?![A-Za-z])|\{(?:\\[,;: ]| )\}|~|[^\S\n])"
GROUPED = re.compile(rf"[1-9]\d{{0,2}}(?:{SPACE}+\d{{3}})+(?:\.\d+)?")
# The group `numbers` has numbers side by side. The other forms stand before it because TeX takes
# single digits of them, as in \log_2 16 and \frac 3 8.
SIDE_BY_SIDE = re.compile(
    r"(?:[_^]|\\sqrt)\s*\d|\\(?:[dtc]?frac|[dt]?binom)\s*\d\s*\d"
    rf"|(?<!\d)(?<!\d[.,])(?P<numbers>\d+(?:[.,]\d+)*(?:{SPACE}+\d+(?:[.,]\d+)*)+)"
)

PERCENT = re.compile(rf"(?:{SPACE})*(?:\\?%|\\text\{{\s*percent\s*\}}|\bpercent\b)")
DEGREE = re.compile(r"\^\s*\{?\\(?:circ|degree)\b\}?|\\degree\b|°")
UNIT = re.compile(rf"{DEGREE.pattern}|\\(?:text|mathrm|mbox|\$)|[\d}}]\s*[A-Za-z]{{2,}}(?:\^\S+)?$")
# math-verify itself takes the other units away.
BARE_UNIT = re.compile(
    r"(?<=[\d}])\s+(?:square |cubic )?(?:dollars?|units?|[ckm]m|[a-z]*met(?:er|re)s?)(?:\^\S+)?$"
)


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    step: int | None = None,
    limit_tokens: int = LIMIT_TOKENS,
) -> dict[str, float]:
    r"""Score one response against the answer of one problem; both values are 0 or 1.

    >>> score(r"So it is \boxed{7}.", "7", response_tokens=9)
    {'correctness': 1.0, 'length': 1.0}

    Args:
        response: decoded text without special tokens. No string raises. Its answer is what stands
            in its last `\boxed{}`.
        ground_truth: the gold answer without the box: "7", "\frac{14}{3}", "(3, \pi)".
        response_tokens: the length of the response.
        step: part of every scorer's signature; unused.
        limit_tokens: the longest response whose length reward is 1.

    Returns:
        correctness: 1 if the texts of both answers are equal, or what they stand for is, with
            `joined` thousands and `without_marks`; 0 too for an answer that math-verify cannot
            read, or needs more than `LIMIT_CPU_S` seconds or `LIMIT_BYTES` of memory for.
        length: 1 for at most `limit_tokens` tokens. To make it count for right answers alone, set
            `algorithm.gdpo.rewards.length.when`.

    Raises:
        TypeError: no `response_tokens`.
        ValueError: a ground truth that is no answer; a bad option; math-verify is not installed.
        OSError: a process that compares answers cannot be started, or keeps dying.

    Source: GDPO, arXiv 2601.05242.
    """
    if not isinstance(response_tokens, int):
        got = type(response_tokens).__name__
        raise TypeError(f"math_length response_tokens: got {got}; expected int")
    _check(ground_truth, limit_tokens)
    answer = _last_boxed(response)
    is_right = answer is not None and _is_right(answer, ground_truth)
    is_short = response_tokens <= limit_tokens
    return {"correctness": float(is_right), "length": float(is_short)}


def bounds(*, limit_tokens: int = LIMIT_TOKENS) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    return {"correctness": (0.0, 1.0), "length": (0.0, 1.0)}


def _check(ground_truth: str, limit_tokens: int) -> None:
    """Raise ValueError for what can be seen to be bad without a process of math-verify.

    It takes little time, so that every row can be checked before training.
    """
    try:
        missing()
    except OSError as error:
        raise ValueError(str(error)) from None
    if limit_tokens < 1:
        raise ValueError(f"math_length limit_tokens: got {limit_tokens}; expected at least 1")
    if not _is_answer(ground_truth):
        raise ValueError(
            f"math_length ground truth: got {repr(ground_truth)[:200]}; expected an answer "
            f"without {BOX}}}, of 1 to {MAX_ANSWER_CHARS} characters, with every brace closed and "
            "no space around it"
        )
    if has_split_number(ground_truth):
        raise ValueError(
            f"math_length ground truth: got {ground_truth[:200]!r}; expected no numbers side by "
            "side. Join them if they are one number; put a comma between them if they are two"
        )


def _is_answer(value: object) -> bool:
    """Whether a ground truth has the form of an answer, which could stand in a box."""
    if not isinstance(value, str) or value != value.strip() or BOX in value:
        return False
    if not 0 < len(value) <= MAX_ANSWER_CHARS:
        return False
    return _end_of_group(value + "}") == len(value)


def joined(text: str) -> str:
    r"""The text with thousands in one piece, which math-verify takes for factors.

    >>> joined(r"\frac{10\,000}{3} \text{ or } 5 000")
    '\\frac{10000}{3} \\text{ or } 5000'
    """

    def join(match: re.Match[str]) -> str:
        # Without the group `numbers`, it is another form, such as \frac 3 8.
        numbers = match["numbers"] or ""
        if GROUPED.fullmatch(numbers):
            return re.sub(SPACE, "", numbers)
        return match[0]

    return SIDE_BY_SIDE.sub(join, text)


def without_marks(text: str) -> str:
    r"""The text without what one writes and another leaves out: percent, degree, unit, final dot.

    >>> [without_marks(text) for text in (r"50\,\%", "1{,}080°", "7 cm^2", r"5~\text{m}.")]
    ['50', '1{,}080', '7', '5 \\text{m}']
    """
    plain = text.replace("~", " ").strip()
    plain = re.sub(r"(?<!\.)\s*\.$", "", plain).removeprefix("\\approx").strip()
    for mark in (PERCENT, DEGREE, BARE_UNIT):
        plain = mark.sub("", plain)
    # An answer that is nothing but marks stays as it is.
    return plain or text


def has_split_number(text: str) -> bool:
    """Whether numbers stand side by side that may be one, two, or a factor each: `12 34`."""
    return any(match["numbers"] for match in SIDE_BY_SIDE.finditer(joined(text)))


def missing(**_options: object) -> tuple[str, ...]:
    """Return nothing; raise OSError where math-verify is not installed."""
    if not _has_math_verify():
        raise OSError(
            "the task math_length needs math-verify, which is not installed: "
            f"{install_line('math')} on every node"
        )
    return ()


@cache
def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _last_boxed(response: str) -> str | None:
    r"""What stands in the last `\boxed{}`; None without one, or if it is too long.

    >>> _last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    _, box, rest = response.rpartition(BOX)
    if not box:
        return None
    # One character more than an answer has, for the brace that closes the box.
    rest = rest[: MAX_ANSWER_CHARS + 1]
    end = _end_of_group(rest)
    if end is None:
        return None
    return rest[:end].strip()


def _end_of_group(text: str) -> int | None:
    r"""Where the brace closes that was opened before `text`; None if it does not.

    \{ and \} are no group, so a character after a backslash is skipped.
    """
    depth = 1
    for match in re.finditer(r"\\.|([{}])", text, re.DOTALL):
        brace = match[1]
        if brace == "{":
            depth += 1
        elif brace == "}":
            depth -= 1
        if depth == 0:
            return match.start()
    return None


def _is_right(answer: str, ground_truth: str) -> bool:
    if answer == ground_truth:
        return True
    if answer == "":
        return False
    return are_equal(joined(answer), joined(ground_truth))


def are_equal(answer: str, ground_truth: str) -> bool:
    """Whether math-verify takes both for the same, `without_marks`; called from any thread.

    A percentage is also the number alone, but no length, angle or amount of money.

    Raises:
        ValueError: the ground truth cannot be read, or needs too long or too much memory.
        OSError: no process can be started, or two in a row die of something else.
    """
    if _is_percentage_against_unit(answer, ground_truth):
        return False
    if _is_percentage_against_unit(ground_truth, answer):
        return False
    pair = json.dumps([without_marks(ground_truth), without_marks(answer)])
    # A process may have stood still for too long, or be full of other answers, so it has two tries.
    for _ in range(2):
        replies, is_whole = _pool.ask(pair, "comparing with math-verify")
        # The first reply is True once the ground truth is read. Then only the answer can be bad.
        if replies[:1] == [True]:
            return is_whole and bool(replies[-1])
    raise ValueError(
        f"math_length ground truth: got {ground_truth[:200]!r}, which math-verify cannot read "
        f"within {LIMIT_CPU_S:g} s and {LIMIT_BYTES >> 30} GiB; expected LaTeX or text"
    )


def _is_percentage_against_unit(text: str, other: str) -> bool:
    """Whether a text is a percentage, and the other one is none and has a unit."""
    if not PERCENT.search(text) or PERCENT.search(other):
        return False
    return UNIT.search(other) is not None


def _good_response(ground_truth: str) -> str:
    # They have several lengths, so that a policy that learns from them has something to shorten.
    thoughts = "Let me check. " * (zlib.crc32(ground_truth.encode()) % 8)
    return f"{thoughts}The answer is {BOX}{ground_truth}}}."


TASK = Task(
    name="math_length",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("correctness", "length"),
    rows="verl_gdpo.tasks.math_length.rows",
    scores="answer",  # A box within a thought is a guess.
    main_reward="correctness",
    good_response=_good_response,
    missing=missing,
    system_prompt=None,  # The reasoning models want none; `INSTRUCTION` follows the problem.
    evaluation=Evaluation(
        columns={
            "accuracy": lambda rewards: rewards["correctness"],
            "above the limit": lambda rewards: 1 - rewards["length"],
        },
        max_tokens=8000,  # As in the paper's training.
    ),
)
