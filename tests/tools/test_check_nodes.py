"""What `check` says of the nodes of a cluster; `nox -s nodes` asks two nodes of Ray."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from composed_recipes import composed

from verl_gdpo.run.starts import versions
from verl_gdpo.tools import check
from verl_gdpo.tools.check import gpus, nodes
from verl_gdpo.tools.check.output import Output
from verl_gdpo.verl_hooks import nodes as hooks

NEAR, FAR = "10.0.0.6", "10.0.0.7"
GIVEN = ("trainer.nnodes=2", "+ray_kwargs.ray_init.address=10.0.0.6:6379")
QUIET = {"drivers": ["580.95.05"], "capabilities": ["9.0"], "problems": [], "model": True}


def answer(**changed):
    """Of a node in which nothing is wrong."""
    host = {"memory_gb": 2000.0, "shared_gb": 64.0, "gpus": [("NVIDIA H100", 85.5)] * 8}
    same = {"files": hooks.state(), "versions": versions()}
    return {**QUIET, **host, **same, **changed}


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes; a test changes what they answer."""
    found = SimpleNamespace(
        answers={NEAR: answer(), FAR: answer()}, counted={NEAR: 8.0, FAR: 8.0}, missed={}
    )

    @contextmanager
    def joined(address, variables):
        found.joined = address, dict(variables)
        yield found.counted

    monkeypatch.setattr(hooks, "joined", joined)
    monkeypatch.setattr(hooks, "on_every_node", lambda *asked: found.answers)
    monkeypatch.setattr(hooks, "who_reaches_whom", lambda: found.missed)
    monkeypatch.setattr(gpus, "shape_of", lambda path: gpus.QWEN_1_5B)
    return found


def ask(*overrides):
    config = composed("hardware=8gpu", *GIVEN, *overrides)
    return nodes.ask_nodes(config, nodes.cluster_to_ask(config))


def test_a_line_for_each_node(cluster):
    given = "+ray_kwargs.ray_init.runtime_env.env_vars.HF_HOME=/cache"
    table, problems = ask(given)
    assert problems == []
    assert cluster.joined[0] == "10.0.0.6:6379" and cluster.joined[1]["HF_HOME"] == "/cache"
    header, _, *rows = table.splitlines()
    assert header.split("  ")[0] == "node" and len(rows) == 2
    assert rows[1].split() == [
        *(FAR, "8", "NVIDIA", "H100", "580.95.05", "9.0", "86", "2000", "64.0", "yes"),
        hooks.state(),
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"problems": ["NVIDIA driver 570: expected"]}, ["NVIDIA driver 570: expected"]),
        ({"gpus": [("L4", 24.2)] * 4}, ["4 GPUs, and 8 for Ray; trainer.n_gpus_per_node=8"]),
        ({"gpus": [("L4", 10.0)] * 8}, ["a GPU of 10 GB is too small for the "] * 2),
        ({"memory_gb": 20.0}, ["host memory: 20 GB; about 51 are needed (computed)"]),
        ({"shared_gb": 0.06}, ["/dev/shm: 0.06 GB free; expected at least 4.0 for vLLM"]),
        ({"model": False}, ["Qwen/Qwen2.5-1.5B-Instruct is neither a folder there nor in"]),
        ({"files": "0123"}, ["the files of verl-gdpo are 0123, and "]),
        (
            {"versions": {**versions(), "ray": "2.1", "vllm": "0.9"}},
            [f"ray 2.1, and {versions()['ray']} here", "vllm 0.9, and none here"],
        ),
    ],
)
def test_what_a_node_lacks(cluster, changed, said):
    cluster.answers[FAR] = answer(**changed)
    _, problems = ask()
    assert len(problems) == len(said)
    for problem, words in zip(problems, said, strict=True):
        assert problem.startswith(f"{FAR}: {words}")


def test_nodes_that_do_not_answer_or_do_not_reach_each_other(cluster):
    cluster.answers[NEAR] = RuntimeError("it failed\n\nModuleNotFoundError: none\n")
    cluster.missed = {NEAR: RuntimeError("the same"), FAR: [NEAR]}
    table, problems = ask("trainer.nnodes=3")
    assert table.splitlines()[2].split() == [NEAR, "no", "answer"]
    assert problems == [
        "trainer.nnodes=3, but 2 nodes are alive",
        f"{NEAR}: ModuleNotFoundError: none",
        f"{FAR}: no connection to a port of {NEAR}",
    ]


def test_a_run_without_a_gpu(cluster):
    for address in cluster.answers:
        cluster.answers[address] = answer(gpus=[], drivers=[], capabilities=[], shared_gb=0.1)
    config = composed("hardware=cpu", *GIVEN)
    table, problems = nodes.ask_nodes(config, "auto")
    assert problems == [] and table.splitlines()[2].split()[:2] == [NEAR, "0"]


@pytest.mark.parametrize(
    ("overrides", "address", "expected"),
    [
        (GIVEN, None, "10.0.0.6:6379"),
        (GIVEN[:1], "auto", "auto"),
        (GIVEN[:1], None, ""),
        (GIVEN[:1], "local", ""),
        (GIVEN[1:], None, ""),
        ((*GIVEN, "estimator=grpo"), None, "10.0.0.6:6379"),
        ((*GIVEN, "estimator=grpo", "reward.reward_manager.name=naive"), None, ""),
    ],
)
def test_which_cluster_is_asked(monkeypatch, overrides, address, expected):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert nodes.cluster_to_ask(composed("hardware=8gpu", *overrides)) == expected


def test_check_shows_the_table_and_takes_the_problems(monkeypatch, capsys):
    monkeypatch.setattr(nodes, "ask_nodes", lambda config, address: ("TABLE", ["a: b"]))
    output = Output(sys.stdout)
    check._nodes(output, None, "auto")
    assert output.problems == ["a: b"] and "TABLE" in capsys.readouterr().out
    monkeypatch.setenv(gpus.GO_ON, "1")
    output = Output(sys.stdout)
    check._nodes(output, None, "auto")
    assert output.problems == [] and "check: a: b" in capsys.readouterr().out


def test_what_a_node_sees(monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpus, "find_gpus", lambda visible: [gpus.Gpu("0", "", "L4", 23_034, "570.1", (8, 9))]
    )
    asked = []
    monkeypatch.setattr(
        gpus, "missing", lambda found, folder, gb, cuda_runs: [f"{folder} {gb} {cuda_runs}"]
    )
    monkeypatch.setattr(nodes, "_cuda_runs", lambda: asked.append(1) or True)
    seen = nodes.look(str(tmp_path), str(tmp_path / "run" / "checkpoints"), 5.0, True)
    assert seen["problems"] == [f"{tmp_path} 5.0 True"] and asked == [1]
    assert seen["gpus"] == [("L4", 23_034 * 2**20 / 1e9)] and seen["capabilities"] == ["8.9"]
    assert seen["model"] and seen["files"] == hooks.state() and seen["versions"] == versions()
    assert seen["memory_gb"] > 0
    unseen = nodes.look("no-one/not-in-the-cache", str(tmp_path), 5.0, False)
    assert (unseen["gpus"], unseen["problems"], unseen["model"]) == ([], [], False)


def test_gpus_of_which_nothing_is_known(monkeypatch, tmp_path):
    def find_gpus(visible):
        raise ValueError("GPU GB10: nvidia-smi says memory [N/A]")

    monkeypatch.setattr(gpus, "find_gpus", find_gpus)
    seen = nodes.look(str(tmp_path), str(tmp_path), 5.0, True)
    assert seen["problems"] == ["GPU GB10: nvidia-smi says memory [N/A]"]
