"""Limits of requests: when each may begin, and what happens to calls that do not end."""

import asyncio
import functools
import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_loop import simulate

from verl_gdpo.scoring.limits import (
    KEYS,
    AllStuckError,
    Counter,
    Limiter,
    Limits,
    Places,
    check_limits,
)
from verl_gdpo.scoring.scorer_calls import NoAnswerError


def begins(limits, count, seconds=0.0):
    """When each of `count` requests begins that all come at once, and how often the loop turned."""

    async def all_of_them():
        loop, times = asyncio.get_running_loop(), []
        counter, start = Counter(limits), loop.time()

        async def ask():
            request = await counter.allow()
            counter.begin(request)
            times.append(loop.time() - start)
            await asyncio.sleep(seconds)
            counter.end(request)

        await asyncio.gather(*(ask() for _ in range(count)))
        return times

    return simulate(all_of_them())


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
    times, _ = begins(limits, len(expected))
    assert times == pytest.approx(expected, abs=1e-3)


def most_within_a_minute(times):
    times = sorted(times)
    return max(bisect_left(times, start + 60) - place for place, start in enumerate(times))


def test_a_stall_is_not_made_up_for():
    """All places are taken for a minute, and the rate is that of 60 requests."""
    times, _ = begins(Limits(max_concurrent=4, max_rpm=60), 300, 60.0)
    assert times[:5] == pytest.approx([0, 1, 2, 3, 60], abs=1e-3)

    async def after_a_stall():
        loop, times = asyncio.get_running_loop(), []
        counter = Counter(Limits(max_concurrent=4, max_rpm=60))

        async def ask(number):
            request = await counter.allow()
            counter.begin(request)
            times.append(loop.time())
            await asyncio.sleep(60 if number < 4 else 0.25)
            counter.end(request)

        await asyncio.gather(*(ask(number) for number in range(200)))
        return times

    times, _ = simulate(after_a_stall())
    assert most_within_a_minute(times) == 60


REQUEST = st.tuples(
    st.floats(0, 200),  # seconds until it comes
    st.sampled_from([0.0, 0.0, 0.5, 30.0, 90.0]),  # its worker is busy before it begins
    st.sampled_from([0.0, 0.25, 10.0, 60.0]),  # it takes
    st.sampled_from([1e6, 1e6, 1e6, 5.0]),  # it is cancelled if it may not begin before
)


@given(
    max_rpm=st.none() | st.integers(1, 100) | st.floats(1, 100),
    max_tpm=st.none() | st.floats(50, 3000),
    max_concurrent=st.none() | st.integers(1, 5),
    requests=st.lists(REQUEST, min_size=1, max_size=150),
)
def test_never_more_than_the_limits(max_rpm, max_tpm, max_concurrent, requests):
    limits = Limits(max_concurrent, max_rpm, max_tpm, estimated_tokens_per_request=50)
    begun, running, most, refused = [], 0, 0, 0

    async def ask(loop, counter, comes, busy, takes, patience):
        nonlocal running, most, refused
        await asyncio.sleep(comes)
        allowing = asyncio.ensure_future(counter.allow())
        await asyncio.wait({allowing}, timeout=patience)
        if not allowing.done():
            allowing.cancel()
            refused += 1
            return
        await asyncio.sleep(busy)
        counter.begin(allowing.result())
        begun.append(loop.time())
        running += 1
        most = max(most, running)
        await asyncio.sleep(takes)
        running -= 1
        counter.end(allowing.result())

    async def all_of_them():
        loop, counter = asyncio.get_running_loop(), Counter(limits)
        await asyncio.gather(*(ask(loop, counter, *each) for each in requests))

    simulate(all_of_them())
    assert len(begun) + refused == len(requests)
    if max_concurrent is not None:
        assert most <= max_concurrent
    if begun:
        in_a_minute = most_within_a_minute(begun)
        assert max_rpm is None or in_a_minute <= max_rpm
        assert max_tpm is None or in_a_minute * 50 <= max_tpm


@pytest.mark.parametrize("max_rpm", [1, 30, 61, 240, 900])
def test_a_rate_is_used_up(max_rpm):
    """Also where the burst of the first second has let some begin early."""
    times, _ = begins(Limits(max_rpm=max_rpm), 3 * max_rpm)
    assert times[-1] < 180
    assert most_within_a_minute(times[: 2 * max_rpm]) == max_rpm


@pytest.mark.parametrize(
    "limits", [Limits(max_rpm=600), Limits(max_rpm=10**6), Limits(8, max_rpm=6000), Limits(64)]
)
def test_the_work_for_a_request_does_not_grow_with_the_number_of_requests(limits):
    turns = {count: begins(limits, count)[1] for count in (512, 2048)}
    assert turns[2048] < 5 * turns[512]
    assert turns[2048] < 8 * 2048


def test_places_of_calls_that_do_not_end():
    """They keep their places. If all do, nobody waits for ever, and those who come fail at once."""

    async def run():
        places = Places("places", 2, seconds=10)
        first, second = await places.take(), await places.take()
        places.mark_stuck(first, "sample a")
        waiting = asyncio.ensure_future(places.take())
        await asyncio.sleep(1000)
        assert not waiting.done()  # for one place may still come back
        places.mark_stuck(second, "sample b")
        await asyncio.sleep(9)
        places.give_back(first)
        third = await waiting
        places.mark_stuck(third, "sample c")
        loop = asyncio.get_running_loop()
        start = loop.time()
        for _ in range(100):
            with pytest.raises(AllStuckError, match=r"all 2 places .*=10 s.* sample b; sample c"):
                await places.take()
        assert loop.time() - start == pytest.approx(10, abs=0.01)
        places.give_back(second)
        places.mark_stuck(second, "too late")
        assert await places.take() == 3

    simulate(run())


