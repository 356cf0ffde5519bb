"""The settings of a whole run: which parts are ours, what scorers declare, and what is refused."""

from dataclasses import replace

import pytest
from added_task import add_task
from run_config import run_config

from verl_gdpo import tasks as rewards
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run


def test_a_run_that_uses_neither_part_is_left_alone():
    config = run_config(
        **{
            "algorithm.adv_estimator": "grpo",
            "reward.reward_manager.name": "naive",
            "algorithm.use_kl_in_reward": True,
            "reward.reward_model.enable": True,
        }
    )
    assert settings_of_run(config) is None
    config.algorithm.adv_estimator = "GRPO"  # verl refuses it
    assert settings_of_run(config) is None


def test_whether_the_manager_is_ours_may_be_known_better_than_by_its_name():
    grpo = {"algorithm.adv_estimator": "grpo"}
    other = run_config(**grpo, **{"reward.reward_manager.name": "mine"})
    assert settings_of_run(other, has_manager=True) is not None
    assert settings_of_run(other, has_manager=False) is None
    assert settings_of_run(run_config(**grpo), has_manager=False) is None


def test_filtering_is_refused_where_a_step_has_no_weight():
    scheduled = {"algorithm.gdpo": {"rewards": {"a": {"weight": {0: 1, 100: 0}}}}}
    assert settings_of_run(run_config(**scheduled)) is not None
    scheduled["algorithm.filter_groups.enable"] = True
    assert settings_of_run(run_config(**scheduled, **{"trainer.total_training_steps": 99}))
    for steps in (None, 100):
        with pytest.raises(ValueError, match=r"all weights are 0 at step 100.*filter_groups"):
            settings_of_run(run_config(**scheduled, **{"trainer.total_training_steps": steps}))


def test_bounds_are_asked_for_where_a_variant_needs_them():
    named = {"algorithm.gdpo": {"rewards": {"a": 1.0}}}
    assert settings_of_run(run_config(**named)).names == ["a"]
    named["algorithm.gdpo"]["combine"] = "sa_mrpo"
    with pytest.raises(ValueError, match="sa_mrpo needs the bounds of reward 'a'"):
        settings_of_run(run_config(**named))
    # the other arm does not use the variant
    assert settings_of_run(run_config(**named, **{"algorithm.adv_estimator": "grpo"})) is not None


