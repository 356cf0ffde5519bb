"""What we do in verl's fully asynchronous training, which generates and trains at the same time.

Its trainer is derived from the legacy one, so that `legacy.py` does the rest.

Relies on verl 0.9, `verl.experimental.fully_async_policy`: the rollouter, whose `fit` waits for its
coroutine `_streaming_generation_main` and drops what that raises, as if the training were finished;
the trainer, which makes no dataloader; and that the run ends with what the `fit` of either raises.
"""

import asyncio
from typing import Any

from verl_gdpo.hooks import legacy, net
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import record_of


def construct_trainer(call: Call) -> Any:
    """Extend the trainer if gdpo is in use."""
    # What cannot work is refused before the constructor makes anything.
    legacy.extend(call.instance, call["config"])
    return call.hand_on()


async def fit_trainer(call: Call) -> Any:
    """Do what we do in every legacy trainer."""
    # Ray has this class before a trainer is made, so a trainer without gdpo comes here too.
    if record_of(call.instance) is None:
        return await call.hand_on()
    return await legacy.fit(call)


async def generate_and_note(call: Call) -> Any:
    """Note what ended the generation."""
    record = record_of(call.instance)
    if record is not None and not record.is_fitting:
        net.warn_of("FullyAsyncRollouter.fit")
    try:
        return await call.hand_on()
    except Exception as error:
        # verl drops the error, so that `fit_rollouter` has to raise it again.
        if record is not None:
            record.ended_by = error
        raise


async def fit_rollouter(call: Call) -> Any:
    """Raise what ended the generation; ask the reward workers, which the trainer has not."""
    record = record_of(call.instance)
    if record is not None:
        record.is_fitting = True
        await asyncio.to_thread(record.ask_reward_workers, call.instance)
    result = await call.hand_on()
    if record is not None and record.ended_by is not None:
        raise record.ended_by
    return result
