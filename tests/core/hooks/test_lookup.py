"""Where verl asks for gdpo. tests/test_plugin.py asks in processes that load the plugin anew."""

import sys

import pytest
from omegaconf import OmegaConf
from stand_in import stand_in
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import need_critic

from verl_gdpo.hooks import lookup, refusal
from verl_gdpo.hooks.estimator import compute_gdpo
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.plugin import EXTENSIONS

find_estimator = stand_in(
    lookup.find_estimator, lambda name_or_enum: f"verl's {name_or_enum}", like=get_adv_estimator_fn
)
find_manager = stand_in(
    lookup.find_manager, lambda name: f"verl's {name}", like=get_reward_manager_cls
)
refuse_configuration = stand_in(
    lookup.refuse_configuration, lambda config: "verl goes on", like=need_critic
)


def named(estimator, **others):
    return OmegaConf.create({"algorithm": {"adv_estimator": estimator}, **others})


def test_gdpo_is_ours_and_any_other_name_verls():
    assert find_estimator("gdpo") is compute_gdpo
    assert find_manager("gdpo") is GdpoRewardManager
    assert find_estimator(name_or_enum="grpo") == "verl's grpo"
    assert find_manager("dapo") == "verl's dapo"
    assert refuse_configuration(named("gdpo")) == "verl goes on"


def test_a_refused_gdpo_stops_whoever_names_it(monkeypatch):
    monkeypatch.setattr(refusal, "refusals", ["a reason"])
    monkeypatch.setattr(lookup, "refusals", refusal.refusals)
    reward = {"reward_manager": {"name": "gdpo"}}
    for ask, given in (
        (find_estimator, "gdpo"),
        (find_manager, "gdpo"),
        (refuse_configuration, named("gdpo")),
        (refuse_configuration, named("grpo", reward=reward)),
    ):
        with pytest.raises(RuntimeError, match=r"^verl-gdpo cannot run: a reason$"):
            ask(given)
    assert find_estimator("grpo") == "verl's grpo"
    assert find_manager("naive") == "verl's naive"
    assert refuse_configuration(named("grpo")) == "verl goes on"


@pytest.mark.parametrize(
    ("loaded", "is_v1", "used"),
    [
        ("", True, {"v1"}),
        ("", False, {"legacy"}),
        # The asynchronous trainers are legacy trainers, whatever the configuration says.
        ("verl.experimental.fully_async_policy", False, {"legacy", "async"}),
        ("verl.experimental.fully_async_policy", True, {"v1", "legacy", "async"}),
        ("verl.experimental.one_step_off_policy", True, {"v1", "legacy"}),
    ],
)
def test_which_rows_a_run_uses(monkeypatch, loaded, is_v1, used):
    for name in ("fully_async_policy", "one_step_off_policy"):
        monkeypatch.delitem(sys.modules, f"verl.experimental.{name}", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, loaded, sys)
    of_trainer = {
        "v1": "PPOTrainer._compute_advantage",
        "legacy": "RayPPOTrainer._log_rollout_data",
        "async": "FullyAsyncTrainer.fit",
    }
    rows = {each.path: each for each in EXTENSIONS}
    found = {name for name, path in of_trainer.items() if lookup._is_used(rows[path], is_v1)}
    assert found == used
    assert lookup._is_used(rows["compute_advantage"], is_v1)
