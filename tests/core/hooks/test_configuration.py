"""A mapping accounts for every reward of the task, and overrides mean the same everywhere."""

import re
import shlex

import pytest
from omegaconf import OmegaConf
from run_config import run_config

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks import configuration
from verl_gdpo.hooks.configuration import has_gdpo, row_names, settings_of_run
from verl_gdpo.hooks.trainer import TrainerRecord
from verl_gdpo.tools.compose import composed

WHEN = {"reward": "format", "at_least": 1}


def run(rewards, custom=None, manager="gdpo", **kwargs):
    changes = {"algorithm.gdpo": {"rewards": rewards}, "reward.reward_kwargs": kwargs}
    changes["reward.custom_reward_function.path"] = custom
    return run_config(**changes, **{"reward.reward_manager.name": manager})


@pytest.mark.parametrize(
    ("rewards", "options", "absent", "line"),
    [
        ({"format": 0.5}, {}, ["correctness"], "{format: 0.5, correctness: 1.0}"),
        ({"format_reward": 2}, {}, ["correctness"], "{format_reward: 2, correctness: 1.0}"),
        (
            {"correctness": {"weight": {0: 1.0}, "when": WHEN, "otherwise": "missing"}},
            {"max_correctness": 1},
            ["format"],
            "{correctness: {weight: {0: 1.0}, when: {reward: format, at_least: 1}, "
            "otherwise: missing}, format: 1.0}",
        ),
        (
            {"format": None, "corectness": 1},
            {},
            ["correctness"],
            "{format: null, correctness: 1.0}",
        ),
    ],
)
def test_a_partial_mapping_is_refused_with_the_whole_line(rewards, options, absent, line):
    with pytest.raises(ValueError, match=re.escape(f"says nothing of {absent}")) as error:
        settings_of_run(run(rewards, **options), ["rlla"])
    (pasted,) = re.findall(r"('\+\+.*?'|\+\+\S+)\. With", str(error.value))
    assert pasted == f"'++algorithm.gdpo.rewards={line}'"
    whole = composed(run(rewards, **options), shlex.split(pasted))
    if "corectness" in rewards:
        assert "'corectness' is none of them; did you mean 'correctness'?" in str(error.value)
        del whole.algorithm.gdpo.rewards.corectness
    assert settings_of_run(whole, ["rlla"]).rewards.keys() >= {*absent}


@pytest.mark.parametrize(
    ("estimator", "term", "words"),
    [
        # tool_rl declares correctness from -3 to 3
        ("gdpo", {}, "gets 0 (the default), which is better than -3, which is within its bounds"),
        ("grpo", {}, "gets 0 (the default), which is better than -3"),
        ("gdpo", {"bounds": [0, 3]}, None),
        ("gdpo", {"bounds": [0, 3], "weight": -1}, "with weight=-1.0, which is better than 3"),
        ("gdpo", {"otherwise": "missing"}, None),
        ("gdpo", {"otherwise": -3}, None),
    ],
)
def test_a_default_with_which_failing_a_condition_pays_is_refused(estimator, term, words, caplog):
    config = run({"format": 1, "correctness": {"when": WHEN, **term}})
    config.algorithm.adv_estimator = estimator
    if words is None:
        assert settings_of_run(config, ["rlla"])
    else:
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            settings_of_run(config, ["rlla"])
        choices = re.findall(r"'\+\+.*?'", str(error.value))
        assert len(choices) == (3 if estimator == "gdpo" else 2)
        for line in choices:  # each of them is taken
            assert settings_of_run(composed(config, shlex.split(line)), ["rlla"])
        assert settings_of_run(config, ["rlla"], is_recorded=True)  # a run that has trained so
    assert "correctness: a sample" not in caplog.text or words is not None


def test_what_the_user_has_written_is_taken_with_one_warning_of_the_trainer(caplog, monkeypatch):
    monkeypatch.setattr(configuration, "_warned", set())
    cost = {"when": WHEN, "otherwise": "zero", "bounds": [-3.5, 0]}
    config = run({"format": 1, "cost": cost}, custom="my_rewards.py")
    assert settings_of_run(config, ["mine"])  # in each process of a run
    assert caplog.records == []
    for _ in range(2):
        assert TrainerRecord.of(config)
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "cost: a sample without 'format' of at least 1 gets 0" in warning.getMessage()


def test_a_mapping_that_accounts_for_all():
    every = {"format": 1, "correctness": 0}
    assert [*settings_of_run(run(every), ["rlla"]).rewards] == ["format", "correctness"]
    # null: left out, and may be absent
    null = settings_of_run(run({"format": 1, "correctness": None}), ["rlla"])
    assert null.names == ["format"] and [*null.terms_for(["format"])] == ["format"]
    # verl's names for the rewards; several tasks; rows that verl scores
    assert settings_of_run(run({"format": 1, "accuracy_reward": 1}), ["rlla"]) is not None
    with pytest.raises(ValueError, match=r"nothing of \['integer'\].*\(rlla, verl_gdpo/gsm8k\)"):
        settings_of_run(run(every), ["rlla", "verl_gdpo/gsm8k", "verls"])
    assert settings_of_run(run({"acc": 1}), ["openai/gsm8k"]) is not None


