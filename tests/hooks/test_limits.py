"""Limits of requests: when each may begin, and that all reward workers share them."""

import asyncio
import inspect
import re

import pytest
import ray
from judge_stub import OTHERS, judge_stub
from judge_stub import config_of as judge_stub_config
from omegaconf import OmegaConf
from reward_rows import Tokenizer, row_of
from verl.experimental.reward_loop.reward_manager import limited

from verl_gdpo.hooks.limits import KEYS, Counter, Limiter, Limits, check_limits
from verl_gdpo.hooks.reward_manager import GdpoRewardManager


class Clock:
    """Time that passes only while all wait."""

    def __init__(self):
        self.now = 100.0

    async def sleep(self, seconds):
        end = self.now + seconds
        while self.now < end:
            await asyncio.sleep(0)
            self.now = min(end, self.now + 1 / 64)


def begins(limits, count):
    """The seconds after which each of `count` requests may begin; none ends."""

    async def all_of_them():
        clock, times = Clock(), []
        counter = Counter(limits, lambda: clock.now, clock.sleep)
        for _ in range(count):  # first come, first served
            await counter.begin()
            times.append(clock.now - 100)
        return times

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(max_rpm=240), [0, 0, 0, 0, 0.25, 0.5]),  # four a second
        (Limits(max_rpm=30), [0, 2, 4]),  # less than one a second
        (Limits(max_tpm=60_000, estimated_tokens_per_request=250), [0, 0, 0, 0, 0.25]),
        (Limits(max_tpm=60_000, estimated_tokens_per_request=3000), [0, 3, 6]),  # more than a burst
        (Limits(max_rpm=240, max_tpm=60, estimated_tokens_per_request=2), [0, 2, 4]),  # both hold
        (Limits(max_concurrent=3), [0, 0, 0]),
        (Limits(timeout=1), [0, 0, 0]),
    ],
)
def test_when_requests_begin(limits, expected):
    assert begins(limits, len(expected)) == pytest.approx(expected, abs=1 / 32)


def test_a_request_that_waits_for_its_rate_holds_no_place():
    async def both():
        clock = Clock()
        counter = Counter(Limits(max_concurrent=1, max_rpm=30), lambda: clock.now, clock.sleep)
        await counter.begin()
        waiting = asyncio.ensure_future(counter.begin())
        await asyncio.sleep(0)
        counter.end()
        assert not counter._places.locked()
        await waiting
        assert counter._places.locked()

    asyncio.run(both())


def most_at_once(limiter, count, seconds=0.0):
    """How many of `count` calls ran at the same time."""
    running, most = 0, 0

    async def call():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(seconds)
        running -= 1
        return 7

    async def all_of_them():
        return await asyncio.gather(*(limiter.call(call) for _ in range(count)))

    assert asyncio.run(all_of_them()) == [7] * count
    return most


@pytest.fixture
def without_ray(monkeypatch):
    """Other tests of this process may have started it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("without_ray")
def test_a_limiter_without_ray():
    assert most_at_once(Limiter(Limits(max_concurrent=3)), 20) == 3


@pytest.mark.usefixtures("without_ray")
def test_the_time_limit_counts_without_the_waiting():
    """Ten calls of a tenth of the limit, one after the other, and one that takes longer."""
    assert most_at_once(Limiter(Limits(max_concurrent=1, timeout=0.5)), 10, 0.1) == 1
    slow = Limiter(Limits(timeout=0.01)).call(lambda: asyncio.sleep(60))
    with pytest.raises(TimeoutError, match=r"no answer within reward\.timeout=0\.01 s"):
        asyncio.run(slow)


def test_all_workers_share_the_limits_of_a_run(ray_session):
    """Two limiters, as of two processes; one who waits is cancelled, and its place comes back."""
    first, second = (Limiter(Limits(max_concurrent=1)) for _ in range(2))

    async def calls():
        held, release = asyncio.Event(), asyncio.Event()

        async def hold():
            held.set()
            await release.wait()

        holding = asyncio.ensure_future(first.call(hold))
        await held.wait()
        waiting = [asyncio.ensure_future(second.call(lambda: asyncio.sleep(0))) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert not done
        waiting[0].cancel()
        release.set()
        await asyncio.wait_for(asyncio.gather(holding, waiting[1]), 30)
        await asyncio.wait_for(first.call(lambda: asyncio.sleep(0)), 30)

    try:
        asyncio.run(calls())
    finally:
        ray.kill(first._counter)


def test_judges_of_two_managers_share_the_limits(ray_session, event_loop):
    with judge_stub() as stub:
        config = judge_stub_config(stub.address, {"max_concurrent": 1})
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
            ray.kill(managers[0].limiter._counter)


def config_of(functions, path=None, **limits):
    reward = {"custom_reward_function": {"path": path}, "reward_functions": functions, **limits}
    return OmegaConf.create({"reward": reward})


def test_limits_that_hold_for_nothing_are_refused():
    for key in KEYS:
        with pytest.raises(ValueError, match=rf"^reward\.{key}=2: no function asks for limits"):
            check_limits(config_of({"x": {"path": "x.py"}}, **{key: 2}))
        check_limits(config_of({"x": {"path": "x.py", "limited": True}}, **{key: 2}))
        check_limits(config_of(None, path="mine.py", **{key: 2}))
        for wrong in (0, -1, "many", True):
            with pytest.raises(ValueError, match=rf"reward\.{key}={wrong}: expected a number"):
                check_limits(config_of(None, path="mine.py", **{key: wrong}))
    with pytest.raises(ValueError, match=r"x asks a service, and there are no limits\. Set one"):
        check_limits(config_of({"x": {"path": "x.py", "limited": True}}))


def test_these_are_all_limits_that_verl_reads():
    source = inspect.getsource(limited)
    assert {*re.findall(r'(?:rm_cfg|config\.reward)\.get\("(\w+)"', source)} == {*KEYS}
