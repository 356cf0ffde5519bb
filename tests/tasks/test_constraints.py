"""Constraints that a program can check: what meets each of them, and what a policy may try."""

import json

import pytest

from verl_gdpo.tasks.constraints.rows import KEYWORDS, TOPICS, make_rows
from verl_gdpo.tasks.constraints.score import CONSTRAINTS, TASK, count_sentences, count_words, score

GOOD = '{"name": 1, "use": 2}'
DEEP = '{"name": 1, "use": ' + "[" * 200_000


def reward(name, value, response):
    rewards = score(response, json.dumps({name: value}))
    assert [k for k, v in rewards.items() if v is not None] == [name]
    return rewards[name]


@pytest.mark.parametrize(
    ("name", "value", "met", "missed"),
    [
        ("keyword", ["old"], ["An OLD tree", '"old".'], ["cold tree", "golden", "older", "o l d"]),
        ("keyword", ["old", "Tea"], ["old tea"], ["old", "tea tea"]),
        ("keyword", ["don't"], ["I don't.", "I don\u2019t."], ["dont"]),
        ("keyword", ["don\u2019t"], ["I don't."], ["dont"]),
        ("sentences", [2, 2], ["A bus. C d", "Why? No!", "a bus... c."], ["a bus. ! . ?", "."]),
        ("sentences", [1, 1], ["Dr. Lee said 'no.'", "J. Doe left"], ["He left. I came", ""]),
        ("sentences", [1, 1], ["Go at 7 a.m. to the U.S. today"], ["It costs 2.5. No!"]),
        ("words", [2, 3], ["a well-known", "don't go"], ["a", "a b-c d"]),
        ("words", [2, 3], ["a b c."], ["a_b_c_d", "- * !"]),
        ("bullets", [2, 2], ["* a\n- b", "So:\n  * a\n * b\nend"], ["* a", "*a\n*b", "* a\n* \n"]),
        ("bullets", [1, 1], ["- - b"], ["--b"]),
        ("case", "lower", ["so it is 2!"], ["So", "1 2", "SO"]),
        ("case", "upper", ["SO IT IS 2!"], ["So", "1 2", "so"]),
        ("ending", "!", ["Rain!", '"Rain!" ', "rain !\n"], ["Rain! So", "!!!", "Rain"]),
        (
            "ending",
            "the end.",
            ["so, The End.", "SO THE END.", "\u201cIt is the end.\u201d"],
            ["the end", "the end. So"],
        ),
        (
            "json",
            ["name", "use"],
            [GOOD, f"```json\n{GOOD}\n```", ' {"use": "x", "name": [], "z": 0} '],
            [
                *("{}", "a b", '["name", "use"]', '{"name": 1}', DEEP, f"So: {GOOD}", GOOD[:-1]),
                *('"name use"', "1" * 9999, GOOD[:-2] + "[" + "[]," * 200 + "1]}", f"{GOOD} so"),
                *(GOOD.replace("1", "NaN"), GOOD.replace("1", "-Infinity")),
            ],
        ),
    ],
)
def test_what_meets_a_constraint(name, value, met, missed):
    assert [reward(name, value, response) for response in met] == [1.0] * len(met)
    assert [reward(name, value, response) for response in missed] == [0.0] * len(missed)


PIECES = (
    *(".", "! ", "* ", "-", "'", "a'", "a.", '"', "\n", "{", "[", '{"a":', "```", "\\", "_", "1"),
    "İ",
)


@pytest.mark.parametrize("piece", PIECES)
def test_no_response_raises_or_takes_long(piece):
    """A pattern that is quadratic would take hours."""
    every = {"keyword": ["a"], "case": "lower", "ending": "!", "json": ["a"]}
    every |= {name: [1, 2] for name in ("sentences", "words", "bullets")}
    for response in (piece * 300_000, piece * 300_000 + "x", "\ud800\0" + piece):
        rewards = score(response, json.dumps(every))
        assert {*rewards} == {*CONSTRAINTS} and {*rewards.values()} <= {0.0, 1.0}


@pytest.mark.parametrize(
    "truth",
    [
        *("", "x", "[]", "{}", "3", None, "[" * 200_000, '{"rhyme": 1}', '{"case": "title"}'),
        *('{"keyword": "old"}', '{"keyword": []}', '{"keyword": ["two words"]}'),
        '{"keyword": [1]}',
        *('{"words": 3}', '{"words": [3, 2]}', '{"words": [0, 2]}', '{"words": [1, true]}'),
        *('{"ending": ""}', '{"ending": " "}', '{"json": "name"}', '{"json": []}', '{"ending": 3}'),
    ],
)
def test_a_ground_truth_of_another_form_is_refused(truth):
    with pytest.raises(ValueError, match=r'constraints ground truth: got .*"words": \[LOW, HIGH\]'):
        score("a", truth)


def test_all_met_counts_the_constraints_of_the_prompt():
    all_met = TASK.evaluation.columns["all met"]
    truth = json.dumps({"keyword": ["old"], "ending": "!"})
    assert [all_met(score(text, truth)) for text in ("old!", "old", "a!")] == [1.0, 0.0, 0.0]


def test_rows_ask_for_what_one_response_can_do():
    kinds, topics = set(), {"train": set(), "test": set()}
    for split in topics:
        for row in make_rows(400, split=split, seed=1):
            truth, text = row["reward_model"]["ground_truth"], row["prompt"][-1]["content"]
            rewards = score(TASK.good_response(truth), truth)
            assert {*rewards.values()} <= {None, 1.0}, text
            asked = json.loads(truth)
            assert 2 <= len(asked) <= 4
            kinds |= {*asked}
            words = {word.strip('."') for word in text.split()}
            topics[split] |= words & {*TOPICS, *KEYWORDS}
            values = [*asked.get("keyword", ()), *asked.get("json", ()), asked.get("ending", "")]
            assert all(f'"{value}"' in text for value in values if value)
    assert kinds == {*CONSTRAINTS}
    assert topics["train"] | topics["test"] == {*TOPICS, *KEYWORDS}
    assert not topics["train"] & topics["test"]


def test_counts_of_a_response():
    text = 'Tea is old. "It is 3,000 years old!" e.g. in China'
    assert (count_words(text), count_sentences(text)) == (13, 3)
