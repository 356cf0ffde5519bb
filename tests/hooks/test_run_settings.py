"""The settings of a whole run: which parts are ours, what scorers declare, and what is refused."""

from dataclasses import replace

import pytest
from added_task import add_task
from run_config import run_config

from verl_gdpo import tasks as rewards
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run

ROLLOUT, MODEL, KWARGS = "actor_rollout_ref.rollout", "reward.reward_model", "reward.reward_kwargs"
MANAGER, PATH = "reward.reward_manager.name", "reward.custom_reward_function.path"
GRPO, NAIVE = {"algorithm.adv_estimator": "grpo"}, {MANAGER: "naive"}


def test_a_run_that_uses_neither_part_is_left_alone():
    refused = {"algorithm.use_kl_in_reward": True, f"{MODEL}.enable": True}
    config = run_config(**GRPO, **NAIVE, **refused)
    assert settings_of_run(config) is None
    config.algorithm.adv_estimator = "GRPO"  # verl refuses it
    assert settings_of_run(config) is None


def test_whether_the_manager_is_ours_may_be_known_better_than_by_its_name():
    other = run_config(**GRPO, **{MANAGER: "mine"})
    assert settings_of_run(other, has_manager=True) is not None
    assert settings_of_run(other, has_manager=False) is None
    assert settings_of_run(run_config(**GRPO), has_manager=False) is None


def test_filtering_is_refused_where_a_step_has_no_weight():
    scheduled = {"algorithm.gdpo": {"rewards": {"a": {"weight": {0: 1, 100: 0}}}}}
    assert settings_of_run(run_config(**scheduled)) is not None
    scheduled["algorithm.filter_groups.enable"] = True
    assert settings_of_run(run_config(**scheduled, **{"trainer.total_training_steps": 99}))
    for steps in (None, 100):
        with pytest.raises(ValueError, match=r"all weights are 0 at step 100.*filter_groups"):
            settings_of_run(run_config(**scheduled, **{"trainer.total_training_steps": steps}))


def test_bounds_are_asked_for_where_a_variant_needs_them():
    rewards = {"format": 1.0, "mine": 1.0}
    named = {"algorithm.gdpo": {"rewards": rewards}}
    assert settings_of_run(run_config(**named)).names == ["format", "mine"]
    named["algorithm.gdpo"]["combine"] = "sa_mrpo"
    message = r"sa_mrpo needs the bounds of reward 'mine'.*algorithm.gdpo.rewards.mine="
    with pytest.raises(ValueError, match=message):
        settings_of_run(run_config(**named))
    # the other arm does not use the variant
    assert settings_of_run(run_config(**named, **GRPO)) is not None
    rewards["mine"] = {"weight": 1.0, "bounds": [0, 2]}
    assert settings_of_run(run_config(**named)).bounds["mine"] == (0.0, 2.0)
    rewards["mine"] = 0.0
    settings_of_run(run_config(**named))


def test_the_grpo_arm_may_have_kl_in_the_reward():
    config = run_config(**GRPO, **{"algorithm.use_kl_in_reward": True})
    assert replace(settings_of_run(config), bounds={}) == GdpoSettings()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.use_kl_in_reward": True}, "use actor_rollout_ref.actor.use_kl_loss=True"),
        ({f"{MODEL}.enable": True}, "colocated reward model"),
        ({"algorithm.adv_estimator": "GDPO"}, "=GDPO: unknown to verl; did you mean 'gdpo'"),
        ({"algorithm.adv_estimator": "Grpo"}, "=Grpo: unknown to verl; did you mean 'grpo'"),
        ({f"{ROLLOUT}.n": 1}, "a group of one sample has no spread"),
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.full_determinism": True},
            "gives all samples of a prompt one seed",
        ),
        ({f"{MODEL}.enable": True, f"{MODEL}.enable_resource_pool": True}, "Set a custom reward f"),
        (
            {KWARGS: {"overlong_buffer_cfg": {"enable": True}}},
            r"reward_kwargs.overlong_buffer_cfg: no scorer .*'max_correctness'.* ~reward",
        ),
        ({KWARGS: {"max_correctness": 2}, PATH: "mine.py"}, "functions of your own, nothing reads"),
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
            KWARGS: {"max_correctness": 1},
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
    custom = run_config(**{PATH: "rewards.py"})
    assert settings_of_run(custom).bounds == settings_of_run(run_config(**NAIVE)).bounds == {}


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
    config = run_config(**{KWARGS: {"max_correctness": 2}})
    assert settings_of_run(config, ["rlla"]) is not None
    with pytest.raises(ValueError, match="verl scores them, without options"):
        settings_of_run(config, ["openai/gsm8k"])
    assert settings_of_run(run_config(**NAIVE, **{KWARGS: {"anything": 1}})) is not None
