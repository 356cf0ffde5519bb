"""The maths scorer: what is equal, and processes that no answer can freeze or leave behind."""

import re
import time

import pytest

from verl_gdpo.tasks import check_ground_truths
from verl_gdpo.tasks.math_length import score as math_length
from verl_gdpo.tasks.math_length.score import TASK, score
from verl_gdpo.tasks.sandbox.limited_pool import LimitedPool

FREEZES = "9^{9^{9^{9}}}"


def correctness(answer, gold):
    return score(f"So it is \\boxed{{{answer}}}.", gold, response_tokens=1)["correctness"]


@pytest.fixture
def workers(monkeypatch):
    """A pool of its own, with few seconds; returns the function that lists its processes."""
    pool = LimitedPool(math_length._pool._arguments[0], 0.5, math_length.LIMIT_BYTES)
    monkeypatch.setattr(math_length, "_pool", pool)
    return lambda: [one.process for one in pool._idle.queue if one is not None]


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("7", "7", 1),
        (r"\frac12", "0.5", 1),
        ("-q+p", "p-q", 1),
        (r"\text{east}", "east", 1),
        ("(2,1)", "(1,2)", 0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", 1),
        ("-2,1", "1,-2", 1),  # as sets
        ("", "7", 0),
        ("\ud800", "7", 0),
        ("\0", "7", 0),
        ("(" * 40, "7", 0),
    ],
)
def test_what_is_equal(answer, gold, expected):
    assert correctness(answer, gold) == expected


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        (r"10\,000", "10000"),
        (r"10\ 000", "10000"),
        (r"10\;000", "10000"),
        (r"10\thinspace 000", "10000"),
        (r"10{\,}000", "10000"),
        ("10~000", "10000"),
        ("5 000", "5000"),
        ("5\u2009000", "5000"),
        ("5\u202f000", "5000"),
        ("5\u00a0000", "5000"),
        (r"1\,234\,567", "1234567"),
        (r"-1\,234.5", "-1234.5"),
        (r"\$10\,000", "10000"),
        (r"\frac{10\,000}{3}", r"\frac{10000}{3}"),
        (r"x=\,10\,000", "10000"),
        (r"\{1 000, 2 000\}", r"\{1000, 2000\}"),
        (r"\log_2 1\,024", "10"),
        # math-verify itself reads these
        ("10{,}000", "10000"),
        ("10,000", "10000"),
    ],
)
def test_thousands_apart(spelled, plain):
    assert correctness(plain, spelled) == 1
    assert correctness(spelled, plain) == 1
    for wrong in ("0", "1", re.search(r"\d+", spelled)[0]):
        assert correctness(wrong, spelled) == 0
        assert correctness(spelled, wrong) == 0


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        # golds of Minerva; math-verify alone reads 4.5 e + 33
        (r"4.5 \times 10^{33}", "4.5e33", 1),
        ("4.5e33", "4.5e33", 1),
        (r"4.5 \cdot 10^{32}", "4.5e33", 0),
        ("0.00001", "1e-5", 1),
        # math-verify alone compares six decimals, so 0 with 0
        ("0.000001005", "0.000001", 1),  # to a hundredth
        (r"2.5 \times 10^{-10}", r"3.89 \times 10^{-10}", 0),
        ("1e-9", "3.89e-10", 0),
        ("0", "0.000001", 0),
        # Euler's number
        ("2e - 1", "2e-1", 1),
        ("1e5e5", "e", 0),
    ],
)
def test_powers_of_ten(answer, gold, expected):
    assert correctness(answer, gold) == expected


SAME = [  # one answer each, in the forms in which golds and policies write it
    r"50;50\%;50%;50 \%;50\,\%;50\text{ percent};50 percent;50.;50\%.",
    r"62.5;62.5\%;62.5%;\frac{125}{2}\%;62\frac{1}{2}\%",
    r"90;90^\circ;90^{\circ};90°;90\degree;90^\degree;90\text{ degrees};90°.",
    r"1080;1,080^\circ;1{,}080°;1\,080^\circ",
    r"5;\$5;$5;\$5.00;5\text{ dollars};5 dollars;\approx 5.",
    r"7;7\text{ cm}^2;7~\mathrm{cm};7 cm^2;7 square centimeters;7\mbox{ units.}",
    r"\cos 60^\circ;\cos 60°;\cos 60\degree",
    r"(45^{\circ}, 60^{\circ});(45°,60°)",
    r"-\frac{5}{3}.;-\frac53;-5/3",
    r"20\%, 30\%;20%,30%;20,30",
]
SAME = [forms.split(";") for forms in SAME]


@pytest.mark.parametrize("forms", SAME, ids=lambda forms: forms[0])
def test_marks_that_one_writes_and_another_leaves_out(forms):
    for gold in forms:
        assert [answer for answer in forms if not correctness(answer, gold)] == []
        others = [other for group in SAME for other in group[:2] if group != forms]
        assert [answer for answer in others if correctness(answer, gold)] == []


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"5\%", "50"),
        (r"0.5\%", r"50\%"),
        (r"50\%", "0.5"),
        (r"90\%", r"90^\circ"),  # a percentage is no angle, length or amount
        (r"5\%", r"5\text{ cm}"),
        (r"\$5", r"5\%"),
        (r"f \circ g", "f g"),
        ("2 pi", "2"),
        ("5x", "5"),
        ("1, 2, ...", "1,2"),
        ("%", "0"),
        (".", "0"),
    ],
)
def test_marks_that_make_another_answer(answer, gold):
    assert correctness(answer, gold) == 0


