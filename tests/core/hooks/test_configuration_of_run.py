"""The settings of a whole run: which parts are ours, what scorers declare, and what is refused."""

from dataclasses import replace

import pytest
from added_task import add_task
from run_config import run_config

from verl_gdpo.algorithm.settings import GdpoSettings, SettingsError
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.tasks import TaskError, declared_bounds, mistakes_of_options, options_for

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


FILTERS = {"algorithm.filter_groups.enable": True}


@pytest.mark.parametrize(
    ("gdpo", "changes", "message"),
    [
        ({"keep_groups": {"a": [0.1, 0.9]}}, FILTERS, None),
        ({"keep_groups": {"a": [0.1, 0.9]}, "rewards": {"a": 0.0, "b": 1.0}}, FILTERS, None),
        ({"keep_groups": None}, {}, None),
        (
            {"keep_groups": {"a": [0.1, 0.9]}},
            {},
            r"keep_groups without dynamic sampling.*filter_groups.enable=True .*metric=reward",
        ),
        (
            {"keep_groups": {"a": [0.1, 0.9]}},
            {**FILTERS, **GRPO},
            r"keep_groups with adv_estimator=grpo: verl's own rule filters",
        ),
        (
            {"keep_groups": {"rihgt": [0.1, 0.9]}, "rewards": {"right": 1.0}},
            FILTERS,
            r"keep_groups.rihgt: algorithm.gdpo.rewards does not name it; did you mean 'right'",
        ),
        (
            {"keep_groups": {"a": [2, 3]}, "rewards": {"a": {"bounds": [0, 1]}}},
            FILTERS,
            r"keep_groups.a=\[2, 3\]: its values are from 0 to 1, so every group would be dropped",
        ),
    ],
)
def test_where_groups_cannot_be_kept_by_a_mean(gdpo, changes, message):
    config = run_config(**{"algorithm.gdpo": gdpo}, **changes)
    if message is None:
        assert settings_of_run(config) is not None
        return
    with pytest.raises(ValueError, match=message):
        settings_of_run(config)


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
    summed = ("use_kl_in_reward", "use_pf_ppo")
    config = run_config(**GRPO, **{f"algorithm.{key}": True for key in summed})
    assert replace(settings_of_run(config), bounds={}) == GdpoSettings()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.use_kl_in_reward": True}, "use actor_rollout_ref.actor.use_kl_loss=True"),
        (
            {"algorithm.reward_variance_filtering": {"enable": True}},
            r"reward_variance_filtering.enable=True .* if the sum of its rewards does not vary",
        ),
        ({"algorithm.use_pf_ppo": True}, "use_pf_ppo=True .* for the estimator gae alone"),
        (
            {MANAGER: "dapo", KWARGS: {"overlong_buffer_cfg": {"enable": True}}},
            "manager dapo adds this penalty to the sum, which gdpo does not use",
        ),
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


