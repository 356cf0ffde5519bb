"""How many kinds of mistakes `verl-gdpo check` says, and how many healthy runs it refuses.

`check_mistakes.txt` and `check_healthy.txt` are the lists; docs/check.md has the counts.
"""

import re

import pytest
from repository import REPO
from rows_for_check import of_the_page

SHORT = {
    "V": "algorithm.adv_estimator=grpo reward.reward_manager.name=naive",
    "M": "data.train_files=DATA/math.parquet data.val_files=DATA/math.parquet",
    "A": "actor_rollout_ref.actor",
    "R": "actor_rollout_ref.rollout",
    "F": "reward.custom_reward_function",
}


def lines_of(name):
    """Two of three take as long as all other tests of check, and rarely fail."""
    lines = (REPO / "tests" / "tools" / f"check_{name}.txt").read_text().splitlines()
    for number, line in enumerate(line for line in lines if not line.startswith("#")):
        whole = re.sub(r"(?<!\S)([AFMRV])(?=[.\s])", lambda match: SHORT[match[1]], line)
        yield pytest.param(*whole.split(" | "), marks=pytest.mark.slow if number % 3 else ())


@pytest.mark.parametrize(("added", "words"), [*lines_of("mistakes")])
def test_a_mistake_is_said(plain, data, added, words):
    """In a warning or a problem: after a problem, other remarks are shown too."""
    code, warnings, problems = plain("--brief", *of_the_page(added, data))
    said = problems if code else warnings
    assert [part for part in words.split(" & ") if part not in said] == []


@pytest.mark.parametrize("added", [*lines_of("healthy")])
def test_a_healthy_configuration_is_not_refused(plain, data, added):
    code, _, problems = plain(*of_the_page(added, data))
    assert (code, problems) == (0, "")
