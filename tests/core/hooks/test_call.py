"""A call of a function of verl: what ours finds in it by name, and what is handed on."""

import pytest

from verl_gdpo.hooks.call import Call, Parameters


def of_verl(self, batch, metrics, timing=None, *, folder="f", **others):
    return batch, metrics, timing, folder, others


def call_of(function, *args, **kwargs):
    return Call(function, args, kwargs, Parameters.of(function))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(("me", 1, 2), {}), (("me", 1), {"metrics": 2}), (("me",), {"metrics": 2, "batch": 1})],
)
def test_arguments_are_found_however_they_were_passed(args, kwargs):
    call = call_of(of_verl, *args, **kwargs)
    assert (call.instance, call["batch"], call["metrics"]) == ("me", 1, 2)
    assert "batch" in call
    assert call.hand_on() == (1, 2, None, "f", {})
    changed = call.changed(batch=10, timing=3)
    assert changed.hand_on() == (10, 2, 3, "f", {})
    # Each stands where it stood, and the call itself stays.
    assert len(changed.args) == len(args)
    assert call.hand_on() == (1, 2, None, "f", {})


def test_what_the_caller_leaves_out_has_the_default_of_verl():
    call = call_of(of_verl, "me", 1)
    assert (call["timing"], call["folder"], call.get("folder")) == (None, "f", "f")
    assert call.get("metrics") is None and call.get("strange") is None
    assert "timing" not in call and call.takes("timing") and not call.takes("strange")
    with pytest.raises(TypeError, match=r"test_call\.of_verl was called without 'metrics'$"):
        call["metrics"]
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'metrics'"):
        call.hand_on()


def test_what_nobody_knows_is_found_among_keywords():
    call = call_of(of_verl, "me", 1, 2, session_id=7)
    assert "session_id" in call and call["session_id"] == 7
    assert call.hand_on() == (1, 2, None, "f", {"session_id": 7})


@pytest.mark.parametrize(
    "of_user",
    [
        lambda self, b, m: (b, m),
        lambda self, *args: args,
        lambda *args: args[1:],
        lambda self, metrics, batch: (metrics, batch),
    ],
)
def test_a_method_of_the_users_may_name_its_parameters_in_its_own_way(of_user):
    """Whoever calls it goes by verl's names, and where it has them itself, by its own."""
    parameters = Parameters.of(of_user).beside(Parameters.of(of_verl))
    call = Call(of_user, ("me", 1, 2), {}, parameters)
    is_turned = "batch" in Parameters.of(of_user)
    assert (call["batch"], call["metrics"]) == ((2, 1) if is_turned else (1, 2))
    assert call.changed(batch=10).hand_on() == ((1, 10) if is_turned else (10, 2))


def test_a_function_without_a_signature_has_no_names():
    call = call_of(dict.fromkeys, [1])
    assert call_of(min, 1, 2).get("a") is None and call.hand_on() == {1: None}