@pytest.mark.parametrize(
    ("changes", "sources", "words"),
    [
        # of the method, the estimator, the rollouts and the reward model
        (
            {
                "algorithm.gdpo": {"batchnorm": "none", "epss": 1},
                "algorithm.use_kl_in_reward": True,
                f"{ROLLOUT}.n": 1,
                f"{MODEL}.enable": True,
            },
            ["rlla"],
            [
                "algorithm.gdpo.batchnorm: unknown setting",
                "algorithm.gdpo.epss: unknown setting",
                "algorithm.use_kl_in_reward=True with adv_estimator=gdpo",
                "actor_rollout_ref.rollout.n=1 with adv_estimator=gdpo",
                "reward.reward_model.enable=True with enable_resource_pool=False",
                "reward.reward_model.enable=True with reward.custom_reward_function.path=null",
            ],
        ),
        # a misspelt estimator does not hide what is said of the one that is meant
        (
            {"algorithm.adv_estimator": "GDPO", f"{ROLLOUT}.n": 1},
            ["rlla"],
            ["algorithm.adv_estimator=GDPO: unknown to verl", "actor_rollout_ref.rollout.n=1 with"],
        ),
        # of the scorers: options, a service, and rewards of which nothing is said
        (
            {
                KWARGS: {"lenght": True, "stict": True},
                "reward.sandbox_fusion": {"url": "http://h/run_code"},
                "algorithm.gdpo": {"eps": "small", "rewards": {"format": "1"}},
            },
            ["rlla", "verl_gdpo/coding"],
            [
                "algorithm.gdpo.eps: got 'small'",
                "algorithm.gdpo.rewards.format.weight: got '1'",
                "reward.reward_kwargs.lenght: no scorer of the training rows takes it",
                "reward.reward_kwargs.stict: no scorer of the training rows takes it",
                "reward.sandbox_fusion.url=http://h/run_code: verl-gdpo runs programs",
            ],
        ),
        # all names that no row has, and a condition
        (
            {
                "algorithm.gdpo.rewards": {
                    "format": {"when": {"reward": "correctness", "at_least": 1}, "otherwise": 0},
                    "correctness": 1,
                    "fromat": 1,
                    "lenght": 1,
                    "pass": {"when": {"reward": "format", "at_least": 1}, "otherwise": "zero"},
                    "length": 1,
                    "bug": 1,
                }
            },
            ["rlla", "verl_gdpo/coding"],
            [
                "algorithm.gdpo.rewards names 'fromat', which no scorer",
                "algorithm.gdpo.rewards names 'lenght', which no scorer",
                "algorithm.gdpo.rewards.pass.when.reward=format: rows of 'verl_gdpo/coding' have",
            ],
        ),
        # a mapping that says too little, with a misspelt condition
        (
            {
                "algorithm.gdpo.rewards": {
                    "format": {"when": {"reward": "lenght", "at_least": 1}, "otherwise": "zero"},
                    "corectness": 1,
                }
            },
            ["rlla"],
            [
                "algorithm.gdpo.rewards names ['format', 'corectness'], and says nothing of ['corr",
                "algorithm.gdpo.rewards names 'lenght', which no scorer",
            ],
        ),
        # entries of the list, each of which is wrong, and a key of ours
        (
            {
                "reward.reward_functions": {
                    "a": {"on_error": "stop"},
                    "b": {"path": "b.py"} | {"on_error": "stopp"},
                },
                "algorithm.gdpo": {"epss": 1},
            },
            ["mine"],
            [
                "reward.reward_functions.a: got none of path, task and judge",
                "reward.reward_functions.b.on_error=stopp: expected one of",
                "algorithm.gdpo.epss: unknown setting",
            ],
        ),
        # what entries that are right each by itself do not fit to
        (
            {
                "reward.reward_functions": {
                    "a": {"path": "a.py", "on_error": "missing"},
                    "b": {"path": "b.py", "rewards": ["x"], "on_error": "missing"},
                },
                "reward.custom_reward_function": {"path": "mine.py", "name": "score"},
                KWARGS: {"max_correctness": 2},
                "algorithm.gdpo": {"group_norm": "summed"},
            },
            ["mine"],
            [
                "reward.reward_kwargs={'max_correctness': 2}: with reward functions of your own",
                "reward.custom_reward_function.path=mine.py beside reward.reward_functions",
                "reward.reward_functions.a.on_error=missing: the rewards are summed first",
                "reward.reward_functions.b.on_error=missing: the rewards are summed first",
                "reward.reward_functions.a.on_error=missing: a sample on which the function fails",
            ],
        ),
        (
            {
                "reward.reward_functions": {"a": {"path": "a.py", "rewards": ["x"]}},
                "algorithm.gdpo": {"rewards": {"a__y": 1, "a__z": 1, "a__x": 1}},
            },
            ["mine"],
            [
                "algorithm.gdpo.rewards names 'a__y', which reward.reward_functions.a does not",
                "algorithm.gdpo.rewards names 'a__z', which reward.reward_functions.a does not",
            ],
        ),
        # all conditions that are better failed
        (
            {
                "algorithm.gdpo.rewards": {
                    "format": 1,
                    "a": {"when": {"reward": "format", "at_least": 1}, "bounds": [-2, 2]},
                    "b": {"when": {"reward": "format", "at_least": 1}, "bounds": [-3, 2]},
                },
                PATH: "mine.py",
            },
            ["mine"],
            [
                "algorithm.gdpo.rewards.a: a sample without 'format' of at least 1 gets 0",
                "algorithm.gdpo.rewards.b: a sample without 'format' of at least 1 gets 0",
            ],
        ),
    ],
)
def test_all_mistakes_of_a_run_are_said_at_once(changes, sources, words):
    with pytest.raises(SettingsError) as raised:
        settings_of_run(run_config(**changes), sources)
    first, *lines = str(raised.value).split("\n")
    assert first == f"the configuration has {len(words)} mistakes:"
    assert len(lines) == len(words) == len(raised.value.mistakes)
    for line, word in zip(lines, words, strict=True):
        assert line.startswith(f"  {word}")


