"""verl's replay buffers, as a trainer with gdpo makes them."""

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_gdpo.hooks.extend import extend_instance
from verl_gdpo.hooks.replay_buffer import BufferRecord


def made_buffer(guard=None, verls=ReplayBuffer, mode="sync", **more):
    buffer = verls(
        trainer_mode=mode,
        trainer_config=OmegaConf.create(),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(),
        **more,
    )
    extend_instance(buffer, "ReplayBuffer", BufferRecord(guard))
    return buffer
