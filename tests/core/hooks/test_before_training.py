"""What the nodes of a Ray cluster are asked. tests/on_ray/test_nodes.py asks one of them."""

import contextlib
import shutil
import sys
from types import SimpleNamespace

import pytest
import ray

import verl_gdpo
from verl_gdpo.hooks import before_training

FAR, NEAR = "10.0.0.7", "10.0.0.6"


def node(address, alive=True):
    return {"NodeManagerAddress": address, "NodeID": f"id of {address}", "Alive": alive}


def our_state():
    return before_training.state(before_training.compared_parts())


@pytest.fixture(scope="module")
def copied_package(tmp_path_factory):
    copy = tmp_path_factory.mktemp("copied") / "verl_gdpo"
    unread = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(verl_gdpo.__path__[0], copy, ignore=unread)


@pytest.fixture
def package(monkeypatch, copied_package):
    """A copy of this package, whose state is asked. A test leaves it as it was."""
    ours = our_state()
    monkeypatch.setattr(verl_gdpo, "__path__", [str(copied_package)])
    assert our_state() == ours
    return copied_package


@contextlib.contextmanager
def edited(file):
    text = file.read_bytes()
    file.write_bytes(text + b"\n")
    try:
        yield
    finally:
        file.write_bytes(text)


@pytest.mark.parametrize(
    ("file", "is_noticed"),
    [
        ("plugin.py", True),
        ("scoring/reward_file.py", True),
        ("scoring/lengths.py", True),
        ("algorithm/zero.py", True),
        ("hooks/reward_manager.py", True),
        ("tasks/__init__.py", True),
        ("tasks/gsm8k/score.py", True),
        ("tasks/math_length/inside.py", True),
        ("tasks/sandbox/inside.py", True),
        ("tasks/gsm8k/rows.py", False),
        ("tasks/preparation/schema.py", False),
        ("tools/report/__init__.py", False),
        ("tools/run/progress.py", False),
        ("tools/evaluate/results.py", False),
        ("terminal.py", False),
    ],
)
def test_an_edit_is_noticed_where_it_changes_scores_or_the_training(package, file, is_noticed):
    before = our_state()
    with edited(package / file):
        assert (our_state() != before) == is_noticed


@pytest.mark.parametrize("is_used", [True, False])
def test_what_a_run_may_use_is_compared_if_it_does(package, monkeypatch, is_used):
    module = "verl_gdpo.cpu.device"
    if is_used:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    else:
        monkeypatch.delitem(sys.modules, module, raising=False)
    before = our_state()
    with edited(package / "cpu" / "sampler.py"):
        assert (our_state() != before) == is_used


def test_what_is_no_code_is_not_compared(package):
    before = our_state()
    made = package / "algorithm" / "made_when_it_runs.pyc"
    made.write_bytes(b"\0")
    assert our_state() == before
    made.unlink()


def test_a_node_whose_verl_did_not_load_the_plugin(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl_gdpo.plugin")
    with pytest.raises(RuntimeError, match=r"^VERL_USE_EXTERNAL_PLUGINS does not include verl_gd"):
        our_state()


@pytest.fixture
def answers(monkeypatch):
    """{id of a node: answer} of two nodes, which a test changes, and of a dead one."""
    told = {f"id of {address}": our_state() for address in (NEAR, FAR)}
    dead = node("10.0.0.8", alive=False)
    monkeypatch.setattr(ray, "nodes", lambda: [node(NEAR), node(FAR), dead])
    monkeypatch.setattr(ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(before_training, "_asked", lambda node_id, *_: told[node_id])
    monkeypatch.setattr(before_training, "_answer", lambda question: question)
    return told


def test_nodes_in_one_state_are_taken(answers, monkeypatch):
    before_training.refuse_other_states()
    monkeypatch.setattr(ray, "nodes", lambda: [node(NEAR)])
    monkeypatch.setattr(
        before_training, "_asked", lambda *_: pytest.fail("one node alone is asked")
    )
    before_training.refuse_other_states()


def test_two_nodes_at_one_address_are_both_asked(answers, monkeypatch):
    """`ray start` may be called twice on a machine."""
    waited = []
    second = {**node(FAR), "NodeID": "second"}
    answers["second"] = our_state()
    monkeypatch.setattr(ray, "nodes", lambda: [node(NEAR), second, node(FAR)])
    monkeypatch.setattr(
        ray, "wait", lambda asked, num_returns, **_: waited.append(num_returns - len(asked))
    )
    before_training.refuse_other_states()
    assert waited == [0]  # Ray raises if it is to wait for more than it is given
    answers["second"] = "0123456789ab"
    with pytest.raises(RuntimeError, match=f"{FAR}: 0123456789ab. Install one"):
        before_training.refuse_other_states()


@pytest.mark.parametrize("answer", ["0123456789ab", "ModuleNotFoundError: none"])
def test_a_node_with_another_state_is_named(answers, answer):
    answers[f"id of {FAR}"] = answer
    with pytest.raises(RuntimeError) as raised:
        before_training.refuse_other_states()
    message = str(raised.value)
    assert f") are {our_state()} here. {FAR}: {answer}. Install one" in message
    assert NEAR not in message and "\n" not in message


def test_the_nodes_are_asked_before_the_trainers_process_starts(monkeypatch):
    done = []
    monkeypatch.setattr(before_training, "refuse_other_states", lambda: done.append("asked"))
    runner = SimpleNamespace(remote=lambda *given: done.append(given), options=dict)
    probing = before_training.probing(runner)
    assert done == []
    probing.remote("config")
    assert done == ["asked", ("config",)]
    assert probing.options(num_cpus=2) == {"num_cpus": 2}  # then verl calls its `remote`
    assert done[2:] == ["asked"]
