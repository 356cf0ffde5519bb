"""Settings of trainings of a minute or two, and how one has to fail."""

import re
from pathlib import Path

import varied_reward
from rollout_check import SIZES

from verl_gdpo.tools.run.resume import quoted

REWARD_FILE = Path(varied_reward.__file__)


def overrides(assets, *more, scorer="compute_score"):
    scoring = (
        f"reward.custom_reward_function.path={quoted(str(REWARD_FILE))}",
        f"reward.custom_reward_function.name={scorer}",
    )
    return [
        f"data.train_files={quoted(f'{assets}/train.parquet')}",
        f"data.val_files={quoted(f'{assets}/test.parquet')}",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.model.path={quoted(f'{assets}/model')}",
        *SIZES,
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(scoring if scorer else ()),
        "trainer.total_epochs=10",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *more,
    ]


def check_error(run, message):
    """One readable message, the last that the run says, and exit code 1."""
    assert run.exit_code == 1, run.last_lines()
    raised = [
        line
        for line in run.output.splitlines()
        # Ray may show what a worker logged after the trainer's own message
        if re.search(r"Error: ", line) and not line.startswith("(RewardLoopWorker ")
    ]
    assert re.search(message, raised[-1]), raised[-3:]
