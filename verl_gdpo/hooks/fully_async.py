"""What we do in verl's experimental trainer `fully_async_policy`, whose rollouter hides its errors.

Relies on verl 0.9, in `verl.experimental.fully_async_policy`:
- `fully_async_rollouter.FullyAsyncRollouter`, whose `fit` waits for its coroutine
  `_streaming_generation_main` and drops what that raises: the training ends as if it were finished;
- `fully_async_trainer.FullyAsyncTrainer(config, ...)`, which makes no dataloader, so that
  `create_dataloader` in `legacy.py` does not see it;
- the run ends with what the `fit` of either raises.

Relies on Ray 2: `__ray_metadata__.modified_class`, the class that Ray sends to the actor's process,
whose methods it keeps before an actor is made.
"""

from typing import Any

from verl_gdpo.hooks import legacy
from verl_gdpo.hooks.extend import Function, record_of


def construct_trainer(
    original: Function, self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Extend the trainer if gdpo is in use."""
    legacy.extend(self, config)
    original(self, config, *args, **kwargs)


async def fit_trainer(original: Function, self: Any) -> None:
    """Do what we do in every legacy trainer."""
    await (original(self) if record_of(self) is None else legacy.fit(original, self))


async def generate_and_note(original: Function, self: Any) -> None:
    """Note what ended the generation."""
    try:
        await original(self)
    except Exception as error:
        if (record := record_of(self)) is not None:
            record.ended_by = error
        raise


async def fit_rollouter(original: Function, self: Any) -> None:
    """Raise what ended the generation."""
    await original(self)
    record = record_of(self)
    if record is not None and record.ended_by is not None:
        raise record.ended_by
