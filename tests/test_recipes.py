"""Every recipe composes on verl's own configuration and passes verl's validation and ours."""

import itertools
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_gdpo.check import compose_config
from verl_gdpo.settings import GdpoSettings, settings_of_run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def names(group):
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


def composed(*overrides):
    return compose_config(RECIPES, "train", list(overrides))


def flat(config, prefix=""):
    """{dotted key: value} of a resolved configuration."""
    result = {}
    for key, value in OmegaConf.to_container(config, resolve=True).items():
        if isinstance(value, dict):
            result |= flat(OmegaConf.create(value), f"{prefix}{key}.")
        else:
            result[prefix + str(key)] = value
    return result


@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")
@pytest.mark.parametrize(
    ("task", "hardware", "estimator"),
    list(itertools.product(names("task"), names("hardware"), names("estimator"))),
)
def test_every_combination_is_valid(task, hardware, estimator):
    config = composed(f"task={task}", f"hardware={hardware}", f"estimator={estimator}")
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert settings_of_run(config) == GdpoSettings()
    assert config.algorithm.adv_estimator == estimator
    assert not need_critic(config)


@pytest.mark.parametrize("hardware", names("hardware"))
def test_the_arms_differ_in_one_key(hardware):
    arms = [flat(composed(f"hardware={hardware}", f"estimator={e}")) for e in ("gdpo", "grpo")]
    differing = {key for key in arms[0] if arms[0][key] != arms[1][key]}
    names_of_the_run = {key for key in differing if key.endswith(".experiment_name")}
    assert differing - names_of_the_run == {"algorithm.adv_estimator"}
    assert arms[0].keys() == arms[1].keys()


@pytest.mark.parametrize("hardware", ["8gpu", "1gpu"])
def test_the_papers_settings(hardware):
    config = composed("task=tool_rl", f"hardware={hardware}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (512, 4, 128)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 1024)
    assert (actor.optim.lr, actor.clip_ratio) == (1e-6, 0.2)
    assert 3920 // config.data.train_batch_size * config.trainer.total_epochs == 105
    assert actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    assert config.data.filter_overlong_prompts


def test_scripts_hold_no_hyperparameter():
    script = (RECIPES.parent / "run_tool_rl.sh").read_text()
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    assert re.findall(r"[a-z_]+\.[\w.]+=\S+|--\S+[ =]\d\S*", code) == []
