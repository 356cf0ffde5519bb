"""The GSM8K scorer: reference semantics, numbers with commas and signs, hostile answers."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_gdpo.tasks.gsm8k.score import TASK, score

THOUGHT = "<think>Work it out.</think>\n"

# response, gold, (format, correctness, integer), why
GOLDEN = [
    (f"{THOUGHT}<answer>72</answer>", "72", (1, 1, 1), "right"),
    (f"{THOUGHT}<answer>72</answer>\n", "72", (1, 1, 1), "$ stands before one line end"),
    (f"{THOUGHT}<answer>72</answer>\n\n", "72", (0, 1, 1), "but not before two"),
    (f" {THOUGHT}<answer>72</answer>", "72", (0, 1, 1), "the layout is of the unstripped text"),
    (f"{THOUGHT}<answer> 72\n</answer>", "72", (1, 1, 1), "the answer is stripped"),
    (f"{THOUGHT}<answer>73</answer>", "72", (1, 0, 1), "wrong"),
    (f"{THOUGHT}<answer>$72</answer>", "72", (1, 0, 0), "a unit"),
    (f"{THOUGHT}<answer>72.0</answer>", "72", (1, 0, 0), "texts are compared"),
    (f"{THOUGHT}<answer>٧٢</answer>", "72", (1, 0, 1), "isdigit() holds for every script"),
    (f"{THOUGHT}<answer></answer>", "72", (1, 0, 0), "empty"),
    (f"{THOUGHT}<answer>1</answer>\n<answer>72</answer>", "72", (0, 1, 1), "the last one counts"),
    (f"{THOUGHT}<answer>72</answer>\n<answer>1</answer>", "72", (0, 0, 1), "the last one counts"),
    ("<think>an <answer> tag</think>\n<answer>72</answer>", "72", (0, 1, 1), "two opening tags"),
    ("<think>x</think><answer>72</answer>", "72", (0, 1, 1), "no new line"),
    ("<think>a</think> b </think>\n<answer>72</answer>", "72", (1, 1, 1), "think tags may be more"),
    (f"{THOUGHT}<answer>72", "72", (0, 1, 1), "unclosed: up to the end"),
    (f"{THOUGHT}<answer></think>", "72", (0, 0, 0), "unclosed, with a text as long as a tag"),
    ("72</answer>", "72", (0, 1, 1), "unopened: from the beginning"),
    ("72", "72", (0, 1, 1), "no tag: the whole text"),
    (f"{THOUGHT}<answer>1,080</answer>", "1,080", (1, 1, 0), "a comma is no digit"),
    (f"{THOUGHT}<answer>1080</answer>", "1,080", (1, 0, 1), "so one of two rewards is lost"),
    (f"{THOUGHT}<answer>-7</answer>", "-7", (1, 1, 0), "nor is a sign"),
]


@pytest.mark.parametrize(("response", "gold", "expected", "why"), GOLDEN)
def test_golden(response, gold, expected, why):
    assert tuple(score(response, gold).values()) == expected, why


@pytest.mark.parametrize(
    ("answer", "gold", "correctness", "integer"),
    [
        ("+1080", "1,080", 1, 1),
        ("01080", "1,080", 1, 1),
        ("1,0800", "10800", 0, 0),
        (",080", "80", 0, 0),
        ("-0", "0", 1, 1),
        ("--7", "-7", 0, 0),
        ("72.", "72", 1, 0),
        ("$72", "72", 1, 0),
        (r"-\$1,080.", "-1080", 1, 0),
        (r"72 \%.", "72", 1, 0),
        ("72%", "7", 0, 0),
        ("7%2", "72", 0, 0),
        ("72..", "72", 0, 0),
        ("٧٢", "72", 0, 0),
        ("", "72", 0, 0),
        ("half", "half", 1, 0),  # a gold that is no number is compared as text
    ],
)
def test_normalized_numbers(answer, gold, correctness, integer):
    scores = score(f"{THOUGHT}<answer>{answer}</answer>", gold, normalize_numbers=True)
    assert scores == {"format": 1, "correctness": correctness, "integer": integer}


@given(st.integers(), st.integers(), st.booleans(), st.booleans())
def test_normalized_numbers_are_equal_as_python_says(number, other, comma, other_comma):
    texts = [f"{n:,}" if c else str(n) for n, c in ((number, comma), (other, other_comma))]
    scores = score(f"<answer>{texts[0]}</answer>", texts[1], normalize_numbers=True)
    assert scores["correctness"] == (number == other) and scores["integer"] == 1


PIECES = ("<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", "\n", "x", " ", "é")


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_the_layout_is_the_references_pattern(response):
    matches = re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", response, re.DOTALL)
    pairs = (response.count("<answer>"), response.count("</answer>"))
    assert score(response, "72")["format"] == (matches is not None and pairs == (1, 1))


@pytest.mark.parametrize("normalize_numbers", [False, True])
@pytest.mark.parametrize("piece", [*PIECES[:5], "9", "9,999", ",", "\n", "\U0001d7d8"])
def test_a_hostile_megabyte_costs_less_than_a_second(piece, normalize_numbers):
    """CPU time of this thread, of which other work on the machine takes none."""
    middle = piece * (1_000_000 // len(piece))
    for response in (middle, f"<think>{middle}", f"{THOUGHT}<answer>{middle}</answer>"):
        before = time.thread_time()
        scores = score(response, "72", normalize_numbers=normalize_numbers)
        assert time.thread_time() - before < 1
        assert scores["correctness"] == 0


@pytest.mark.parametrize("gold", ["", " 72", "72\n", "7\n2", "#### 72", "<answer>72</answer>", 72])
def test_a_ground_truth_that_no_answer_equals_is_refused(gold):
    said = "gsm8k ground truth: got .*; expected what stands after"
    for check in (TASK.check_ground_truth, lambda truth: score("72", truth)):
        with pytest.raises(ValueError, match=said):
            check(gold)


@pytest.mark.parametrize(
    ("response", "form"),
    [
        ("<answer>72</answer>", 1),
        ("\n<answer>72</answer>\n", 1),
        ("So: <answer>72</answer>", 0),
        (f"{THOUGHT}<answer>72</answer>", 0),
        ("</think>\n<answer>72</answer>", 0),
        ("<answer>1</answer>\n<answer>72</answer>", 0),
        ("72", 0),
        ("", 0),
    ],
)
def test_the_format_where_the_prompt_has_closed_the_thought(response, form):
    assert score(response, "72", closed_thought=True)["format"] == form
    rest = {"correctness", "integer"}
    for name in rest:
        assert score(response, "72", closed_thought=True)[name] == score(response, "72")[name]
