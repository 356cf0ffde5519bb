"""Every setting that GDPO reads, and every configuration that it must refuse, by its message."""

import re
from dataclasses import replace

import pytest
from added_task import add_task
from omegaconf import OmegaConf
from run_config import run_config

from verl_gdpo import tasks as rewards
from verl_gdpo.algorithm.reward_terms import Condition, RewardTerm
from verl_gdpo.algorithm.settings import CombineSetting, GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run


def read(**algorithm):
    return GdpoSettings.from_algorithm(OmegaConf.create(algorithm))


def test_defaults_are_the_paper():
    assert read() == GdpoSettings(
        rewards=None, group_norm="per_reward", batch_norm="sample", eps=1e-4, normalize_by_std=True
    )


def test_everything_set():
    settings = read(
        norm_adv_by_std_in_grpo=False,
        gdpo={
            "rewards": {"format": 1, "correctness": 0.5},
            "group_norm": "summed",
            "batch_norm": "token",
            "eps": 1e-6,
            "normalize_by_std": False,
        },
    )
    terms = {"format": RewardTerm(1.0), "correctness": RewardTerm(0.5)}
    assert settings == GdpoSettings(terms, "summed", "token", 1e-6, False)


def test_verls_own_keys():
    assert read(gdpo_reward_keys=["b", "a"]).rewards == {"b": RewardTerm(), "a": RewardTerm()}
    terms = read(gdpo_reward_keys=["b", "a"], gdpo_reward_weights=[2, 1]).rewards
    assert list(terms.items()) == [("b", RewardTerm(2.0)), ("a", RewardTerm(1.0))]


def test_a_reward_on_a_condition():
    condition = {"reward": "correctness", "at_least": 1}
    term = read(gdpo={"rewards": {"length": {"when": condition}}}).rewards["length"]
    assert term == RewardTerm(1.0, Condition("correctness", 1.0), "zero")
    settings = read(
        gdpo={
            "rewards": {
                "a": {
                    "weight": 0.5,
                    "when": {"reward": "b", "at_least": 0},
                    "otherwise": "missing",
                },
                "b": {"when": {"reward": "c", "at_least": 0}},
            }
        }
    )
    assert settings.rewards["a"] == RewardTerm(0.5, Condition("b", 0.0), "missing")
    assert settings.names == ["a", "b", "c"]  # a condition may read what is not trained on


def test_std_is_inherited():
    assert read(norm_adv_by_std_in_grpo=False).normalize_by_std is False
    assert read(norm_adv_by_std_in_grpo=True, gdpo={"normalize_by_std": None}).normalize_by_std


@pytest.mark.parametrize(
    ("step", "weight"),
    [(0, 1.0), (10, 1.0), (20, 0.75), (30, 0.5), (40, 1.5), (50, 2.5), (99, 2.5)],
)
def test_a_schedule_of_weights(step, weight):
    # 1 until step 10, down to .5 at 30, up to 2.5 at 50, and so on for ever
    points = {30: 0.5, 10: 1, 50: 2.5}
    term = read(gdpo={"rewards": {"a": {"weight": points}}}).rewards["a"]
    assert term.weight_at(step) == weight


