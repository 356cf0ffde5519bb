"""`validation: only` and `never`: another reward in a validation."""

from types import SimpleNamespace

import numpy as np
import pytest
from reward_rows import Tokenizer, scored
from run_config import listed
from stand_in import stand_in
from verl.trainer.ppo.metric_utils import process_validation_metrics

from verl_gdpo.algorithm.settings import GdpoSettings, RewardTerm
from verl_gdpo.algorithm.values import ERROR_KEY
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.extend import attach
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.hooks.trainer import update_validation_metrics
from verl_gdpo.scoring.function_list import check_sources, validation_settings

FILE = """
calls = []

def right(solution_str, ground_truth):
    calls.append("right")
    return float(ground_truth in solution_str)

def partly(solution_str):
    calls.append("partly")
    return 0.25

def exact(solution_str, ground_truth):
    calls.append("exact")
    return float(solution_str == ground_truth)

def two(solution_str):
    calls.append("two")
    return {"a": 1.0, "b": 0.5, "why": "text"}

def group(solution_strs):
    return [float(len(text)) for text in solution_strs]

def fails(solution_str):
    raise KeyError("a bug")
"""

pytestmark = pytest.mark.usefixtures("event_loop")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards_of_validation.py"
    path.write_text(FILE)
    return str(path)


def config_of(file, entries, **algorithm):
    with_path = {name: {"path": file, "name": name, **entry} for name, entry in entries.items()}
    return listed(with_path, algorithm=algorithm)


def manager_of(config):
    return GdpoRewardManager(config, Tokenizer(), None)


def infos_of(config, response="42", **fields):
    """What rows of the training and of a validation hold, each with verl's score."""
    manager = manager_of(config)
    infos = []
    for is_validation in (False, True):
        of_loop = {"is_validation": is_validation}
        result = scored(
            manager, response, "42", tool_extra_fields=of_loop, global_steps=1, **fields
        )
        assert result["reward_extra_info"]["score"] == result["reward_score"]
        infos.append(result["reward_extra_info"])
    return infos


ENTRIES = {"right": {}, "partly": {"validation": "never"}, "exact": {"validation": "only"}}


def test_each_row_has_the_rewards_of_its_own_functions(file):
    config = config_of(file, ENTRIES)
    assert settings_of_run(config).rewards is None
    training, validation = infos_of(config, response="is 42")
    assert training == {"right": 1.0, "partly": 0.25, "score": 1.25}
    assert validation == {"right": 1.0, "exact": 0.0, "score": 1.0}
    calls = manager_of(config).functions[0].function.__globals__["calls"]
    # The functions of a row run side by side, in any order.
    assert sorted(calls) == ["exact", "partly", "right", "right"]


@pytest.mark.parametrize("named_in", ["the list", "algorithm.gdpo.rewards"])
def test_weights_of_the_two(file, named_in):
    entries = {
        "right": {},
        "partly": {"validation": "never"},
        "exact": {"validation": "only", "rewards": "number", "weight": 3.0},
        "two": {"validation": "only", "rewards": ["a", "b"]},
    }
    algorithm = {}
    if named_in == "the list":
        entries["right"]["weight"] = 2.0
        entries["partly"]["weight"] = 4.0
    else:
        algorithm = {"gdpo": {"rewards": {"right": 2.0, "partly": 4.0}}}
    config = config_of(file, entries, **algorithm)
    settings = settings_of_run(config)
    assert settings.names == ["right", "partly"]
    in_validation = validation_settings(config, settings)
    weights = {name: term.weight for name, term in in_validation.terms.items()}
    assert weights == {"right": 2.0, "exact": 3.0, "two__a": 1.0, "two__b": 1.0}
    training, validation = infos_of(config, response="is 42")
    assert training == {"right": 1.0, "partly": 0.25, "score": 2.0 + 1.0}
    del validation["two__why"]
    of_two = {"two__a": 1.0, "two__b": 0.5}
    assert validation == {"right": 1.0, "exact": 0.0, **of_two, "score": 2.0 + 0.0 + 1.5}


