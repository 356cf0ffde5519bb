"""What the nodes of a Ray cluster are asked. `nox -s nodes` asks several of them."""

import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import ray

import verl_gdpo
from verl_gdpo.hooks import nodes

FAR, NEAR = "10.0.0.7", "10.0.0.6"


def node(address, alive=True):
    return {"NodeManagerAddress": address, "NodeID": f"id of {address}", "Alive": alive}


def test_a_function_runs_once_on_each_node_in_a_process_of_its_own(ray_session):
    (here,) = ray.nodes()

    def process():
        return os.getpid()

    answers = [nodes.on_every_node(process) for _ in range(2)]
    assert {*answers[0]} == {*answers[1]} == {here["NodeManagerAddress"]}
    processes = {process for answer in answers for process in answer.values()}
    assert len({*processes, os.getpid()}) == 3  # each ends after its task


def test_an_error_and_a_silent_node_are_answers(ray_session):
    def fail():
        raise ValueError("of the node")

    def hang():
        time.sleep(600)

    (error,) = nodes.on_every_node(fail).values()
    assert isinstance(error, ValueError) and str(error).endswith("ValueError: of the node")
    (silence,) = nodes.on_every_node(hang, seconds=0.5).values()
    assert repr(silence) == "TimeoutError('no answer within 0 s')"


@pytest.mark.slow
def test_a_node_tells_the_state_of_its_package(ray_session):
    (answer,) = nodes.on_every_node(nodes.state).values()
    assert answer == nodes.state()


def test_a_dead_node_is_not_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(ray, "nodes", lambda: [node(NEAR), node(FAR, alive=False)])
    monkeypatch.setattr(ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(ray, "get", lambda question, timeout: question)
    monkeypatch.setattr(
        nodes, "on_node", lambda name, _: SimpleNamespace(remote=lambda: asked.append(name))
    )
    assert nodes.on_every_node(os.getpid) == {NEAR: None}
    assert asked == [f"id of {NEAR}"]


def test_the_state_is_that_of_the_code(monkeypatch, tmp_path):
    copy = tmp_path / "verl_gdpo"
    shutil.copytree(verl_gdpo.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    ours = nodes.state()
    monkeypatch.setattr(verl_gdpo, "__path__", [str(copy)])
    (copy / "algorithm" / "made_when_it_runs.pyc").write_bytes(b"\0")
    assert nodes.state() == ours
    with (copy / "algorithm" / "zero.py").open("a") as file:
        file.write("\n")
    assert nodes.state() != ours


def test_a_node_whose_verl_did_not_load_the_plugin(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl_gdpo.plugin")
    with pytest.raises(RuntimeError, match=r"^VERL_USE_EXTERNAL_PLUGINS does not include verl_gd"):
        nodes.state()


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """{node: answer} of two nodes, which a test changes."""
    found = {NEAR: nodes.state(), FAR: nodes.state()}
    monkeypatch.setattr(ray, "nodes", lambda: [node(address) for address in found])
    monkeypatch.setattr(nodes, "on_every_node", lambda function: found)
    return found


def test_nodes_in_one_state_are_taken(answers):
    nodes.refuse_other_states()


def test_a_node_alone_is_not_asked(answers, monkeypatch):
    del answers[FAR]
    monkeypatch.setattr(nodes, "on_every_node", lambda function: pytest.fail("asked"))
    nodes.refuse_other_states()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("0123456789ab", "10.0.0.7: its files are 0123456789ab"),
        (RuntimeError("it failed\n\nModuleNotFoundError: none\n"), "10.0.0.7: ModuleNotFoundError"),
        (TimeoutError("no answer within 300 s"), "10.0.0.7: no answer within 300 s"),
    ],
)
def test_a_node_with_another_state_is_named(answers, answer, said):
    answers[FAR] = answer
    with pytest.raises(RuntimeError) as raised:
        nodes.refuse_other_states()
    message = str(raised.value)
    assert f"its files are {nodes.state()} here. {said}" in message
    assert message.endswith(f"Install one state of verl-gdpo {verl_gdpo.__version__} on every node")
    assert NEAR not in message and "\n" not in message


def test_the_nodes_are_asked_before_the_trainers_process_starts(monkeypatch):
    done = []
    monkeypatch.setattr(nodes, "refuse_other_states", lambda: done.append("asked"))
    runner = SimpleNamespace(remote=lambda *given: done.append(given), options=dict)
    probing = nodes.probing(runner)
    assert done == []
    probing.remote("config")
    assert done == ["asked", ("config",)]
    assert probing.options(num_cpus=2) == {"num_cpus": 2}  # then verl calls its `remote`
    assert done[2:] == ["asked"]
