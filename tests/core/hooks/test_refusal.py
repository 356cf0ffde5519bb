"""Why gdpo must not run, and whom that stops."""

import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from stand_in import stand_in
from verl.trainer.ppo.core_algos import AdvantageEstimator

from verl_gdpo.hooks import refusal


@pytest.fixture
def refusals(monkeypatch):
    reasons = []
    monkeypatch.setattr(refusal, "refusals", reasons)
    return reasons


def test_a_reason_is_kept_and_printed_once(refusals, capsys):
    refusal.raise_refusals()
    for reason in ("no function f", "no function g", "no function f"):
        refusal.refuse(reason)
    first, second = refusals
    assert first == f"no function f ({refusal.versions()})"
    assert capsys.readouterr().err.count("gdpo will not run: no function f (verl ") == 1
    with pytest.raises(RuntimeError) as raised:
        refusal.raise_refusals()
    assert str(raised.value) == f"verl-gdpo cannot run: {first}; {second}"


@pytest.mark.parametrize("key", refusal.NAMED_IN)
@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_what_names_gdpo(key, name):
    config = OmegaConf.create()
    OmegaConf.update(config, key, name, force_add=True)
    is_named = name == "gdpo"
    assert refusal.names_gdpo(config) == is_named
    assert refusal.names_gdpo(SimpleNamespace(config=config)) == is_named  # as a trainer has it
    assert refusal.names_gdpo(name) == is_named


@pytest.mark.parametrize("value", [None, 7, OmegaConf.create({}), {"adv_estimator": "gdpo"}])
def test_what_does_not_name_gdpo(value):
    assert not refusal.names_gdpo(value)


def test_a_function_that_cannot_be_imported_stops_gdpo_alone(refusals):
    refusals.append("a reason")
    called = stand_in(refusal.refuse_or_call, lambda *args, **kwargs: (args, kwargs))
    with pytest.raises(RuntimeError, match="a reason"):
        called(1, name=AdvantageEstimator.GDPO)
    with pytest.raises(RuntimeError, match="a reason"):
        called("gdpo")
    assert called(1, name="grpo") == ((1,), {"name": "grpo"})


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.9.0", True),
        ("0.9.1", True),
        ("0.9.1+cu128", True),
        ("0.9.0.dev0", False),
        ("0.9.1.post1", False),
        ("0.10.0.dev", False),
        ("a checkout", False),
    ],
)
def test_which_versions_were_tested(monkeypatch, version, tested):
    monkeypatch.setattr(sys.modules["verl"], "__version__", version)
    assert refusal.is_tested() == tested