def test_a_weight_of_a_schedule_and_a_condition_stay(file):
    entries = {**ENTRIES, "exact": {"validation": "only", "rewards": "number"}}
    right = {"when": {"reward": "partly", "at_least": 0.5}, "weight": {0: 1.0, 10: 0.0}}
    entries["partly"] = {}
    config = config_of(file, entries, gdpo={"rewards": {"right": right, "partly": 1.0}})
    in_validation = validation_settings(config, settings_of_run(config))
    assert isinstance(in_validation.terms["right"], RewardTerm)
    training, validation = infos_of(config)
    # The condition of `right` is not met, so it counts 0.
    assert training["score"] == 0.25
    assert validation["score"] == 0.25 + 1.0


def test_rewards_of_other_sources_are_none_where_their_function_is_asked(file):
    entries = {
        "right": {},
        "exact": {"validation": "only", "sources": ["t"]},
        "partly": {"validation": "never", "sources": ["t"]},
    }
    training, validation = infos_of(config_of(file, entries))
    assert training == {"right": 1.0, "partly": None, "score": 1.0}
    assert validation == {"right": 1.0, "exact": None, "score": 1.0}


def test_notes_of_failures_are_those_of_the_functions_that_are_asked(file):
    may_fail = {"on_error": "missing", "rewards": "number"}
    entries = {"right": {}, "fails": {"validation": "only", **may_fail}}
    training, validation = infos_of(config_of(file, entries))
    assert training == {"right": 1.0, "score": 1.0}
    assert validation["gdpo_notes"] == {"failed_fails": 1.0}
    assert validation["fails"] is None
    assert validation["score"] == 1.0


def test_what_a_validation_shows(file):
    """verl's metrics of two prompts, each with a sample; nothing that is missing counts as 0."""
    entries = {
        "right": {"rewards": "number"},
        "partly": {"validation": "never"},
        "exact": {"validation": "only", "rewards": "number", "sources": ["s"]},
    }
    config = config_of(file, entries)
    columns = {"reward": [], "right": [], "exact": [], "score": []}
    sources = ["s", "s", "t"]
    for source, response in zip(sources, ["42", "4", "42"], strict=True):
        manager = manager_of(config)
        result = scored(manager, response, "42", source, tool_extra_fields={"is_validation": True})
        columns["reward"].append(result["reward_score"])
        assert result["reward_extra_info"].keys() | {"reward"} == columns.keys()
        for name, value in result["reward_extra_info"].items():
            columns[name].append(value)

    def verls(self, data_sources, sample_uids, reward_extra_infos_dict):
        return process_validation_metrics(data_sources, sample_uids, reward_extra_infos_dict)

    extended = stand_in(update_validation_metrics, verls)
    trainer = SimpleNamespace()
    attach(trainer, SimpleNamespace(settings=GdpoSettings()))
    metrics = extended(trainer, sources, ["u", "v", "w"], columns)
    means = {}
    for source, of_names in metrics.items():
        for name, of_name in of_names.items():
            means[source, name] = float(of_name["mean@1"])
    # The responses end with a special token, which the functions do not see.
    assert means == {
        ("s", "right"): 0.5,
        ("s", "exact"): 0.5,
        ("s", "reward"): 1.0,
        ("s", "score"): 1.0,
        ("t", "right"): 1.0,
        ("t", "reward"): 1.0,
        ("t", "score"): 1.0,
    }
    assert np.isfinite(list(means.values())).all()


def test_a_row_of_which_nobody_says_where_it_belongs_is_an_error(file):
    with pytest.raises(RuntimeError, match=r"validation: the sample came without 'is_validation'"):
        scored(manager_of(config_of(file, ENTRIES)))
    config = config_of(file, {"right": {}})
    assert scored(manager_of(config), "42", "42")["reward_score"] == 1.0


NUMBER = {"rewards": "number"}
NAMED = {"gdpo": {"rewards": {"right": 1.0}}}


