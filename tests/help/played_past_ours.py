"""Plays runs of `past_ours.py` in a process of their own, and says what they must come to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest

HELP = Path(__file__).parent
REPO = HELP.parents[1]
# {prompt: how many tokens the policy writes in each session}; see `past_ours.py`
PROMPTS = {"p": [3, 1, 2, 2], "q": [1, 4, 1, 2]}
EMPTY = {**PROMPTS, "r": [0, 0, 0, 0]}
KINDS = ("v1", "legacy", "main", "fully_async")
WITHOUT_GDPO = [
    "algorithm.adv_estimator=grpo",
    "reward.reward_manager.name=naive",
    "reward.custom_reward_function.name=compute_sum",
]
FAILED = "RuntimeError: cannot be scored"  # of the first sample of a rollouter


def played(cases, folder, env=None):
    """What became of each case."""
    folder = folder / "played"
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps([{"prompts": PROMPTS, **c} for c in cases]))
    env = {**(env or os.environ), "VERL_USE_EXTERNAL_PLUGINS": "none", "FOLDER": str(folder)}
    paths = [env.get("PYTHONPATH", ""), str(HELP), str(REPO)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-W", "ignore", str(HELP / "past_ours.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), done.stderr[-4000:]
    return results


def trained():
    """The advantages of gdpo on `PROMPTS`, with the rewards of `past_ours.py`."""
    lengths = [length for sessions in PROMPTS.values() for length in sessions]
    rewards = [[float(length > 2), float(length % 2 == 0)] for length in lengths]
    groups = [prompt for prompt, sessions in PROMPTS.items() for _ in sessions]
    keys = [f"{p}_{number}_0" for p, sessions in PROMPTS.items() for number in range(len(sessions))]
    advantages = oracle.gdpo(rewards, groups)
    return pytest.approx(dict(zip(keys, advantages, strict=True)), abs=1e-6)
