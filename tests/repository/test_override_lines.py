"""Every override in the README, the documents and the recipes composes, and training takes it."""

import re
import shlex

import pytest
from composed_recipes import composed as recipe
from omegaconf import OmegaConf
from pages import PAGES
from repository import REPO

from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.unread_keys import UnreadKeys, find_unread_keys
from verl_gdpo.tasks import TASK_BY_SOURCE, declared_by
from verl_gdpo.tools.compose import composed

GROUPS = "actor_rollout_ref|algorithm|critic|data|reward|trainer|ray_kwargs"
KEY = rf"\+{{0,2}}~?(?:{GROUPS})\.[\w.]+="
END = r"[^\s`'|),;.:]"
# in quotes, up to the closing one; else up to a space or what ends a piece of text
OVERRIDE = re.compile(rf"'({KEY}[^'\n]+)'|(?<![\w.+~'/-])({KEY}(?:'[^'\n]*'|[^\s`'|),;]*{END}))")


def pages():
    """{name: text} of all that a user may copy from."""
    found = {page: text for page, text in PAGES.items() if page != "CHANGELOG.md"}
    for file in sorted((REPO / "recipes").rglob("*.yaml")):
        found[str(file.relative_to(REPO))] = file.read_text()
    return found


def lines():
    for page, text in pages().items():
        for quoted, bare in OVERRIDE.findall(text):
            yield page, quoted or "".join(shlex.split(bare))


LINES = sorted({*lines()})


@pytest.fixture(scope="module")
def blocks():
    """{group: block} of a whole configuration."""
    return OmegaConf.to_container(recipe("task=gsm8k"), resolve=True)


def test_there_are_lines():
    assert len(LINES) > 50
    named = {page for page, line in LINES if "gdpo.rewards" in line}
    assert named >= {"README.md", "recipes/README.md", "recipes/task/math_length.yaml"}


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_line_composes(blocks, page, line):
    group = line.lstrip("+~").partition(".")[0]
    config = composed(OmegaConf.create({group: blocks[group]}), [line])
    assert find_unread_keys(config) == UnreadKeys()


REWARDS = [(page, line) for page, line in LINES if "algorithm.gdpo." in line]


@pytest.mark.parametrize(("page", "line"), REWARDS)
def test_training_takes_a_line_on_rewards(blocks, page, line):
    config = composed(
        OmegaConf.create({key: blocks[key] for key in ("algorithm", "reward")}), [line]
    )
    if config.algorithm.gdpo.get("keep_groups"):
        # The page has it beside the line.
        config.algorithm.filter_groups.enable = True
    names = {*(config.algorithm.gdpo.get("rewards") or {})}
    declared = {source: {*declared_by(source, {})} for source in TASK_BY_SOURCE}
    if not names <= set().union(*declared.values()):  # of a function of the reader's own
        config.reward.custom_reward_function.path = "mine.py"
    # of one task, or of the three that a document mixes
    (sources, *_) = [
        *([source] for source, of_source in declared.items() if of_source == names),
        ["rlla", "verl_gdpo/gsm8k", "verl_gdpo/coding"],
    ]
    assert settings_of_run(config, sources) is not None