def test_the_grpo_arm_may_have_kl_in_the_reward():
    config = run_config(**{"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True})
    assert replace(settings_of_run(config), bounds={}) == GdpoSettings()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.use_kl_in_reward": True}, "use actor_rollout_ref.actor.use_kl_loss=True"),
        ({"reward.reward_model.enable": True}, "colocated reward model"),
        ({"algorithm.adv_estimator": "GDPO"}, "=GDPO: unknown to verl; did you mean 'gdpo'"),
        ({"algorithm.adv_estimator": "Grpo"}, "=Grpo: unknown to verl; did you mean 'grpo'"),
        ({"actor_rollout_ref.rollout.n": 1}, "a group of one sample has no spread"),
        (
            {
                "actor_rollout_ref.rollout.name": "vllm",
                "actor_rollout_ref.rollout.full_determinism": True,
            },
            "gives all samples of a prompt one seed",
        ),
        (
            {
                "reward.reward_model.enable": True,
                "reward.reward_model.enable_resource_pool": True,
            },
            "Set a custom reward function",
        ),
        (
            {"reward.reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}},
            r"reward_kwargs.overlong_buffer_cfg: no scorer .*'max_correctness'.* ~reward",
        ),
        (
            {
                "reward.reward_kwargs": {"max_correctness": 2},
                "reward.custom_reward_function.path": "mine.py",
            },
            "functions of your own, nothing reads them",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of_run(run_config(**changes))


def test_bounds_of_a_run():
    scorers = {"format": (0.0, 1.0), "correctness": (-3.0, 3.0)}
    aliases = {"format_reward": (0.0, 1.0), "accuracy_reward": (-3.0, 3.0)}
    # before the rows are known, those on which all tasks agree
    assert settings_of_run(run_config()).bounds["format"] == (0.0, 1.0)
    assert settings_of_run(run_config(), ["rlla"]).bounds == {**scorers, **aliases}
    assert settings_of_run(run_config(), ["other"]).bounds == {}
    # options of the scorer, and what the user says himself
    config = run_config(
        **{
            "reward.reward_kwargs": {"max_correctness": 1},
            "algorithm.gdpo.rewards": {
                "format": {"bounds": [-1, 2]},
                "mine": {"bounds": [0, 9]},
                "correctness": 1,
            },
        }
    )
    bounds = settings_of_run(config, ["rlla", "other"]).bounds
    assert bounds["correctness"] == (-1, 1)
    assert (bounds["format"], bounds["mine"]) == ((-1, 2), (0, 9))
    # another scorer, another manager: nothing is known of their rewards
    custom = run_config(**{"reward.custom_reward_function.path": "rewards.py"})
    naive = run_config(**{"reward.reward_manager.name": "naive"})
    assert settings_of_run(custom).bounds == settings_of_run(naive).bounds == {}


def test_bounds_on_which_data_sources_disagree(monkeypatch):
    scored = {"correctness": 1.0}
    bounds = {"correctness": (0.0, 1.0)}
    add_task(monkeypatch, "gsm", lambda response, truth, **_: scored, lambda: bounds)
    named = {"correctness": 1.0, "format": None}
    config = run_config(**{"algorithm.gdpo.combine": "sa_mrpo", "algorithm.gdpo.rewards": named})
    assert "correctness" not in settings_of_run(config).bounds
    assert settings_of_run(config, ["gsm"]).bounds == {"correctness": (0.0, 1.0)}
    assert settings_of_run(config, ["rlla"]).bounds["correctness"] == (-3.0, 3.0)
    with pytest.raises(ValueError, match="reward 'correctness', and nothing declares them"):
        settings_of_run(config, ["rlla", "gsm"])


def test_options_of_one_scorer_do_not_concern_another(monkeypatch):
    def score(response, truth, *, strict=False, response_tokens=None, step=None):
        return {"exact": 1.0}

    add_task(monkeypatch, "gsm", score, lambda strict=False: {"exact": (0.0, 1.0 + strict)})
    assert rewards.declared_bounds(["gsm"], {"strict": True}) == {"exact": (0.0, 2.0)}
    assert rewards.declared_bounds(["gsm"], {"lenght": True}) == {}
    bounds = rewards.declared_bounds(["gsm", "rlla"], {"max_correctness": 2})
    assert (bounds["exact"], bounds["correctness"]) == ((0.0, 1.0), (-2.0, 2.0))
    both = {"strict": True, "max_correctness": 2, "lenght": True}
    assert rewards.options_for("gsm", both) == {"strict": True, "lenght": True}
    assert rewards.options_for("rlla", both) == {"max_correctness": 2, "lenght": True}
    rewards.check_options({"strict": True, "max_correctness": 2}, ["gsm", "rlla", "verl's"])
    for sources in (["gsm"], ["verl's"], []):
        with pytest.raises(ValueError, match=r"reward_kwargs.max_correctness: no scorer of the"):
            rewards.check_options({"max_correctness": 2}, sources)


def test_options_for_the_scorer_of_no_training_row():
    config = run_config(**{"reward.reward_kwargs": {"max_correctness": 2}})
    assert settings_of_run(config, ["rlla"]) is not None
    with pytest.raises(ValueError, match="verl scores them, without options"):
        settings_of_run(config, ["openai/gsm8k"])
    naive = run_config(
        **{"reward.reward_manager.name": "naive", "reward.reward_kwargs": {"anything": 1}}
    )
    assert settings_of_run(naive) is not None


def test_sa_mrpo_without_bounds_is_refused_before_training():
    changes = {
        "algorithm.gdpo.combine": "sa_mrpo",
        "algorithm.gdpo.rewards": {"format": 1.0, "mine": 1.0},
    }
    with pytest.raises(ValueError, match=r"reward 'mine'.*algorithm.gdpo.rewards.mine="):
        settings_of_run(run_config(**changes))
    changes["algorithm.gdpo.rewards"]["mine"] = {"weight": 1.0, "bounds": [0, 2]}
    assert settings_of_run(run_config(**changes)).bounds["mine"] == (0.0, 2.0)
    changes["algorithm.gdpo.rewards"]["mine"] = 0.0
    settings_of_run(run_config(**changes))
