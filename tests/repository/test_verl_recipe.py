"""The recipe in the form of verl-recipe composes, and so does the whole way of a user on a GPU."""

import re

from composed_recipes import composed
from pages import PAGES
from quick_composition import compose_quickly
from repository import REPO

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.hooks.unread_keys import UnreadKeys, find_unread_keys

RECIPE = REPO / "contrib" / "verl_recipe" / "gdpo"
ARGUMENTS = '--config-dir "$RECIPE/config" --config-name gdpo_trainer "$@"'


def test_the_recipe_composes(monkeypatch):
    monkeypatch.setenv("RECIPE", str(RECIPE))
    *_, check, training = next(RECIPE.glob("run_*.sh")).read_text().splitlines()
    assert check == f"verl-gdpo check {ARGUMENTS}"
    assert training == f"python3 -m verl.trainer.main_ppo {ARGUMENTS}"
    config, names = compose_quickly(RECIPE / "config", "gdpo_trainer", []), {}
    assert find_unread_keys(config) == UnreadKeys()
    with open(config.reward.custom_reward_function.path) as file:
        exec(file.read(), names)
    for text, values in (("So 7", (1, 0)), ("#### 7", (1, 1)), ("#### 8", (0, 1))):
        scores = names["compute_score"]("openai/gsm8k", text, "7", {})
        assert scores == dict(zip(read_settings(config.algorithm).rewards, values, strict=True))


def test_the_whole_way_of_a_users_own_composes_on_a_gpu():
    parts = re.findall(r"^mine\+?=\((.*)\)$", PAGES["docs/without_a_gpu.md"], re.M)
    words = " ".join(parts).replace("hardware=cpu", "hardware=1gpu").split()
    config = composed(*words[words.index("train") + 1 :])
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.rollout.name == "vllm"
    assert config.reward.custom_reward_function.path == "my_rewards.py"
