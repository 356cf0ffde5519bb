"""The rewards of other frameworks in examples/, against stubs of their servers."""

import asyncio
import json

import pytest
from aiohttp import ClientConnectorError, web
from aiohttp.test_utils import TestServer
from foreign_answers import ANSWERS, RESPONSE, SCORES
from repository import REPO

from examples import foreign_rewards
from examples.nemo_gym import stub


def ask(name, answer, status=200, app=None, response=RESPONSE, truth="{}"):
    async def reply(request):
        return web.Response(text=answer, status=status)

    async def run():
        if app is None:
            stand_in.router.add_post("/{path}", reply)
        async with TestServer(stand_in) as server:
            entry = () if name == "nemo_gym" else ("sums",)
            url = str(server.make_url(""))
            return await getattr(foreign_rewards, name)(response, truth, url, *entry)

    stand_in = app or web.Application()
    return asyncio.run(run())


@pytest.mark.parametrize("name", ANSWERS)
def test_each_number_is_a_reward_and_the_page_has_the_line_of_weights(name, capsys, monkeypatch):
    monkeypatch.setattr(foreign_rewards, "printed", set())
    answer, rewards = ANSWERS[name]
    assert [ask(name, json.dumps(answer)) for _ in range(2)] == [rewards] * 2
    printed = capsys.readouterr().out  # once
    assert printed in (REPO / "examples" / name / "README.md").read_text()
    assert (printed == "") == (name == "nemo_gym")


@pytest.mark.parametrize(
    ("name", "status", "answer", "message"),
    [
        ("verifiers", 500, "TaskError: a bug", "/score answered 500: .TaskError: a bug"),
        ("verifiers", 200, SCORES, "expected rewards, metrics, weights"),
        ("verifiers", 200, {**SCORES, "metrics": {"x": "1"}}, "expected a number for x, got '1'"),
        ("verifiers", 200, {**SCORES, "metrics": {"brief": 1}}, "is a reward and a metric"),
        ("openenv", 200, {"reward": 1.0}, "/step: expected rewards, weights, got None"),
        ("nemo_gym", 200, {"reward": 0.0, "_ng_failure_class": "judge_failed"}, "judge_failed"),
    ],
)
def test_a_server_that_fails_raises(name, status, answer, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        ask(name, json.dumps(answer), status)


def test_a_server_that_is_down_raises():
    with pytest.raises(ClientConnectorError):
        asyncio.run(foreign_rewards.openenv(RESPONSE, "11", "http://127.0.0.1:9", "sums"))


def test_the_stub_of_nemo_gym_has_its_form():
    row = stub.verl_row(stub.gym_row(1))["reward_model"]["ground_truth"]
    rewards = ask("nemo_gym", "", app=stub.make_app(), response="is " * 11 + "11", truth=row)
    assert rewards == {"correct": 1.0, "brief": 0.0}
    with pytest.raises(RuntimeError, match="answered 422"):
        ask("nemo_gym", "", app=stub.make_app())