SIDE_BY_SIDE = ["12 34", "5 00", "0 123", "1 0000", "1000 000", "1,000 000", "1 000 00", "2 1/2"]


@pytest.mark.parametrize("text", [*SIDE_BY_SIDE, "0.5 000", "x 1 2"])
def test_numbers_side_by_side_are_no_gold_and_no_thousands(text):
    assert math_length.joined(text) == text
    with pytest.raises(ValueError, match="expected no numbers side by side"):
        correctness("0", text)
    assert correctness(text, "1") == 0


APART = [r"\dfrac 3 8", r"\frac 1 200", r"\log_2 128", "x^2 100", r"\sqrt 4 100", "100, 200"]
APART += [r"1 & 200 \\ 300 \\ 400", r"\begin{pmatrix} 1 \\ 200 \end{pmatrix}", "2 x 300"]


@pytest.mark.parametrize("text", APART)
def test_what_is_no_number_with_a_space(text):
    assert math_length.joined(text) == text
    TASK.check_ground_truth(text)


@pytest.mark.parametrize(
    "piece", ["9", "1 ", "1.", "1,", r"\thinspace ", r"1\,", "{ }", r"\frac 1 ", "%", " ", "~", "."]
)
def test_a_hostile_answer_of_digits_and_spaces_costs_little(piece):
    before = time.thread_time()
    for end in ("x", ".", "%", r"^\circ"):
        math_length.without_marks(math_length.joined((piece * 1000)[:1000] + end))
    assert time.thread_time() - before < 1


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}} 7}", r"\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7", None),
        (r"\boxed{7} \boxed{", None),  # the last one counts
        ("7", None),
        ("", None),
        (r"\boxed{" + "7" * 1000 + "}", "7" * 1000),
        (r"\boxed{" + "7" * 1001 + "}", None),
        (r"\boxed{7\\}", r"7\\"),
    ],
)
def test_the_answer_is_in_the_last_box(response, answer):
    assert math_length._last_boxed(response) == answer


def test_length_counts_tokens():
    lengths = [score("", "7", response_tokens=n)["length"] for n in (0, 4000, 4001)]
    assert lengths == [1, 1, 0]
    assert score("", "7", response_tokens=21, limit_tokens=20)["length"] == 0
    with pytest.raises(TypeError, match="response_tokens: got NoneType; expected int"):
        score("", "7")
    with pytest.raises(ValueError, match="limit_tokens: got 0; expected at least 1"):
        score("", "7", response_tokens=1, limit_tokens=0)


@pytest.mark.parametrize("gold", ["", " 7", "7\n", r"\boxed{7}", "{7", "7}", "7" * 1001, "7\\"])
def test_a_ground_truth_that_is_no_answer_is_refused_without_a_process(gold, workers):
    rows = [{"data_source": "verl_gdpo/math_length", "reward_model": {"ground_truth": gold}}]
    with pytest.raises(ValueError, match=r"here, row 0 .*math_length ground truth: got"):
        check_ground_truths(rows, "here")
    for good in ("7", r"\frac{14}{3}", r"\{1, 2\}", "x \\"[:1]):
        TASK.check_ground_truth(good)
    assert workers() == []


def test_without_math_verify_the_message_has_the_command(monkeypatch):
    monkeypatch.setattr(math_length.importlib.util, "find_spec", lambda name: None)
    math_length._has_math_verify.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"pip install './verl-gdpo\[math\]'"):
            TASK.check_ground_truth("7")
    finally:
        math_length._has_math_verify.cache_clear()


@pytest.mark.parametrize(
    "piece", ["x", "\\boxed{", "\\boxed{}", "{", "}", "\\", "\\boxed{\\frac{", "\n", "9^{"]
)
def test_a_hostile_megabyte_costs_less_than_a_second(piece, workers):
    middle = piece * (1_000_000 // len(piece))
    for response in (middle, f"\\boxed{{{middle}}}", f"{middle}\\boxed{{"):
        before = time.thread_time()
        assert score(response, "7", response_tokens=5000) == {"correctness": 0, "length": 0}
        assert time.thread_time() - before < 1
    assert workers() == []  # none of it is an answer to be read


# --- processes -----------------------------------------------------------------------------------


def test_what_freezes_python_is_wrong_and_the_next_answer_is_compared(workers):
    assert correctness(FREEZES, "7") == 0
    assert workers() == []
    assert correctness("7.0", "7") == 1


def test_a_process_that_stood_still_is_no_bad_gold(monkeypatch):
    """As one that was suspended with its machine: the next one reads the gold."""
    replies = iter([([], False), ([True, True], True)])
    monkeypatch.setattr(math_length._pool, "ask", lambda *_: next(replies))
    assert math_length.are_equal("7.0", "7")


@pytest.mark.parametrize("gold", [r"\text{}", "(" * 900])  # nothing; more than there is time for
def test_a_gold_that_cannot_be_read_is_no_low_score(gold, workers):
    with pytest.raises(ValueError, match=r"ground truth: got .* which math-verify cannot read"):
        correctness("7", gold)
