"""Which validation rows ask what a training row asks: equal, nearly equal, and neither."""

import random

import pytest

from verl_gdpo.tasks.preparation import overlap
from verl_gdpo.tasks.preparation.overlap import Overlap, PromptReader, compare

ASK = "Tom has 31 cups and gets 4 more. How many cups has he now?"
# words that no other prompt of a test has
FRESH = [f"{a}{b}" for a in "bcdfghjklmnpqrstvwxz" for b in ("aro", "elu", "imi", "opa", "uty")]


def user(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def found(training, validation):
    sides = (
        PromptReader(len(side), lambda step, side=side: side[::step])
        for side in (training, validation)
    )
    return compare(*sides)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ASK, f"  {ASK.upper()}\n"),
        (ASK, ASK.replace(" ", "\u2009\n").replace(".", " ...").replace("?", "!")),
        (ASK, "".join(mark for mark in ASK if mark.isalnum() or mark == " ")),
        ("He's a well-known, twenty-year-old man.", "Hes a well known twenty year old man"),
        ("It costs $1,250.", "It costs 1250"),
        ("x² = ﬁve", "X2 = five"),
        ("Straße?", "STRASSE"),
        ("多少。", "多少"),
        ("∫ ∮", "∫ ∮"),
    ],
)
def test_equal(first, second):
    assert found(user("other", first), user("some", second)).equal == {1: 1}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("What is 1 + 11?", "What is 11 + 1?"),
        ("What is 1 + 11?", "What is 1 * 11?"),
        ("Print n - 12.", "Print n + 12."),
        ("What is -3 + 4?", "What is 3 + 4?"),
        ("What is 3.14?", "What is 31.4?"),
        ("How many cups?", "How many cups now?"),
        ("多少", "少多"),
        ("∫", "∮"),
    ],
)
def test_not_equal(first, second):
    assert not found(user(first), user(second)).equal


def test_equal_prompts_have_the_same_system_message_and_a_user_may_send_pictures():
    rows = user(ASK, ASK)
    rows[1].insert(0, {"role": "system", "content": "Tools: a"})
    assert found(rows, [[{"role": "system", "content": "tools  A"}, *rows[0]]]).equal == {0: 1}
    picture = [
        [{"role": "user", "content": [{"type": "image", "image": number}]}] for number in "ab"
    ]
    assert found(picture, picture[1:]).equal == {0: 1}


# 22 words are 20 triples. With the last n words replaced, the other 20 - n triples are in both, and
# 20 + n in either: 7 / 33 is more than a fifth, and 6 / 34 is less
@pytest.mark.parametrize(("replaced", "is_near"), [(0, True), (13, True), (14, False)])
def test_nearly_equal_is_a_fifth_of_the_triples_that_either_has(replaced, is_near):
    ask = FRESH[:22]
    copy = [*ask[: 22 - replaced], *FRESH[50 : 50 + replaced], *([] if replaced else ["."])]
    shared = found(user("Another.", " ".join(ask)), user(" ".join(copy), "New."))
    assert shared.near == ({0: 1} if is_near and replaced else {})
    assert shared.equal == ({} if replaced else {0: 1})
    assert (shared.rows, shared.compared) == (2, 2)


@pytest.mark.parametrize(("shared", "is_near"), [(5, True), (4, False)])
def test_nearly_equal_prompts_share_five_triples(shared, is_near):
    """8 and 8 triples: with 4 in both of the 12 that either has, it is a third of them."""
    ask, copy = FRESH[:10], [*FRESH[: shared + 2], *FRESH[50 : 58 - shared]]
    assert found(user(" ".join(ask)), user(" ".join(copy))).near == ({0: 0} if is_near else {})


def test_what_most_prompts_have_makes_none_alike():
    instruction = "Think step by step, check what you found, and write the end result in a box."
    asked = [f"{' '.join(FRESH[n : n + 12])} {instruction}" for n in range(0, 72, 12)]
    assert found(user(*asked[:3]), user(*asked[3:])).near  # in 6 prompts it counts
    lines = [f"{n} {instruction}" for n in range(8)]  # which have too few triples of their own
    assert not found(user(*asked[:3], *lines), user(*asked[3:])).near


def test_system_messages_are_not_nearly_equal():
    system = [{"role": "system", "content": " ".join(FRESH[:40])}]
    assert not found([system + user("One?")[0]], [system + user("Two?")[0]]).near


def test_of_a_long_prompt_the_end_counts(monkeypatch):
    monkeypatch.setattr(overlap, "MOST_WORDS", 12)
    history, asked, others = (" ".join(FRESH[n : n + 12]) for n in (0, 20, 40))
    rows = user(f"{history} {asked}")
    assert found(rows, user(f"{others} {asked}")).near == {0: 0}
    assert not found(rows, user(f"{history} {others}")).near


def naive(training, validation):
    """The rule in another way: sets of words, compared pair by pair."""
    triples = [
        [
            {*zip(words, words[1:], words[2:], strict=False)}
            for words in (row[0]["content"].split() for row in side)
        ]
        for side in (training, validation)
    ]
    every = [triple for side in triples for of_row in side for triple in of_row]
    often = {triple for triple in every if every.count(triple) > 10}
    first, second = ([of_row - often for of_row in side] for side in triples)
    return {
        number
        for number, asked in enumerate(second)
        if len(asked) >= 8
        and any(
            len(row) >= 8 and len(asked & row) >= max(5, 0.2 * len(asked | row)) for row in first
        )
    }


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_a_naive_comparison_finds(monkeypatch, seed):
    rng = random.Random(seed)
    sources = [rng.choices(FRESH[:30], k=rng.randint(1, 40)) for _ in range(20)]

    def side(count):
        rows = []
        for _ in range(count):
            words = [*rng.choice(sources)]
            for place in range(len(words)):
                words[place] = rng.choice(FRESH) if rng.random() < 0.15 else words[place]
            rows.append(" ".join(words))
        return user(*rows)

    training, validation = side(60), side(40)
    shared = found(training, validation)
    assert 0 < len(shared.near) < 40
    assert {*shared.near} == naive(training, validation) - {*shared.equal}


def test_of_many_validation_rows_some_are_compared_for_near_equality(monkeypatch):
    monkeypatch.setattr(overlap, "MOST", 3)
    rows = [" ".join(FRESH[n : n + 12]) for n in range(0, 96, 12)]
    shared = found(user("One?", *rows), user(*(f"{row} more" for row in rows), "One!"))
    # of nine rows each third; equality is asked of all
    assert shared == Overlap({8: 0}, {0: 1, 3: 4, 6: 7}, 9, 3)
