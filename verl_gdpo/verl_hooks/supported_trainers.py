"""Lists the trainers of verl that GDPO supports and refuses; docs/trainers.md has them too."""

from types import MappingProxyType
from typing import Any

# {trainer: versions of verl on which its tests ran}
TRAINERS = MappingProxyType(
    {
        "sync": ("0.9.0", "0.9.1"),
        "colocate_async": ("0.9.1",),
        "separate_async": ("0.9.0", "0.9.1"),
        "legacy": ("0.9.0", "0.9.1"),
        "one_step_off_policy": ("0.9.0", "0.9.1"),
    }
)

# {trainer: why gdpo must not run on it}
REFUSED = MappingProxyType(
    {
        "fully_async_policy": (
            "when a sample cannot be scored, its rollouter ends the training as if it were "
            "finished, with exit code 0. Use verl.trainer.main_ppo with "
            "trainer.v1.trainer_mode=colocate_async or separate_async"
        ),
    }
)


def refuse_trainer(config: Any) -> None:
    """Raise ValueError if the configuration is for a trainer in `REFUSED`.

    Relies on verl 0.9: only `fully_async_policy` has `async_training` in its configuration.
    """
    if config.get("async_training") is not None:
        trainer = "fully_async_policy"
        raise ValueError(f"gdpo does not run on {trainer}: {REFUSED[trainer]}")
