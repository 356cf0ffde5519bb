"""One word a thing: the words of docs/faq.md, and the tables and messages that follow it."""

import re

from pages import PAGES

from verl_gdpo.tools import advice, replay
from verl_gdpo.tools.replay.arms import ARMS, shown_arms
from verl_gdpo.tools.report import charts

# {what is not said: the word for it}
OTHER_WORDS = {
    r"rollouts?": "sample",
    r"completions?": "sample",
    r"silent": "signal",
    r"shares? .*(of|in) the advantage": "share of the update",
    r"standard deviation|std": "spread",
}


def words():
    table = PAGES["docs/faq.md"].split("\n## Words\n")[1].split("|---|---|\n")[1]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]


def printed():
    """What tables, their legends and the titles of charts say."""
    titles = [about[0] for about in (*charts.OF_TRAINING.values(), *charts.OF_EACH_REWARD.values())]
    units = [about[1] for about in (*charts.OF_TRAINING.values(), *charts.OF_EACH_REWARD.values())]
    legend = replay.LEGEND.replace("spread       standard deviation", "")
    return [*titles, *units, *advice.HEADER, advice.CAPTION, advice.LEGEND, *replay.HEADER, legend]


def test_a_word_stands_in_one_line():
    assert len({*words()}) == len(words()) > 20
    assert {*OTHER_WORDS.values()} <= {*words()}
    # these are on the page as the words that others use
    assert "rollout" not in words() and "rollout" in PAGES["docs/faq.md"].split("\n## Words\n")[1]


def test_what_is_printed_has_no_other_word_for_a_thing():
    for text in printed():
        for other, word in OTHER_WORDS.items():
            assert not re.search(rf"\b({other})\b", text, re.I), (word, text)


def test_arms_that_take_the_estimator_apart_are_not_listed_and_are_there():
    hidden = {*ARMS} - {*shown_arms()}
    assert hidden == {"gdpo_no_batch_norm", "grpo_batch_norm"}
