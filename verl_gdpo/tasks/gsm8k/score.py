r"""Grade-school maths (GSM8K) with three rewards: format, correctness, integer.

    <think>48 / 2 = 24, and 48 + 24 = 72.</think>
    <answer>72</answer>

The rewards of GDPO's experiment on GSM8K (arXiv 2601.05242): is the layout right, is the answer
the gold one, and is it a number in digits alone? Plain text in, plain floats out.
"""

import re

from verl_gdpo.tasks import Task
from verl_gdpo.tasks.gsm8k import DATA_SOURCES

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)
GOLD_MARK = "####"  # stands before the result in GSM8K's worked solutions

_SIGN = r"(?P<sign>[+-]?)"
_DIGITS = r"(?P<digits>\d+|\d{1,3}(?:,\d{3})+)"
# 109200000, 109,200,000 or -7
_WHOLE_NUMBER = re.compile(rf"{_SIGN}{_DIGITS}", re.ASCII)
# the same as $7 or 7%, or at the end of a sentence
_AS_WRITTEN = re.compile(rf"{_SIGN}(?:\\?\$ ?)?{_DIGITS}(?: ?\\?%)?\.?", re.ASCII)


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    step: int | None = None,
    closed_thought: bool = False,
    normalize_numbers: bool = False,
) -> dict[str, float]:
    r"""Score one response against the result of one problem; every value is 0 or 1.

    >>> score("<think>24 + 48</think>\n<answer>72</answer>", "72")
    {'format': 1.0, 'correctness': 1.0, 'integer': 1.0}
    >>> score("<answer>1,080</answer>", "1,080")
    {'format': 0.0, 'correctness': 1.0, 'integer': 0.0}
    >>> score("<answer>1080</answer>", "1,080", normalize_numbers=True)
    {'format': 0.0, 'correctness': 1.0, 'integer': 1.0}

    The answer is the text after the last `<answer>`, up to the next `</answer>`, without white
    space around it. Where a tag is missing, the text reaches to that end of the response.

    Args:
        response: decoded text without special tokens. No string raises.
        ground_truth: the result, as it stands after "####" in GSM8K: "72", "1,080", "-7".
        response_tokens: part of every scorer's signature; unused.
        step: the same.
        closed_thought: whether the prompt has closed the thought. The format is then the block of
            the answer alone.
        normalize_numbers: False, the reference: correctness compares texts, and integer asks
            `str.isdigit()`, so that no answer to "1,080" or "-7" has both. True: signs and commas
            between thousands are read; 1080, 1,080 and +1080 are one number, and an integer. $1080,
            1080% and 1080. are the same number, and no integer.

    Returns:
        format: 1 for `<think>...</think>`, a new line and `<answer>...</answer>`, with nothing
            around them but one line end, and no other answer tag. correctness: 1 if the answer is
            the gold one. integer: 1 if it is a whole number.

    Raises:
        ValueError: a ground truth that no answer can equal.

    Source: GDPO, arXiv 2601.05242.
    """
    _check_ground_truth(ground_truth)
    _, _, after_opening = response.rpartition(ANSWER_OPEN)
    before_closing, _, _ = after_opening.partition(ANSWER_CLOSE)
    answer = before_closing.strip()
    if normalize_numbers:
        is_correct = _plain_digits(answer) == _plain_digits(ground_truth)
        is_integer = _WHOLE_NUMBER.fullmatch(answer) is not None
    else:
        is_correct = answer == ground_truth
        is_integer = answer.isdigit()
    return {
        "format": float(_has_layout(response, closed_thought)),
        "correctness": float(is_correct),
        "integer": float(is_integer),
    }


def bounds(*, normalize_numbers: bool = False) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward."""
    return dict.fromkeys(("format", "correctness", "integer"), (0.0, 1.0))


def _has_layout(response: str, closed_thought: bool) -> bool:
    r"""Whether `^<think>.*?</think>\n<answer>.*?</answer>$` matches, with one pair of answer tags.

    With a closed thought, the pattern is `^<answer>.*?</answer>$`.

    Finding the pieces is linear in the response, which the pattern is not. Its `$` also stands
    before a line end. Looking from the end is Python's fastest way through a long thought.
    """
    if closed_thought:
        # Templates end the prompt with an empty thought, which may lack its last line ends.
        response = f"{THINK_OPEN}{THINK_CLOSE}\n{response.lstrip()}"
        if response.count(THINK_CLOSE) > 1:
            return False
    before, _, after = response.removesuffix("\n").rpartition(ANSWER_OPEN)
    return (
        before.startswith(THINK_OPEN)
        and before.endswith(f"{THINK_CLOSE}\n")
        and after.endswith(ANSWER_CLOSE)
        and after.count(ANSWER_CLOSE) == 1
        and before.rfind(ANSWER_OPEN) < 0
        and before.rfind(ANSWER_CLOSE) < 0
    )


def _plain_digits(text: str) -> str:
    """A whole number in one spelling; any other text as it is."""
    number = _AS_WRITTEN.fullmatch(text)
    if number is None:
        return text
    # It stays a text, because Python makes no int of thousands of digits.
    digits = number["digits"].replace(",", "").lstrip("0")
    if digits == "":
        return "0"
    if number["sign"] == "-":
        return f"-{digits}"
    return digits


def _check_ground_truth(text: object) -> None:
    is_stripped = isinstance(text, str) and text != "" and text == text.strip()
    marks = (*TAGS, GOLD_MARK, "\n")
    if not is_stripped or any(mark in str(text) for mark in marks):
        raise ValueError(
            f"gsm8k ground truth: got {repr(text)[-200:]}; expected what stands after "
            f"{GOLD_MARK!r}, on one line, without white space around it and without tags"
        )


def _good_response(ground_truth: str) -> str:
    return f"{THINK_OPEN} Step by step. {THINK_CLOSE}\n{ANSWER_OPEN}{ground_truth}{ANSWER_CLOSE}"


TASK = Task(
    name="gsm8k",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("format", "correctness", "integer"),
    rows="verl_gdpo.tasks.gsm8k.rows",
    scores="response",  # its format asks for the thought too
    kept_tokens=(ANSWER_OPEN, ANSWER_CLOSE),
    main_reward="correctness",
    good_response=_good_response,
    system_prompt=f"""\
Solve the problem step by step. The result is an integer; write it in digits alone, like this:
{THINK_OPEN} your steps {THINK_CLOSE}
{ANSWER_OPEN}your result{ANSWER_CLOSE}""",
)
