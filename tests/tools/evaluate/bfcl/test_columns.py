"""The numbers of BFCL-v3's table, by the leaderboard's rules."""

from argparse import ArgumentParser
from fractions import Fraction

import pytest

from verl_gdpo.tools.evaluate import numbers
from verl_gdpo.tools.evaluate.bfcl import BENCHMARK, CATEGORIES, GROUPS, package

# a share of right answers for each category, with the number of questions of the package
SHARES = {category: (10 * k, 100) for k, category in enumerate(GROUPS["non_live"])}
SHARES |= {"live_simple": (100, 258), "live_multiple": (500, 1053), "live_parallel": (4, 16)}
SHARES |= {"live_parallel_multiple": (6, 24), "live_irrelevance": (441, 882)}
SHARES |= {"live_relevance": (9, 18)}
SHARES |= {category: (20 * k, 200) for k, category in enumerate(GROUPS["multi_turn"], 1)}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """The intervals are not looked at here."""
    monkeypatch.setattr(numbers, "DRAWS", 2)


def problems(shares):
    for category, (right, count) in shares.items():
        for k in range(count):
            scores = {"accuracy": float(k < right)}
            if not category.startswith("multi_turn"):
                scores["accuracy_after_thought"] = float(k < right / 2)
            yield numbers.QuestionScores(category, scores, {"format": (float(k % 4 > 0), 1)})


def table(shares):
    found = numbers.numbers(BENCHMARK.columns, [*problems(shares)])
    return {number.name: number.value for number in found}


def test_the_numbers_of_the_leaderboard():
    # simple is the mean of 0, 10 and 20 %; others: 30, 40, 50 and 60 %
    non_live = Fraction(10 + 30 + 40 + 50 + 60, 500)
    # by questions
    live = Fraction(100 + 500 + 4 + 6 + 441 + 9, 2251)
    dialogues = Fraction(10 + 20 + 30 + 40, 400)
    found = table(SHARES)
    assert found["non-live"] == pytest.approx(float(non_live))
    assert found["live"] == pytest.approx(float(live))
    assert found["multi-turn"] == pytest.approx(float(dialogues))
    assert found["overall"] == pytest.approx(float((non_live + live + dialogues) / 3))
    assert found["non-live, after <think>"] == pytest.approx(float(non_live / 2), abs=0.01)
    assert found["format"] == pytest.approx(0.75, abs=0.01)
    assert found["format of steps"] == 0.75


@pytest.mark.parametrize("category", ["javascript", "live_relevance", "multi_turn_base"])
def test_what_was_not_run_gives_no_overall(category):
    (overall,) = [one for one in BENCHMARK.columns([]) if one.name == "overall"]
    leaves = [one.category for _, one in numbers.flat([overall]) if not one.parts]
    assert sorted(leaves) == sorted(CATEGORIES)  # all of them count
    found = table({name: share for name, share in SHARES.items() if name != category})
    group = next(name for name, names in GROUPS.items() if category in names)
    assert found["overall"] is None and found[group.replace("_", "-")] is None
    assert sum(found[name] is None for name in ("live", "non-live", "multi-turn")) == 1


def test_a_part_can_be_asked_for(monkeypatch):
    def ask(category, *_):
        asked.append(category)
        return [[]]

    monkeypatch.setattr(package, "ask", ask)
    parser = ArgumentParser()
    BENCHMARK.add_options(parser)
    for words, expected in (
        (["live_simple", "java", "non_live"], [*GROUPS["non_live"], "live_simple"]),
        ([*GROUPS], [*CATEGORIES]),
    ):
        asked = []
        BENCHMARK.questions(parser.parse_args(["--bfcl-v3-categories", *words]))
        assert asked == expected