def test_a_schedule_needs_the_step():
    term = read(gdpo={"rewards": {"a": {"weight": {0: 1.0}}}}).rewards["a"]
    with pytest.raises(ValueError, match=r"needs the training step.* set a number as weight"):
        term.weight_at(None)
    assert RewardTerm(2.0).weight_at(None) == 2.0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"gdpo": {"batchnorm": "none"}}, "gdpo.batchnorm: unknown setting; did you mean"),
        ({"gdpo": ["format"]}, "algorithm.gdpo: expected a mapping"),
        ({"gdpo": {"batch_norm": "tokens"}}, "algorithm.gdpo.batch_norm: expected one of"),
        ({"gdpo": {"group_norm": None}}, "algorithm.gdpo.group_norm: expected one of"),
        ({"gdpo": {"eps": "small"}}, "algorithm.gdpo.eps: expected a finite number"),
        ({"gdpo": {"eps": -1.0}}, "algorithm.gdpo.eps: expected at least 0"),
        (
            {"gdpo": {"rewards": ["format"]}},
            "algorithm.gdpo.rewards: got ['format']; expected {name: weight}",
        ),
        (
            {"gdpo": {"rewards": {}}},
            "algorithm.gdpo.rewards: expected at least one reward with a weight",
        ),
        (
            {"gdpo": {"rewards": {"a": 0, "b": 0.0}}},
            "algorithm.gdpo.rewards: expected at least one reward with a weight; all weights are 0",
        ),
        ({"gdpo": {"rewards": {"a": float("nan")}}}, "rewards.a.weight: expected a finite number"),
        ({"gdpo": {"rewards": {"a": True}}}, "rewards.a.weight: expected a finite number"),
        ({"gdpo": {"rewards": {"score": 1}}}, "'score' is verl's name for the sum"),
        (
            {"gdpo": {"rewards": {"a": {"wieght": 1}}}},
            "algorithm.gdpo.rewards.a.wieght: unknown setting; did you mean 'weight'?",
        ),
        ({"gdpo": {"rewards": {"a": {"weight": {}}}}}, "rewards.a.weight: expected {step: weight}"),
        (
            {"gdpo": {"rewards": {"a": {"weight": {-1: 1.0}}}}},
            "rewards.a.weight.-1: expected at least 0, got -1",
        ),
        (
            {"gdpo": {"rewards": {"a": {"weight": {"first": 1.0}}}}},
            "rewards.a.weight.first: expected a whole number, a training step, got 'first'",
        ),
        (
            {"gdpo": {"rewards": {"a": {"weight": {0: 1.0, 9: float("inf")}}}}},
            "rewards.a.weight.9: expected a finite number, got inf",
        ),
        (
            {"gdpo": {"rewards": {"a": {"weight": {0: 0.0, 9: 0.0}}, "b": 0.0}}},
            "algorithm.gdpo.rewards: expected at least one reward with a weight; all weights are 0",
        ),
        (
            {"gdpo": {"rewards": {"a": {"when": {"reward": "b"}}}}},
            "rewards.a.when.at_least: expected {reward: NAME, at_least: NUMBER}",
        ),
        (
            {"gdpo": {"rewards": {"a": {"when": {"reward": "a", "at_least": 1}}}}},
            "rewards.a.when.reward: expected another reward than 'a'",
        ),
        (
            {"gdpo": {"rewards": {"a": {"when": {"reward": "b", "at_least": "1"}}}}},
            "rewards.a.when.at_least: expected a finite number, got '1'",
        ),
        (
            {"gdpo": {"rewards": {"a": {"otherwise": "zero"}}}},
            "a.otherwise needs a.when",
        ),
        (
            {
                "gdpo": {
                    "rewards": {
                        "a": {"when": {"reward": "b", "at_least": 1}, "otherwise": "drop"},
                    }
                }
            },
            "rewards.a.otherwise: expected one of ['zero', 'missing'], got 'drop'",
        ),
        (
            {"gdpo": {"normalize_by_std": False}, "norm_adv_by_std_in_grpo": True},
            "algorithm.gdpo.normalize_by_std=False contradicts",
        ),
        ({"gdpo": {"normalize_by_std": 1}}, "normalize_by_std: expected true, false or null"),
        ({"gdpo_reward_keys": ["a", "b", "a"]}, "gdpo_reward_keys: expected a list of different"),
        ({"gdpo_reward_keys": "a"}, "gdpo_reward_keys: expected a list of different names"),
        ({"gdpo_reward_keys": []}, "gdpo_reward_keys: expected at least one reward with"),
        (
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1]},
            "gdpo_reward_weights: expected 2 numbers",
        ),
        ({"gdpo_reward_weights": [1]}, "gdpo_reward_keys: expected a list of different"),
        (
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, "heavy"]},
            "algorithm.gdpo_reward_weights.b.weight: expected a finite number, got 'heavy'",
        ),
        (
            {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": [0]},
            "algorithm.gdpo_reward_weights: expected at least one reward with a weight",
        ),
        (
            {"gdpo_reward_keys": ["a/b"], "gdpo_reward_weights": [1]},
            "algorithm.gdpo_reward_keys.a/b",
        ),
        (
            {"gdpo_reward_keys": ["a"], "gdpo": {"rewards": {"a": 1}}},
            "say the same thing; give one of them",
        ),
    ],
)
def test_refused_with_the_key_and_the_reason(algorithm, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(**algorithm)


def test_terms_for_what_a_scorer_returned():
    returned = ["score", "correctness", "format"]
    every = {"correctness": RewardTerm(), "format": RewardTerm()}
    assert read().terms_for(returned) == every
    assert read(gdpo={"rewards": {"format": 2}}).terms_for(returned) == {"format": RewardTerm(2.0)}
    with pytest.raises(ValueError, match=r"reward 'formt' is configured.*did you mean 'format'"):
        read(gdpo={"rewards": {"formt": 1}}).terms_for(returned)
    with pytest.raises(ValueError, match=r"reward 'corectness' is configured.*'correctness'\?"):
        condition = {"reward": "corectness", "at_least": 1}
        read(gdpo={"rewards": {"format": {"when": condition}}}).terms_for(returned)
    with pytest.raises(ValueError, match="no named reward"):
        read().terms_for(["score"])


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
            r"reward_kwargs.overlong_buffer_cfg: no scorer .*'granularity'.* ~reward.reward_kwargs",
        ),
        (
            {
                "reward.reward_kwargs": {"length": True},
                "reward.custom_reward_function.path": "mine.py",
            },
            "custom_reward_function.path set, nothing reads them",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of_run(run_config(**changes))


# --- variants, bounds, dialects ------------------------------------------------------------------


def test_combine():
    assert read(gdpo={"combine": "sum"}).combine is None
    assert read(gdpo={"combine": {"name": "sum"}}).combine is None
    assert read(gdpo={"combine": "dara"}).combine == CombineSetting("dara", {})
    setting = {"name": "dara", "mode": "asymmetric", "maximum": 3}
    expected = CombineSetting("dara", {"mode": "asymmetric", "maximum": 3})
    assert read(gdpo={"combine": setting}).combine == expected
    assert read(gdpo={"combine": "dvao"}).combine == CombineSetting("dvao", {})
    without_std = read(gdpo={"combine": "dara"}, norm_adv_by_std_in_grpo=False)
    assert without_std.combine == CombineSetting("dara", {})


@pytest.mark.parametrize(
    ("gdpo", "message"),
    [
        (
            {"combine": "rvp"},
            "gdpo.combine: got 'rvp'; expected one of ['sum', 'rvpo', 'dara', 'sa_mrpo',",
        ),
        ({"combine": "rvp"}, "did you mean 'rvpo'?"),
        ({"combine": {"k": 1}}, "gdpo.combine: got {'k': 1}; expected one of ['sum'"),
        (
            {"combine": "rvpo"},
            "missing 1 required keyword-only argument: 'k'; rvpo takes ['k'], as in {name: ",
        ),
        (
            {"combine": "gd2po"},
            "missing 1 required keyword-only argument: 'tau'; gd2po takes ['tau']",
        ),
        (
            {"combine": {"name": "rvpo", "K": 1}},
            "got an unexpected keyword argument 'K'; rvpo takes ['k']",
        ),
        (
            {"combine": {"name": "sum", "k": 1}},
            "gdpo.combine: got {'name': 'sum', 'k': 1}; expected",
        ),
        (
            {"combine": {"name": "sa_mrpo", "bounds_K": []}},
            "for keyword argument 'bounds_K'; sa_mrpo takes",
        ),
        (
            {"combine": {"name": "rvpo", "k": -1}},
            "gdpo.combine: rvpo k: expected a number above 0, got -1",
        ),
        ({"combine": {"name": "rvpo", "k": True}}, "rvpo k: expected a number above 0, got True"),
        ({"combine": {"name": "dara", "mode": "both"}}, "dara mode: expected one of"),
        (
            {"combine": {"name": "gd2po", "tau": 2}},
            "gd2po tau: expected a number at least 0 and at most 1, got 2",
        ),
        (
            {"combine": "dvao", "rewards": {"a": 1, "b": {"weight": {0: 1.0, 9: -1.0}}}},
            "gdpo.combine: dvao: expected weights of 0 or more, got [1.0, -1.0]",
        ),
        (
            {"combine": "dvao", "rewards": {"a": -0.1}},
            "gdpo.combine: dvao: expected weights of 0 or more, got [-0.1]",
        ),
        ({"combine": "dara", "group_norm": "summed"}, "combine=dara with group_norm=summed"),
        (
            {"rewards": {"a": {"bounds": 1}}},
            "rewards.a.bounds: expected [lowest, highest], got 1",
        ),
        (
            {"rewards": {"a": {"bounds": [1, 1]}}},
            "rewards.a.bounds: got [1, 1]; expected the lowest",
        ),
        ({"rewards": {"a": {"bounds": [0, float("inf")]}}}, "a.bounds.1: expected a finite number"),
        ({"dialect": "TRL"}, "gdpo.dialect: expected one of ['paper', 'trl', 'nemo_rl',"),
        (
            {"dialect": "nemo_rl", "eps": 1e-4},
            "algorithm.gdpo.eps=0.0001 contradicts algorithm.gdpo.dialect=nemo_rl, which stands "
            "for eps=1e-06; leave one of them out",
        ),
        ({"dialect": "trl", "batch_norm": "token"}, "gdpo.batch_norm=token contradicts"),
        ({"dialect": "verl_builtin", "batch_eps": 1e-4}, "gdpo.batch_eps=0.0001 contradicts"),
        ({"dialect": "paper", "batch_eps": 0}, "which stands for batch_eps=null"),
        ({"dialect": "nemo_rl", "batch_var_eps": 1e-8}, "gdpo.batch_var_eps=1e-08 contradicts"),
        (
            {"dialect": "trl", "combine": "dara"},
            "gdpo.combine=dara contradicts algorithm.gdpo.dial",
        ),
        ({"batch_eps": -1.0}, "algorithm.gdpo.batch_eps: expected at least 0, got -1.0"),
        ({"batch_eps": "x"}, "algorithm.gdpo.batch_eps: expected a finite number, got 'x'"),
        ({"batch_var_eps": -1.0}, "algorithm.gdpo.batch_var_eps: expected at least 0, got -1.0"),
    ],
)
def test_refused_variants_and_dialects(gdpo, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(gdpo=gdpo)


@pytest.mark.parametrize(
    ("gdpo", "message"),
    [
        ({"combine": "dvao"}, "algorithm.norm_adv_by_std_in_grpo=False would do nothing"),
        ({"dialect": "trl"}, "algorithm.norm_adv_by_std_in_grpo=False contradicts algorithm.gdpo"),
        (
            {"dialect": "trl", "normalize_by_std": False},
            "algorithm.gdpo.normalize_by_std=False contradicts algorithm.gdpo.dialect=trl",
        ),
    ],
)
def test_what_contradicts_the_inherited_std(gdpo, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(norm_adv_by_std_in_grpo=False, gdpo=gdpo)


def test_dialects_are_named_values():
    assert read(gdpo={"dialect": "paper"}) == read(gdpo={"dialect": "trl"}) == GdpoSettings()
    assert read(gdpo={"dialect": "nemo_rl"}) == GdpoSettings(eps=1e-6, batch_eps=0.0)
    builtin = GdpoSettings(batch_norm="token", eps=1e-6, batch_eps=0.0, batch_var_eps=1e-8)
    assert read(gdpo={"dialect": "verl_builtin"}) == builtin
    # the same value beside it is no contradiction
    same = {"dialect": "verl_builtin", "batch_norm": "token", "eps": 1e-6, "batch_eps": 0}
    assert read(gdpo=same) == builtin
    assert read(gdpo={"eps": 1e-5, "batch_eps": 1e-5}) == read(gdpo={"eps": 1e-5})


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
            "reward.reward_kwargs": {"max_correctness": 1, "length": True},
            "algorithm.gdpo.rewards": {
                "format": {"bounds": [-1, 2]},
                "mine": {"bounds": [0, 9]},
                "correctness": 1,
                "length": None,
            },
        }
    )
    bounds = settings_of_run(config, ["rlla", "other"]).bounds
    assert (bounds["correctness"], bounds["length"]) == ((-1, 1), (0, 1))
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
    rewards.check_options({"strict": True, "length": True}, ["gsm", "rlla", "verl's"])
    for sources in (["gsm"], ["verl's"], []):
        with pytest.raises(ValueError, match=r"reward_kwargs.length: no scorer of the training"):
            rewards.check_options({"length": True}, sources)


def test_options_for_the_scorer_of_no_training_row():
    config = run_config(**{"reward.reward_kwargs": {"length": True}})
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