def test_stuck_calls_leave_their_work_to_others_up_to_a_number():
    """Five places, of which two work at once: each of five calls is stuck in its turn."""

    async def run():
        places = Places("threads", 5, at_once=2, seconds=1)
        taken = [await places.take(), await places.take()]
        for number in range(5):
            with pytest.raises(asyncio.TimeoutError):  # all who may work do
                await asyncio.wait_for(places.take(), 100)
            stuck = places.mark_stuck(taken.pop(0), f"sample {number}")
            assert stuck == number + 1
            if number < 3:
                taken.append(await places.take())
        with pytest.raises(AllStuckError, match=r"sample 0; sample 1; sample 2; and 2 more"):
            await places.take()

    simulate(run())


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
        return await asyncio.gather(*(limiter.call(call, "x") for _ in range(count)))

    assert asyncio.run(all_of_them()) == [7] * count
    return most


def test_a_limiter_counts_its_own_process_by_default():
    assert most_at_once(Limiter(Limits(max_concurrent=3)), 20) == 3


def test_the_counter_that_is_handed_in_is_made_once_when_a_call_comes():
    made = []

    def make_counter(limits):
        made.append(limits)
        return Counter(limits)

    limits = Limits(max_concurrent=2)
    limiter = Limiter(limits, make_counter)
    assert made == []
    assert most_at_once(limiter, 10) == 2
    assert made == [limits]
    assert most_at_once(Limiter(None, make_counter), 10) == 10
    assert made == [limits]


def test_the_time_limit_counts_without_the_waiting():
    """Ten calls of a tenth of the limit, one after the other, and one that takes longer."""
    assert most_at_once(Limiter(Limits(max_concurrent=1, timeout=0.5)), 10, 0.1) == 1
    slow = Limiter(Limits(timeout=0.01)).call(lambda: asyncio.sleep(60), "x")
    with pytest.raises(NoAnswerError, match=r"no answer within reward\.timeout=0\.01 s"):
        asyncio.run(slow)


@pytest.mark.parametrize("limits", [Limits(timeout=60), Limits(max_concurrent=2), None])
def test_a_time_out_of_the_function_itself_stays_what_it_is(limits):
    async def ask():
        raise TimeoutError("database did not answer in 5 s")

    with pytest.raises(TimeoutError, match=r"^database did not answer in 5 s$") as caught:
        asyncio.run(Limiter(limits).call(ask, "x"))
    assert not isinstance(caught.value, NoAnswerError)


def test_a_call_that_cannot_be_cancelled_keeps_its_place():
    async def run():
        limiter, running = Limiter(Limits(max_concurrent=2, timeout=10)), set()

        async def ask(name, seconds):
            running.add(name)
            assert len(running) <= 2
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(1000)
            running.remove(name)
            return name

        stuck = asyncio.ensure_future(limiter.call(lambda: ask("stuck", 11), "x"))
        left = asyncio.ensure_future(limiter.call(lambda: ask("left", 5), "y"))
        await asyncio.sleep(1)
        left.cancel()  # by verl
        with pytest.raises(NoAnswerError):
            await stuck
        assert running == {"stuck", "left"}
        names = [limiter.call(functools.partial(ask, n, 1), f"z{n}") for n in range(20)]
        assert await asyncio.gather(*names) == [*range(20)]
        assert asyncio.get_running_loop().time() > 2000

    simulate(run())


def config_of(functions, path=None, **limits):
    reward = {"custom_reward_function": {"path": path}, "reward_functions": functions, **limits}
    return OmegaConf.create({"reward": reward})


def test_limits_that_hold_for_nothing_are_refused():
    for key in KEYS:
        with pytest.raises(ValueError, match=rf"^reward\.{key}=2000: no function asks for limits"):
            check_limits(config_of({"x": {"path": "x.py"}}, **{key: 2000}))
        check_limits(config_of({"x": {"path": "x.py", "limited": True}}, **{key: 2000}))
        check_limits(config_of(None, path="mine.py", **{key: 2000}))
        # Hydra reads `inf` on the command line as this number.
        for wrong in (0, -1, "many", True, math.inf):
            with pytest.raises(
                ValueError, match=rf"reward\.{key}={wrong}: expected a finite number"
            ):
                check_limits(config_of(None, path="mine.py", **{key: wrong}))
    for limits, message in {
        (("max_concurrent", 2.5),): r"reward\.max_concurrent=2\.5: expected a whole number",
        (("max_rpm", 0.5),): r"reward\.max_rpm=0\.5: expected 1 request a minute or more",
        (("max_tpm", 1000),): r"reward\.max_tpm=1000: one request takes more, .*=2000\. Set",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_limits(config_of(None, path="mine.py", **dict(limits)))
    with pytest.raises(ValueError, match=r"x asks a service, and there are no limits\. Set one"):
        check_limits(config_of({"x": {"path": "x.py", "limited": True}}))
