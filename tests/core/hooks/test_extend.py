"""The one mechanism: what is put in the place of verl's functions, and for whom ours is called."""

import asyncio
import functools
import inspect
import sys
import types
from dataclasses import dataclass, field

import pytest
import ray
import verl

from verl_gdpo.hooks import extend, refusal
from verl_gdpo.hooks.extend import Extension, extend_instance, extend_module, record_of


@dataclass
class Record:
    busy: set[tuple[str, str]] = field(default_factory=set)


@pytest.fixture
def calls(monkeypatch):
    """A module of ours: its functions note their calls, and call verl's."""
    calls = []

    def fit(call):
        calls.append("fit")
        return call.hand_on()

    async def wait(call):
        calls.append("wait")
        return await call.hand_on()

    ours = types.ModuleType("verl_gdpo.ours")
    vars(ours).update(fit=fit, wait=wait, add=lambda call: call.hand_on() + 1)
    monkeypatch.setitem(sys.modules, "verl_gdpo.ours", ours)
    monkeypatch.setattr(refusal, "refusals", [])
    assert verl.__version__  # which the refusal names
    yield calls
    extend.load.cache_clear()


@pytest.fixture
def verls(monkeypatch):
    """A module of verl, and another one that has imported its function by name."""
    module, other = types.ModuleType("verls"), types.ModuleType("others")

    def add(value):
        return value + 10

    async def wait(value):
        return value

    class Trainer:
        def fit(self):
            return ["verl's"]

    add.__module__ = "verls"
    vars(module).update(add=add, wait=wait, Trainer=Trainer)
    other.add = add
    for each in (module, other):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(
        extend,
        "table",
        [Extension("verls", "Trainer.fit", "verl_gdpo.ours:fit", at_construction=True)],
    )
    return module


def test_what_is_put_in_the_place_of_verls(verls, calls):
    extensions = [
        Extension("verls", "add", "verl_gdpo.ours:add", needs=("value",)),
        Extension("verls", "wait", "verl_gdpo.ours:wait"),
    ]
    for _ in range(2):  # of two tables
        extend_module(verls, extensions)
    assert verls.add(1) == sys.modules["others"].add(1) == 12
    assert inspect.iscoroutinefunction(verls.wait)
    assert asyncio.run(verls.wait(3)) == 3 and calls == ["wait"]
    again = ray.cloudpickle.loads(ray.cloudpickle.dumps(verls.add))
    assert again(1) == 12


@pytest.mark.parametrize("order", [("core", "run"), ("run", "core")])
def test_a_function_may_have_those_of_two_tables(verls, calls, order):
    """Ours of the first table is called first, in whichever order they were loaded, and once."""
    sys.modules["verl_gdpo.ours"].twice = lambda call: 2 * call.hand_on()
    of_table = {
        "core": Extension("verls", "add", "verl_gdpo.ours:twice"),
        "run": Extension("verls", "add", "verl_gdpo.ours:add", table="run"),
    }
    for table in (*order, *order):
        extend_module(verls, [of_table[table]])
    assert verls.add(1) == sys.modules["others"].add(1) == 2 * ((1 + 10) + 1)


def test_a_wrapper_of_the_users_stays_around_ours(verls, calls):
    extend_module(verls, [Extension("verls", "add", "verl_gdpo.ours:add", table="run")])
    ours = verls.add

    @functools.wraps(ours)
    def doubled(value):
        return 2 * ours(value)

    verls.add = doubled
    extend_module(verls, [Extension("verls", "add", "verl_gdpo.ours:add")])
    assert verls.add(1) == 2 * (1 + 10 + 1) + 1


@pytest.mark.parametrize("order", [("core", "run"), ("run", "core")])
def test_a_method_may_have_those_of_two_tables(verls, calls, monkeypatch, order):
    def check(call):
        calls.append("check")
        return call.hand_on()

    sys.modules["verl_gdpo.ours"].check = check
    of_table = {"core": "verl_gdpo.ours:fit", "run": "verl_gdpo.ours:check"}
    rows = [
        Extension("verls", "Trainer.fit", of_table[table], at_construction=True, table=table)
        for table in order
    ]
    monkeypatch.setattr(extend, "table", rows)
    trainer = verls.Trainer()
    extend_instance(trainer, "Trainer", Record())
    assert trainer.fit() == ["verl's"] and calls == ["fit", "check"]
    assert verls.Trainer().fit() == ["verl's"] and calls == ["fit", "check"]


