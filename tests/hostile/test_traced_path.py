"""The way of a rollout in docs/how_it_works.md is the way in the code."""

import re

from repository import REPO
from traced import modules_of_a_step

SOURCES = ["verl_gdpo/gsm8k"] * 2
PAGE = REPO / "docs" / "how_it_works.md"
ANSWERS = ["<think>1</think>\n<answer>0</answer>", "<think>1</think><answer>7</answer>", "0"]


def test_a_rollout_takes_the_way_on_the_page(stage):
    trainer = stage.trainer(
        [ANSWERS, ANSWERS],
        sources=SOURCES,
        settings={"reward.custom_reward_function.path": None},
    )
    section = PAGE.read_text().split("## From a text to an update")[1]
    diagram = section.split("```")[1]
    named = re.findall(r"^  ([\w/]+\.py) ", diagram, re.M)
    assert modules_of_a_step(stage, trainer, SOURCES[:1]) == named
