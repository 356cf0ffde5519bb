"""The way of a rollout in docs/how_it_works.md is the way in the code."""

import re
from pathlib import Path

from traced import modules_of_a_step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_it_works.md"
ANSWERS = ["<think>1</think>\n<answer>0</answer>", "<think>1</think><answer>7</answer>", "0"]


def paths_on_the_page():
    """The paths in `verl_gdpo/` that the lines of the first diagram name, from above to below."""
    diagram = PAGE.read_text().split("```")[1]
    rooms = "rewards|verl_hooks|batch|advantage"  # cpu and settings take no part in each rollout
    lines = (re.findall(rf"\b((?:{rooms})/\w*(?:\.py)?)", line) for line in diagram.splitlines())
    return [paths for paths in lines if paths]


def test_a_rollout_takes_the_way_on_the_page(stage):
    trainer = stage.trainer(
        [ANSWERS, ANSWERS],
        sources=["verl_gdpo/gsm8k"] * 2,
        settings={"reward.custom_reward_function.path": None},
    )
    ran = modules_of_a_step(stage, trainer)
    lines = paths_on_the_page()
    assert sum(map(len, lines)) >= 8
    # a manager is entered before the scorer that it calls, and has its result afterwards
    assert lines[:2] == [["rewards/"], ["verl_hooks/reward_manager.py"]]
    lines[:2] = lines[1::-1]
    places = []
    for paths in lines:  # those of one line may run in any order
        of_line = {path: [n for n, one in enumerate(ran) if one.startswith(path)] for path in paths}
        missing = [path for path, found in of_line.items() if not found]
        assert not missing, f"{missing} did not run: {ran}"
        places += sorted(found[0] for found in of_line.values())
    assert places == sorted(places), f"on the page: {lines}; in the code: {ran}"