@pytest.mark.parametrize(
    ("entries", "algorithm", "message"),
    [
        (
            {"right": {"validation": "always"}},
            {},
            "right.validation=always: expected only or never. Without the key",
        ),
        (
            {"right": {}, "exact": {"validation": "only", **NUMBER}},
            {"gdpo": {"rewards": {"right": 1.0, "exact": 1.0}}},
            "exact.validation=only: algorithm.gdpo.rewards names 'exact', which no sample of the "
            "training would have. Leave out the key, or 'exact' there",
        ),
        (
            {"right": {}, "exact": {"validation": "only", **NUMBER}},
            {
                "gdpo": {
                    "rewards": {"right": {"when": {"reward": "exact", "at_least": 1}}},
                }
            },
            "exact.validation=only: algorithm.gdpo.rewards names 'exact'",
        ),
        (
            {"right": {}, "partly": {"validation": "never"}},
            {
                "gdpo": {
                    "rewards": {"right": {"when": {"reward": "partly", "at_least": 1}}},
                }
            },
            "partly.validation=never: algorithm.gdpo.rewards.right.when reads 'partly', so no "
            "sample of a validation would meet the condition",
        ),
        (
            {"exact": {"validation": "only"}, "partly": {"validation": "only"}},
            {},
            r"all of \['exact', 'partly'\] have validation=only, so nothing would be trained",
        ),
        (
            {"right": {"validation": "never"}},
            {},
            "the rewards of the training have validation=never, so each sample of a validation",
        ),
        (
            {"right": {"validation": "never"}, "partly": {}},
            NAMED,
            "the rewards of the training have validation=never, .* score 0. Add a function with va",
        ),
        (
            {
                "right": {"validation": "never"},
                "exact": {"validation": "only", "weight": 0.0, **NUMBER},
            },
            NAMED,
            "the rewards of the training have validation=never",
        ),
        (
            {"right": {}, "exact": {"validation": "only"}},
            NAMED,
            r"nothing tells which rewards it returns. If it returns a number, write "
            r"\+reward.reward_functions.exact.rewards=number; .*exact.rewards=\[KEY,KEY\]",
        ),
        (
            {"right": {}, "exact": {"validation": "only", "weight": 2.0}},
            {},
            "exact.weight=2.0 with validation=only: no function of the training has a weight",
        ),
        (
            {"right": {}, "exact": {"validation": "only", "weight": "much", **NUMBER}},
            NAMED,
            "algorithm.gdpo.rewards.exact.weight: got 'much'",
        ),
    ],
)
def test_what_is_refused_before_the_training(file, entries, algorithm, message):
    with pytest.raises(ValueError, match=message):
        settings_of_run(config_of(file, entries, **algorithm))


def test_without_a_validation_nothing_is_missing_there(file):
    config = config_of(file, {"right": {"validation": "never"}})
    config.trainer.val_before_train = False
    assert settings_of_run(config).rewards is None
    config.trainer.test_freq = 5
    with pytest.raises(ValueError, match="each sample of a validation would have the score 0"):
        settings_of_run(config)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"right": {}, "exact": {"validation": "only", "sources": ["s"]}}, None),
        (
            {"right": {}, "exact": {"validation": "only", "sources": ["trained"]}},
            r"exact.sources=\['trained'\]: no validation row has such a data_source",
        ),
        (
            {"right": {}, "partly": {"validation": "never", "sources": ["validated"]}},
            r"partly.sources=\['validated'\]: no training row has such a data_source",
        ),
        (
            {"right": {"sources": ["s"]}, "exact": {"validation": "only"}},
            r"no function scores the training rows of data_source 'trained', because \['exact'\] "
            "have validation=only",
        ),
        (
            {"right": {"sources": ["s", "trained"]}, "partly": {"validation": "never"}},
            r"no function scores the validation rows of data_source 'validated', because "
            r"\['partly'\] have validation=never",
        ),
    ],
)
def test_sources_of_rows_that_have_no_function(file, entries, message):
    config = config_of(file, entries)
    sources = ({"s", "trained"}, {"s", "validated"})
    if message is None:
        assert check_sources(config, *sources) == []
        return
    with pytest.raises(ValueError, match=message):
        check_sources(config, *sources)


def test_a_failure_that_a_training_refuses_is_allowed_in_a_validation(file):
    may_fail = {"validation": "only", "on_error": "missing", **NUMBER}
    config = config_of(file, {"right": {}, "fails": may_fail})
    config.algorithm.adv_estimator = "grpo"
    assert settings_of_run(config) is not None
    config.reward.reward_functions.fails.validation = "never"
    with pytest.raises(ValueError, match=r"fails.on_error=missing: the rewards are summed first"):
        settings_of_run(config)


def test_the_error_of_a_training_with_v1_names_the_key(file):
    config = config_of(file, ENTRIES)
    config.transfer_queue.enable = True
    info = scored(manager_of(config))["reward_extra_info"]
    assert "reward.reward_functions.NAME.validation" in info[ERROR_KEY]