def test_what_is_missing_is_listed_and_verls_stays(verls, calls):
    lists, add = [], verls.add
    extensions = [
        Extension("verls", "add", "verl_gdpo.ours:add", needs=("value", "other")),
        Extension("verls", "Trainer.gone", "verl_gdpo.ours:fit"),
        Extension("verls", "Trainer.fit"),
    ]
    extend_module(verls, extensions, lists.append)
    assert lists == ["verl has no verls:add(value,other), verls:Trainer.gone"]
    assert verls.add is add
    assert [each.is_missing() for each in extensions] == [True, True, False]
    assert Extension("nowhere", "add").is_missing()


@pytest.mark.parametrize("calls_super", [True, False])
def test_ours_acts_once_a_call_whatever_a_subclass_does(verls, calls, calls_super):
    class Mine(verls.Trainer):
        def fit(self):
            return [*(super().fit() if calls_super else []), "mine"]

    base, mine, plain = verls.Trainer(), Mine(), Mine()
    extend_instance(base, "Trainer", Record())
    extend_instance(mine, "Trainer", Record())
    for _ in range(2):
        assert mine.fit() == [*(["verl's"] if calls_super else []), "mine"]
        assert calls == ["fit"]
        assert base.fit() == ["verl's"]
        assert calls == ["fit", "fit"]
        plain.fit()
        assert calls == ["fit", "fit"] and record_of(plain) is None
        calls.clear()


def test_a_call_that_fails_ends(verls, calls):
    class Fails(verls.Trainer):
        def fit(self):
            raise ZeroDivisionError

    trainer = Fails()
    extend_instance(trainer, "Trainer", Record())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
    assert calls == ["fit", "fit"]


def test_a_failing_import_of_ours_refuses_gdpo_once(verls, calls, capsys):
    """verl's function is called for everybody else."""
    extend_module(verls, [Extension("verls", "add", "verl_gdpo.ours:gone")])
    assert (verls.add(1), verls.add(2)) == (11, 12)
    (reason,) = refusal.refusals
    assert reason.startswith("verl_gdpo.ours: AttributeError: ")
    assert capsys.readouterr().err == f"verl-gdpo: gdpo will not run: {reason}\n"
    with pytest.raises(RuntimeError, match=r"cannot run: verl_gdpo\.ours: AttributeError"):
        verls.add("gdpo")


def test_a_failing_import_of_what_gdpo_does_not_need_is_a_warning(verls, calls, capsys):
    extend_module(verls, [Extension("verls", "add", "verl_gdpo.ours:gone", only_for="attention")])
    assert (verls.add(1), verls.add(2)) == (11, 12)
    assert refusal.refusals == []
    warning = capsys.readouterr().err
    assert warning.startswith("verl-gdpo: WARNING: verl_gdpo.ours: AttributeError: ")
    assert warning.endswith(". verl's own function is called in the place of gone\n")


def test_what_gdpo_does_not_need_may_be_missing(verls, calls, capsys):
    refused = []
    lost = Extension("verls", "gone", "verl_gdpo.ours:add", only_for="attention. Set it to sdpa")
    extend_module(verls, [lost, Extension("verls", "add", "verl_gdpo.ours:add")], refused.append)
    assert verls.add(1) == 12 and refused == []
    warning = "verl has no verls:gone, which is for attention. Set it to sdpa"
    assert capsys.readouterr().err == f"verl-gdpo: WARNING: {warning}\n"


def test_where_the_module_of_the_table_only_hands_a_function_on(verls, calls, monkeypatch):
    """It is replaced where it is defined, so that others take ours, now or later."""
    handing_on = types.ModuleType("verls.old_place")
    handing_on.add = verls.add
    monkeypatch.setitem(sys.modules, "verls.old_place", handing_on)
    extend_module(handing_on, [Extension("verls.old_place", "add", "verl_gdpo.ours:add")])
    places = handing_on, verls, sys.modules["others"]
    assert [place.add(1) for place in places] == [12, 12, 12]
    # Another table names the module in which it is defined.
    extend_module(verls, [Extension("verls", "add", "verl_gdpo.ours:add", table="run")])
    assert [place.add(1) for place in places] == [13, 13, 13]


def test_what_is_of_another_package_or_a_class_stays_elsewhere(verls, calls, monkeypatch):
    """As torch's `CPUOffloadPolicy` in a module of verl's."""
    foreign = types.ModuleType("foreign")

    def take(value):
        return value

    take.__module__ = "foreign"

    class Policy(int):
        __module__ = "verls"

    for module in (foreign, verls):
        module.take, module.Policy = take, Policy
    monkeypatch.setitem(sys.modules, "foreign", foreign)
    rows = [Extension("verls", name, "verl_gdpo.ours:add") for name in ("take", "Policy")]
    extend_module(verls, rows)
    assert (verls.take(1), verls.Policy(1)) == (2, 2)
    assert (foreign.take, foreign.Policy) == (take, Policy)
