"""Scorers that escape, are cancelled, or hang; each stops the run or is named in the log.

To add a case, write a function that gets what the model said and returns what a scorer returns, and
give it to `stage.train(prompts, score)`. It runs in verl's reward worker.
"""

import asyncio
import concurrent.futures
import re
import time

import pytest
import ray
import scripted
import torch
from stage import limit, oracle_of
from verl import DataProto

from verl_gdpo.algorithm.values import RewardError

A, B, C = {"a": 0, "b": 3}, {"a": 1, "b": 1}, {"a": 2, "b": 0}
LAST = {"a": 9, "b": 9}  # what the cases wait for
PROMPTS = [[A, B], [C, LAST]]


class Own(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def kinds(function):
    """`function` as verl's users write scorers."""

    async def coroutine_function(said):
        return function(said)

    def awaitable(said):
        return coroutine_function(said)

    return {"sync": function, "async": coroutine_function, "awaitable": awaitable}


ESCAPES = [
    *(asyncio.CancelledError, concurrent.futures.CancelledError, KeyboardInterrupt, SystemExit),
    *(GeneratorExit, StopIteration, StopAsyncIteration, Own, Unprintable),
]


@pytest.mark.parametrize("kind", ["sync", "async", "awaitable"])
def test_what_escapes_from_a_scorer_stops_the_run(stage, kind):
    def score(said):
        if "escape" in said:
            raise ESCAPES[said["escape"]]
        return said

    prompts = [[A, B], [{"escape": number} for number in range(len(ESCAPES))]]
    with pytest.raises(RewardError, match=f"{len(ESCAPES)} of {len(ESCAPES) + 2} samples"):
        stage.train(prompts, kinds(score)[kind])
    for (prompt, session), message in stage.errors().items():
        assert re.search(rf"extra_info.index {prompt}: .*{ESCAPES[session].__name__}", message)


async def wait_for_a_cancelled_task(said):
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def cancel_oneself(said):
    asyncio.current_task().cancel()
    await asyncio.Event().wait()


async def exceed_a_limit(said):
    await asyncio.wait_for(asyncio.Event().wait(), 0)


@pytest.mark.parametrize("score", [wait_for_a_cancelled_task, cancel_oneself, exceed_a_limit])
def test_the_scorers_own_cancellation_stops_the_run(stage, score):
    with pytest.raises(RewardError, match=r"4 of 4 samples .* extra_info.index 0: "):
        stage.train(PROMPTS, score)


def test_a_case_that_hangs_fails(stage):
    (worker,) = stage.rewards.reward_loop_workers
    with pytest.raises(SystemExit), limit(0.1):
        ray.get(worker.__ray_call__.remote(lambda _: time.sleep(3)))


def test_a_cancellation_by_verl_stays_one(stage):
    """Ray cancels the coroutine in which verl waits for the scorer."""

    async def score(said):
        scripted.reached.set()
        await asyncio.Event().wait()

    stage.tell(score, {})
    ids = torch.tensor([stage.tokenizer.encode("{}")])
    batch = DataProto.from_dict(
        {"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={"data_source": ["d"], "uid": ["u"]},
    )
    (worker,) = stage.rewards.reward_loop_workers
    scoring = worker.compute_score.remote(batch)
    # a function that waits in the worker could keep the scorer from starting
    while not ray.get(worker.__ray_call__.remote(lambda _: scripted.reached.is_set())):
        pass
    ray.cancel(scoring)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(scoring)


@pytest.fixture
def slow(stage):
    """Let verl's reward worker name slow samples at once, and `scripted.named` wait for LAST."""

    def set_limits(first, poll):
        def change(worker):
            from verl_gdpo.scoring import scorer_calls

            before = scorer_calls.FIRST_SECONDS, scorer_calls.POLL_SECONDS
            scorer_calls.FIRST_SECONDS, scorer_calls.POLL_SECONDS = first, poll
            scripted.listen(scorer_calls.logger, "extra_info.index 1;")
            return before

        (worker,) = stage.rewards.reward_loop_workers
        return ray.get(worker.__ray_call__.remote(change))

    before = set_limits(0.05, 0.01)
    yield
    set_limits(*before)


def hang(said):
    """Score the sample LAST after the log has named it."""
    if said == {"a": 9, "b": 9}:
        assert scripted.named.wait(120), "the log does not name the sample"
    return said


async def hang_async(said):
    # A wait in the event loop would hold up the other samples too, and the log names the oldest.
    return await asyncio.to_thread(hang, said)


def hang_awaitable(said):
    return hang_async(said)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("score", [hang, hang_async, hang_awaitable])
def test_a_scorer_that_hangs_is_named(stage, score):
    assert stage.train(PROMPTS, score).advantages == oracle_of(PROMPTS)


def fail_at_last(said):
    return {"a": 1 / (9 - said["a"])}


def test_an_error_of_a_scorer_stops_every_trainer(stage):
    named = r"data_source 'd', extra_info.index 1: ZeroDivisionError: .*\.py:\d"
    for mode in ("sync", "colocate_async"):
        with pytest.raises(RewardError, match=named):
            stage.train(PROMPTS, fail_at_last, mode=mode)
    for of_validation in (PROMPTS, [[LAST]]):
        with pytest.raises(RewardError, match=r"1 of .*ZeroDivisionError"):
            stage.validate(of_validation, fail_at_last)


def test_an_error_with_a_failed_session_stops_the_run(stage):
    """In an asynchronous mode, verl drops a group of which a session failed."""

    prompts = [[A, B], [LAST, RuntimeError("the server is gone")], [B, C]]
    settings = {"data.train_batch_size": 2}
    for mode in ("sync", "colocate_async"):
        with pytest.raises(RewardError, match=r"extra_info.index 1: ZeroDivisionError"):
            stage.train(prompts, fail_at_last, mode=mode, settings=settings)


def test_an_error_in_a_group_that_is_too_old_stops_the_run(stage):
    with pytest.raises(RewardError, match=r"extra_info.index 1: ZeroDivisionError"):
        stage.train_late([*PROMPTS, *PROMPTS[:1] * 4], fail_at_last)


def test_an_error_in_a_group_without_signal_stops_the_run(stage):
    prompts = [[A, B], [LAST, LAST], [B, C]]
    settings = {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "reward",
        "data.train_batch_size": 2,
    }
    with pytest.raises(RewardError, match=r"extra_info.index 1: ZeroDivisionError"):
        stage.train(prompts, fail_at_last, settings=settings)