@pytest.mark.parametrize(
    ("changes", "sources", "message"),
    [
        # a reward whose name is misspelt is none of which nothing declares the bounds
        (
            {"algorithm.gdpo": {"combine": "sa_mrpo", "rewards": {"format": 1, "corectness": 1}}},
            ["rlla"],
            "algorithm.gdpo.rewards names ['format', 'corectness'], and says nothing of",
        ),
        # a line with all weights could not be pasted, if one of them is wrong
        (
            {"algorithm.gdpo.rewards": {"format": "heavy"}},
            ["rlla"],
            "algorithm.gdpo.rewards.format.weight: got 'heavy'; Input should be a valid number",
        ),
        # a condition on a name that no row has is none that no row of a task could meet
        (
            {
                "algorithm.gdpo.rewards": {
                    "format": {"when": {"reward": "pass", "at_least": 1}, "otherwise": "zero"},
                    "correctness": 1,
                    "integer": 1,
                }
            },
            ["verl_gdpo/gsm8k"],
            "algorithm.gdpo.rewards names 'pass', which no scorer of the training rows",
        ),
        # an option that is not taken does not take away a scorer's rewards
        (
            {KWARGS: {"lenght": True}, "algorithm.gdpo.rewards": {"format": 1, "length": 1}},
            ["rlla"],
            "reward.reward_kwargs.lenght: no scorer",
        ),
        # rewards that cannot be read are no rewards that nobody names
        (
            {
                "reward.reward_functions": {"a": {"path": "a.py", "on_error": "missing"}},
                "algorithm.gdpo.rewards": ["a"],
            },
            ["mine"],
            "algorithm.gdpo.rewards: got ['a']; expected {name: weight}",
        ),
    ],
)
def test_what_only_follows_from_a_mistake_is_not_said(changes, sources, message):
    with pytest.raises(SettingsError) as raised:
        settings_of_run(run_config(**changes), sources)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(message)


def test_a_broken_task_of_somebody_is_no_mistake_of_the_configuration(monkeypatch):
    def bounds():
        raise TaskError("the entry point mine gives no Task")

    add_task(monkeypatch, "mine", lambda response, truth, **_: {}, bounds)
    with pytest.raises(TaskError, match=r"^the entry point mine gives no Task$"):
        settings_of_run(run_config(**{"algorithm.gdpo": {"epss": 1}}), ["mine"])


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
    assert declared_bounds(["gsm"], {"strict": True}) == {"exact": (0.0, 2.0)}
    assert declared_bounds(["gsm"], {"lenght": True}) == {}
    bounds = declared_bounds(["gsm", "rlla"], {"max_correctness": 2})
    assert (bounds["exact"], bounds["correctness"]) == ((0.0, 1.0), (-2.0, 2.0))
    both = {"strict": True, "max_correctness": 2, "lenght": True}
    assert options_for("gsm", both) == {"strict": True, "lenght": True}
    assert options_for("rlla", both) == {"max_correctness": 2, "lenght": True}
    assert mistakes_of_options(both, ["gsm", "rlla", "verl's"]) == [
        "reward.reward_kwargs.lenght: no scorer of the training rows takes it (rows of 'gsm' take "
        "['strict']; rows of 'rlla' take ['max_correctness', 'call_format']). Remove it; on the "
        "command line, ~reward.reward_kwargs.lenght"
    ]
    for sources in (["gsm"], ["verl's"], []):
        (mistake,) = mistakes_of_options({"max_correctness": 2}, sources)
        assert mistake.startswith("reward.reward_kwargs.max_correctness: no scorer of the training")


def test_options_for_the_scorer_of_no_training_row():
    config = run_config(**{KWARGS: {"max_correctness": 2}})
    assert settings_of_run(config, ["rlla"]) is not None
    with pytest.raises(ValueError, match="verl scores them, without options"):
        settings_of_run(config, ["openai/gsm8k"])
    assert settings_of_run(run_config(**NAIVE, **{KWARGS: {"anything": 1}})) is not None
