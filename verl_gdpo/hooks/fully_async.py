"""Extends verl's experimental trainer `fully_async_policy`, whose rollouter hides its errors.

Relies on verl 0.9, in `verl.experimental.fully_async_policy`:
- `fully_async_rollouter.FullyAsyncRollouter`, whose `fit` waits for its coroutine
  `_streaming_generation_main` and drops what that raises: the training ends as if it were finished;
- `fully_async_trainer.FullyAsyncTrainer(config, ...)`, which makes no dataloader, so that
  `legacy_trainer.py` does not see it;
- the run ends with what the `fit` of either raises.

Relies on Ray 2: `__ray_metadata__.modified_class`, the class that Ray sends to the actor's process,
and calls the methods of; a class that the actor takes later has no part in that.
"""

import functools
from typing import Any

from verl_gdpo.hooks.legacy_trainer import GdpoLegacyTrainer, extend


def extend_rollouter(module: Any) -> None:
    """Let the rollouter raise what ended its generation."""
    rollouter_cls = module.FullyAsyncRollouter.__ray_metadata__.modified_class
    generate, fit = rollouter_cls._streaming_generation_main, rollouter_cls.fit

    @functools.wraps(generate)
    async def generate_and_note(self: Any) -> None:
        try:
            await generate(self)
        except Exception as error:
            self.ended_by = error
            raise

    @functools.wraps(fit)
    async def fit_and_raise(self: Any) -> None:
        await fit(self)
        if isinstance(self, GdpoLegacyTrainer) and hasattr(self, "ended_by"):
            raise self.ended_by

    rollouter_cls._streaming_generation_main = generate_and_note
    rollouter_cls.fit = fit_and_raise


def extend_trainer(module: Any) -> None:
    """Make the trainer one of ours if gdpo is in use."""
    trainer_cls = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    make, fit = trainer_cls.__init__, trainer_cls.fit

    @functools.wraps(make)
    def extend_and_make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        extend(self, config)
        make(self, config, *args, **kwargs)

    @functools.wraps(fit)
    async def fit_as_ours(self: Any) -> None:
        ours = isinstance(self, GdpoLegacyTrainer)
        await (self.fit_on(fit(self)) if ours else fit(self))

    trainer_cls.__init__, trainer_cls.fit = extend_and_make, fit_as_ours
