"""The way of a rollout in docs/how_it_works.md is the way in the code."""

import re
from pathlib import Path

from traced import modules_of_a_step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"
ANSWERS = ["<think>1</think>\n<answer>0</answer>", "<think>1</think><answer>7</answer>", "0"]


def paths_on_the_page():
    """The paths in `verl_gdpo/` that the first diagram names, from above to below."""
    diagram = PAGE.read_text().split("```")[1]
    rooms = "rewards|verl_hooks|batch|advantage"  # cpu and settings take no part in each rollout
    return re.findall(rf"\b((?:{rooms})/\w*(?:\.py)?)", diagram)


def test_a_rollout_takes_the_way_on_the_page(stage):
    trainer = stage.trainer(
        [ANSWERS, ANSWERS],
        sources=["verl_gdpo/gsm8k"] * 2,
        settings={"reward.custom_reward_function.path": None},
    )
    ran = modules_of_a_step(stage, trainer)
    named = paths_on_the_page()
    assert len(named) >= 8
    first = [next((n for n, path in enumerate(ran) if path.startswith(one)), None) for one in named]
    assert None not in first, f"{named[first.index(None)]} did not run: {ran}"
    # a manager is entered before the scorer that it calls, and has its result afterwards
    assert named[:2] == ["rewards/", "verl_hooks/reward_manager.py"]
    first[:2] = first[1::-1]
    assert first == sorted(first), f"on the page: {named}; in the code: {ran}"
