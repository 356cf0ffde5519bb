"""The counter of requests in an actor of Ray, which all reward workers of a run share."""

import asyncio
import inspect
import re

import pytest
import ray
from judge_stub import OTHERS, config_of, judge_stub
from reward_rows import Tokenizer, row_of
from verl.experimental.reward_loop.reward_manager import limited

from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.hooks.shared_limits import counter_of_run
from verl_gdpo.scoring.limits import KEYS, AllStuckError, Counter, Limiter, Limits
from verl_gdpo.scoring.scorer_calls import NoAnswerError


def test_without_ray_a_process_counts_for_itself(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert isinstance(counter_of_run(Limits(max_concurrent=1)), Counter)


def test_all_workers_share_the_limits_of_a_run(ray_session):
    """Two limiters, as of two processes; one who waits is cancelled, and its place comes back."""
    first, second = (Limiter(Limits(max_concurrent=1), counter_of_run) for _ in range(2))

    async def calls():
        held, release = asyncio.Event(), asyncio.Event()

        async def hold():
            held.set()
            await release.wait()

        holding = asyncio.ensure_future(first.call(hold, "x"))
        await held.wait()
        waiting = [
            asyncio.ensure_future(second.call(lambda: asyncio.sleep(0), "x")) for _ in range(2)
        ]
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert not done
        waiting[0].cancel()
        release.set()
        await asyncio.wait_for(asyncio.gather(holding, waiting[1]), 30)
        await asyncio.wait_for(first.call(lambda: asyncio.sleep(0), "x"), 30)

    try:
        asyncio.run(calls())
    finally:
        ray.kill(first._counter.actor)


def test_all_workers_hear_that_all_places_are_stuck(ray_session):
    first, second = (
        Limiter(Limits(max_concurrent=1, timeout=0.5), counter_of_run) for _ in range(2)
    )

    async def calls():
        release = asyncio.Event()

        async def hold():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await release.wait()

        with pytest.raises(NoAnswerError):
            await first.call(hold, "sample a of worker 1")
        for _ in range(2):
            waiting = second.call(lambda: asyncio.sleep(0), "sample b")
            with pytest.raises(AllStuckError, match=r"^all 1 places .* sample a of worker 1"):
                await asyncio.wait_for(waiting, 30)
        release.set()
        while (await asyncio.gather(second.call(returned, "c"), return_exceptions=True)) != [7]:
            pass

    async def returned():
        return 7

    try:
        asyncio.run(calls())
    finally:
        ray.kill(first._counter.actor)


@pytest.mark.slow
def test_judges_of_two_managers_share_the_limits(ray_session, event_loop):
    with judge_stub() as stub:
        config = config_of(stub.address, {"max_concurrent": 1})
        managers = [GdpoRewardManager(config, Tokenizer(), None) for _ in range(2)]

        async def all_of_them():
            rows = [(manager, row_of(f"{n}", "42", "s", **OTHERS)) for n, manager in both]
            await asyncio.gather(*(manager.run_single(row) for manager, row in rows))
            for manager in managers:
                await manager.functions[0].function.client.close()

        both = [(n, manager) for n in range(4) for manager in managers]
        try:
            event_loop.run_until_complete(all_of_them())
            assert (stub.most, len(stub.asked)) == (1, 8)
        finally:
            ray.kill(managers[0].limiter._counter.actor)


def test_these_are_all_limits_that_verl_reads():
    source = inspect.getsource(limited)
    assert {*re.findall(r'(?:rm_cfg|config\.reward)\.get\("(\w+)"', source)} == {*KEYS}
