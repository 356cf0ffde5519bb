"""Lists the trainers of verl that GDPO supports and refuses; docs/trainers.md has them too."""

from types import MappingProxyType
from typing import Any

import verl
from packaging.version import Version

# {trainer: versions of verl on which its tests ran}
TRAINERS = MappingProxyType(
    {
        "sync": ("0.9.0", "0.9.1"),
        "colocate_async": ("0.9.1",),
        "separate_async": ("0.9.0", "0.9.1"),
        "legacy": ("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
        "one_step_off_policy": ("0.8.0", "0.9.0", "0.9.1"),
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
        "main_ppo_sync": (
            "the trainer of verl 0.8 on TransferQueue does not pass the rewards to the estimator. "
            "Use verl.trainer.main_ppo, or verl 0.9"
        ),
    }
)


def refuse_trainer(config: Any) -> None:
    """Raise ValueError if the configuration is for a trainer in `REFUSED`.

    Relies on verl 0.7.1 to 0.9: only `fully_async_policy` has `async_training` in its
    configuration. Before 0.9, only 0.8's `main_ppo_sync` sets `transfer_queue.enable`.
    """
    has_v1 = Version(verl.__version__) >= Version("0.9")
    for trainer, is_meant in {
        "fully_async_policy": config.get("async_training") is not None,
        "main_ppo_sync": not has_v1 and config.transfer_queue.enable,
    }.items():
        if is_meant:
            raise ValueError(f"gdpo does not run on {trainer}: {REFUSED[trainer]}")