def test_an_agent_loop_of_the_user_may_return_any_name():
    config = run({"format": 1, "correctness": 1, "mine": 1})
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    OmegaConf.update(config, loops, "loops.yaml", force_add=True)
    assert settings_of_run(config, ["rlla"]).names == ["format", "correctness", "mine"]


def test_rewards_of_a_row_have_the_names_of_the_settings():
    ours, verls = {"format": 1, "correctness": 2}, {"format_reward": 1, "accuracy_reward": 2}
    for info in (ours, verls):
        for names in (ours, verls):
            settings = settings_of_run(run(names), ["rlla"])
            assert row_names(settings, "rlla").named(info) == names
    # every reward, if none are named; and another value stays as it is
    assert row_names(GdpoSettings(), "rlla").named({**ours, "calls": 3}) == {**ours, "calls": 3}
    # what a row lacks stays absent
    assert row_names(settings_of_run(run(verls), ["rlla"]), "rlla").named({}) == {}
    # what only rows of another task have does not apply
    settings = settings_of_run(run({"format": 1, "correctness": 1, "acc": 1}), None)
    assert row_names(settings, "verls").named({"acc": 1.0}) == {
        **{"acc": 1.0, "format": None, "correctness": None}
    }


def test_where_a_partial_mapping_is_nobodys_mistake():
    part = {"format": 1}
    assert settings_of_run(run(part, custom="mine.py"), ["rlla"]).names == ["format"]
    assert settings_of_run(run(part, manager="naive"), ["rlla"]).names == ["format"]
    assert settings_of_run(run(part), None).names == ["format"]  # the rows are not known yet
    assert settings_of_run(run(part), ["rlla"], is_recorded=True).names == ["format"]
    verls_keys = run(None)
    verls_keys.algorithm.gdpo_reward_keys = ["format"]
    assert settings_of_run(verls_keys, ["rlla"]).names == ["format"]


def test_gdpo_is_in_use_by_the_estimator_or_the_manager():
    names = [("gdpo", "gdpo"), ("gdpo", "naive"), ("grpo", "gdpo"), ("grpo", "naive")]
    configs = [run(None, manager=manager) for _, manager in names]
    for config, (estimator, _) in zip(configs, names, strict=True):
        config.algorithm.adv_estimator = estimator
    assert [has_gdpo(config) for config in configs] == [True, True, True, False]


def test_a_service_that_nothing_asks_is_refused():
    config = run(None)
    config.reward.sandbox_fusion = {"url": "http://h/run_code"}
    assert settings_of_run(config, ["rlla", "verls"])  # verl's scorers ask it
    with pytest.raises(ValueError, match=r"^reward\.sandbox_fusion\.url=http://h/run_code: verl-g"):
        settings_of_run(config, ["rlla", "verl_gdpo/coding"])


GSM8K, CODING = "verl_gdpo/gsm8k", "verl_gdpo/coding"
MIXED = ["rlla", GSM8K, CODING]


def where(reward):
    return {"when": {"reward": reward, "at_least": 1}}


def test_a_mixture_is_weighed_by_one_mapping():
    """The line of recipes/README.md: tool calling has a length too, but not without its option."""
    names = ("format", "correctness", "integer", "pass", "length", "bug")
    settings = settings_of_run(run(dict.fromkeys(names, 1.0)), MIXED)
    calls, program = {"format": 1.0, "correctness": 3.0}, {"pass": 1.0, "length": 0.0, "bug": 1.0}
    for source, info in (("rlla", calls), (CODING, program)):
        assert row_names(settings, source).named(info) == dict.fromkeys(names) | info


@pytest.mark.parametrize(
    ("rewards", "sources", "message"),
    [
        (
            {"format": 1, "correctness": 1, "integer": 1, "length": 0.5},
            [GSM8K],
            r"names 'length', which no scorer of the training rows \(verl_gdpo/gsm8k\) returns",
        ),
        ({"format": 1, "correctness": 1, "fromat": 1}, ["rlla"], "did you mean 'format'"),
        ({"acc": 1, "length": 0.5}, ["math_dapo"], r"'length', which no scorer .*\(math_dapo\)"),
        (
            {"format": where("pass"), "correctness": 1, "integer": 1},
            [GSM8K],
            "names 'pass', which no scorer",
        ),
        (
            {"length": where("correctness"), "correctness": 1, "pass": 1, "bug": 1},
            ["verl_gdpo/math_length", CODING],
            r"rewards\.length\.when\.reward=correctness: rows of 'verl_gdpo/coding' have 'length' "
            "and no 'correctness'",
        ),
    ],
)
def test_what_would_be_missing_in_every_row_is_refused(rewards, sources, message):
    with pytest.raises(ValueError, match=message):
        settings_of_run(run(rewards), sources)
    settings_of_run(run(rewards, custom="mine.py"), sources)  # its names are its own
    settings_of_run(run(rewards), None)  # the rows are not known yet


def test_verls_scorers_may_return_any_name_but_ours():
    assert settings_of_run(run({"acc": 1, "em": 1}), ["math_dapo"]).names == ["acc", "em"]
