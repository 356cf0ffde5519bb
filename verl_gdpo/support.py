"""Which of verl's trainers GDPO runs on; README.md has the same table."""

from types import MappingProxyType

# {trainer: versions on which its tests ran}
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
            "the trainer of verl 0.8 on TransferQueue leaves the rewards out of what it hands to "
            "the estimator. Use verl.trainer.main_ppo, or verl 0.9"
        ),
    }
)
