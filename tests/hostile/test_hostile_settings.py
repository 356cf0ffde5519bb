"""Settings of GDPO with rollouts that test them; each case ends in the oracle's advantages.

To add a case: `settings` with dotted keys, and the rewards that the settings leave for the oracle.
"""

import json

import pytest
from stage import oracle_of

A, B, C = {"a": 0.0, "b": 3.0}, {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": -1.0}
D = {"a": 3.0, "b": 4.0}
PROMPTS = [[A, B, C], [B, C, B], [C, A, B]]


def test_two_data_sources_with_different_rewards(stage):
    prompts = [[{"a": 1, "b": 3}, {"a": 0, "b": 4}], [{"a": 5, "c": 2}, {"a": 0, "c": 3}]]
    none = [[{"a": 0, "b": None, "c": None, **said} for said in group] for group in prompts]
    played = stage.train(prompts, sources=["d", "e"])
    assert played.advantages == oracle_of(none)
    assert played.metrics["gdpo/b/mean/d"] == 3.5


def test_a_condition(stage):
    when = {"reward": "a", "at_least": 1}
    gated = {"weight": 2.0, "when": when, "otherwise": "zero"}
    settings = {"algorithm.gdpo.rewards": {"a": 1.0, "b": gated}}
    met = [[{**said, "b": said["b"] if said["a"] else 0.0} for said in group] for group in PROMPTS]
    played = stage.train(PROMPTS, settings=settings)
    assert played.advantages == oracle_of(met, {"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(("step", "weight"), [(1, 1.0), (3, 0.625), (5, 0.25), (9, 0.25)])
def test_a_schedule(stage, step, weight):
    settings = {"algorithm.gdpo.rewards": {"a": {"weight": {1: 1.0, 5: 0.25}}, "b": 1.0}}
    played = stage.train(PROMPTS, step=step, settings=settings)
    assert played.advantages == oracle_of(PROMPTS, {"a": weight, "b": 1.0})


@pytest.mark.parametrize("batch_norm", ["sample", "token", "none"])
def test_batch_norm(stage, batch_norm):
    prompts = [[A, [C, {**B, "long": "x" * 99}]], [{**C, "long": "y" * 50}, A, B]]
    sessions = [one if isinstance(one, list) else [one] for group in prompts for one in group]
    lengths = [
        sum(len(stage.tokenizer.encode(json.dumps(said))) for said in outputs)
        for outputs in sessions
    ]
    played = stage.train(prompts, settings={"algorithm.gdpo.batch_norm": batch_norm})
    rewards = {"a": 1.0, "b": 1.0}
    expected = oracle_of(prompts, rewards, batch_norm=batch_norm, lengths=lengths)
    assert played.advantages == expected


FILTER = {"algorithm.filter_groups.enable": True, "data.train_batch_size": 2}


# the sum stands for GDPO's own signal, which opposed rewards do not have; in group 1, only b varies
@pytest.mark.parametrize(("metric", "kept"), [("reward", (1, 2)), ("a", (2, 4))])
def test_dynamic_sampling(stage, metric, kept):
    opposed = [{"a": 0, "b": 1}, {"a": 1, "b": 0}]
    only_b = [{"a": 0, "b": 1}, {"a": 0, "b": 0}]
    prompts = [opposed, only_b, [A, D], [A, A], [D, B]]
    settings = {**FILTER, "algorithm.filter_groups.metric": metric}
    played = stage.train(prompts, settings=settings)
    failed = [RuntimeError()]
    rest = [group if place in kept else failed for place, group in enumerate(prompts)]
    assert played.advantages == oracle_of(rest, {"a": 1.0, "b": 1.0})


def test_validation_is_not_filtered(stage):
    settings = {**FILTER, "algorithm.filter_groups.metric": "a"}
    _, rows = stage.validate([[A, A], [B, B]], settings=settings)
    assert sorted(row["b"] for row in rows) == [1.0, 1.0, 3.0, 3.0]
