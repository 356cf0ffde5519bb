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
LIMIT_CPU_S, LIMIT_BYTES = 3.0, 4 << 30  # of a comparison; most take milliseconds
# reward workers are many processes already: verl starts 8
_pool = LimitedPool(str(Path(__file__).with_name("inside.py")), LIMIT_CPU_S, LIMIT_BYTES)
# longer ones are no answers: the longest gold of MATH, AIME, AMC, Minerva and OlympiadBench has 204
MAX_ANSWER_CHARS = 1000
SPACE = r"(?:\\[,;: ]|\\thinspace(?![A-Za-z])|\{(?:\\[,;: ]| )\}|~|[^\S\n])"
GROUPED = re.compile(rf"[1-9]\d{{0,2}}(?:{SPACE}+\d{{3}})+(?:\.\d+)?")
# numbers side by side; TeX takes single digits of the others, as in \log_2 16 and \frac 3 8
SIDE_BY_SIDE = re.compile(
    r"(?:[_^]|\\sqrt)\s*\d|\\(?:[dtc]?frac|[dt]?binom)\s*\d\s*\d"
    rf"|(?<!\d)(?<!\d[.,])(?P<numbers>\d+(?:[.,]\d+)*(?:{SPACE}+\d+(?:[.,]\d+)*)+)"
)

PERCENT = re.compile(rf"(?:{SPACE})*(?:\\?%|\\text\{{\s*percent\s*\}}|\bpercent\b)")
DEGREE = re.compile(r"\^\s*\{?\\(?:circ|degree)\b\}?|\\degree\b|°")
UNIT = re.compile(rf"{DEGREE.pattern}|\\(?:text|mathrm|mbox|\$)|[\d}}]\s*[A-Za-z]{{2,}}(?:\^\S+)?$")
# math-verify takes the other units away
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
    return {
        "correctness": float(answer is not None and _is_right(answer, ground_truth)),
        "length": float(response_tokens <= limit_tokens),
    }


def bounds(*, limit_tokens: int = LIMIT_TOKENS) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    return dict.fromkeys(("correctness", "length"), (0.0, 1.0))


def _check(ground_truth: str, limit_tokens: int) -> None:
    """What can be seen without math-verify, so that every row can be checked before training."""
    try:
        missing()
    except OSError as error:
        raise ValueError(str(error)) from None
    if limit_tokens < 1:
        raise ValueError(f"math_length limit_tokens: got {limit_tokens}; expected at least 1")
    text = ground_truth if isinstance(ground_truth, str) else ""
    is_answer = text == text.strip() and 0 < len(text) <= MAX_ANSWER_CHARS and BOX not in text
    if not is_answer or _end_of_group(text + "}") != len(text):
        raise ValueError(
            f"math_length ground truth: got {repr(ground_truth)[:200]}; expected an answer "
            f"without {BOX}}}, of 1 to {MAX_ANSWER_CHARS} characters, with every brace closed and "
            "no space around it"
        )
    if has_split_number(text):
        raise ValueError(
            f"math_length ground truth: got {text[:200]!r}; expected no numbers side by side. "
            "Join them if they are one number; put a comma between them if they are two"
        )


def joined(text: str) -> str:
    r"""The text with thousands in one piece, which math-verify takes for factors.

    >>> joined(r"\frac{10\,000}{3} \text{ or } 5 000")
    '\\frac{10000}{3} \\text{ or } 5000'
    """

    def join(match: re.Match[str]) -> str:
        is_one = GROUPED.fullmatch(match["numbers"] or "")
        return re.sub(SPACE, "", match[0]) if is_one else match[0]

    return SIDE_BY_SIDE.sub(join, text)


def without_marks(text: str) -> str:
    r"""The text without what one writes and another leaves out: percent, degree, unit, final dot.

    >>> [without_marks(text) for text in (r"50\,\%", "1{,}080°", "7 cm^2", r"5~\text{m}.")]
    ['50', '1{,}080', '7', '5 \\text{m}']
    """
    plain = text.replace("~", " ").strip()
    plain = re.sub(r"(?<!\.)\s*\.$", "", plain).removeprefix("\\approx").strip()
    return BARE_UNIT.sub("", DEGREE.sub("", PERCENT.sub("", plain))) or text


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
    rest = rest[: MAX_ANSWER_CHARS + 1]
    end = _end_of_group(rest) if box else None
    return None if end is None else rest[:end].strip()


def _end_of_group(text: str) -> int | None:
    """Where the brace closes that was opened before `text`; None if it does not."""
    depth = 1
    for brace in re.finditer(r"\\.|([{}])", text, re.DOTALL):  # \{ and \} are no group
        depth += {"{": 1, "}": -1}.get(brace[1], 0)
        if depth == 0:
            return brace.start()
    return None


def _is_right(answer: str, ground_truth: str) -> bool:
    return answer == ground_truth or (
        answer != "" and are_equal(joined(answer), joined(ground_truth))
    )


def are_equal(answer: str, ground_truth: str) -> bool:
    """Whether math-verify takes both for the same, `without_marks`; called from any thread.

    A percentage is also the number alone, but no length, angle or amount of money.

    Raises:
        ValueError: the ground truth cannot be read, or needs too long or too much memory.
        OSError: no process can be started, or two in a row die of something else.
    """
    percents = [bool(PERCENT.search(text)) for text in (answer, ground_truth)]
    if percents[0] != percents[1] and UNIT.search(ground_truth if percents[0] else answer):
        return False
    pair = json.dumps([without_marks(ground_truth), without_marks(answer)])
    for _ in range(2):  # a process may have stood still for too long, or be full of other answers
        replies, is_whole = _pool.ask(pair, "comparing with math-verify")
        if replies[:1] == [True]:  # the ground truth is read
            return is_whole and bool(replies[-1])
    raise ValueError(
        f"math_length ground truth: got {ground_truth[:200]!r}, which math-verify cannot read "
        f"within {LIMIT_CPU_S:g} s and {LIMIT_BYTES >> 30} GiB; expected LaTeX or text"
    )


def _good_response(ground_truth: str) -> str:
    # of several lengths, so that a policy that learns from them has something to shorten
    thoughts = "Let me check. " * (zlib.crc32(ground_truth.encode()) % 8)
    return f"{thoughts}The answer is {BOX}{ground_truth}}}."


TASK = Task(
    name="math_length",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("correctness", "length"),
    rows="verl_gdpo.tasks.math_length.rows",
    scores="answer",  # a box within a thought is a guess
    main_reward="correctness",
    good_response=_good_response,
    missing=missing,
    system_prompt=None,  # the reasoning models want none; `INSTRUCTION` follows the problem
    evaluation=Evaluation(
        {
            "accuracy": lambda rewards: rewards["correctness"],
            "above the limit": lambda rewards: 1 - rewards["length"],
        },
        max_tokens=8000,  # as in the paper's training
    ),
)
