"""The recipe in the form of verl-recipe composes on verl's configuration, and names its rewards."""

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

from quick_composition import compose_quickly
from repository import REPO

from verl_gdpo.algorithm.read_settings import read_settings

RECIPE = REPO / "contrib" / "verl_recipe" / "gdpo"
CALLS = '#!/bin/sh\nfor a in "$0" "$@"; do printf "%s " "$a"; done\necho "$RECIPE"\n'


def test_the_recipe_composes(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPE", str(RECIPE))
    for name in ("verl-gdpo", "python3"):
        (tmp_path / name).write_text(CALLS)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (script,) = RECIPE.glob("run_*.sh")
    ran = subprocess.run([script, "trainer.nnodes=2"], env=env, check=True, stdout=subprocess.PIPE)
    check, training = (shlex.split(line) for line in ran.stdout.decode().splitlines())
    assert check[1] == "check" and training[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert check[2:] == training[3:] and check[-1] == str(RECIPE)
    _, folder, _, name, *overrides = check[2:-1]
    config = compose_quickly(Path(folder), name, overrides)
    assert config.trainer.nnodes == 2 and config.reward.reward_manager.name == "gdpo"
    file = importlib.util.spec_from_file_location("r", config.reward.custom_reward_function.path)
    rewards = importlib.util.module_from_spec(file)
    file.loader.exec_module(rewards)
    for text, values in (("So 7", (1, 0)), ("#### 7", (1, 1)), ("#### 8", (0, 1))):
        scores = rewards.compute_score("openai/gsm8k", text, "7", {})
        assert scores == dict(zip(read_settings(config.algorithm).rewards, values, strict=True))


def test_the_version_is_a_tested_one():
    required = (RECIPE / "REQUIRED_VERL.txt").read_text()
    (commit,) = {line.split("=")[1] for line in required.splitlines() if line[:11] == "VERL_COMMIT"}
    assert required.count(commit) == 3 and commit[:9] in (REPO / "docs/trainers.md").read_text()
