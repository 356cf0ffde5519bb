"""The rollout "made": verl trains on responses that no model wrote, so that a step is the training.

VERL_USE_EXTERNAL_MODULES=workshop.gpu_kit.made_rollout lets verl import this in every process.
"""

from verl_gdpo.cpu.plugin import register_rollout

register_rollout("made", "workshop.gpu_kit.made_server", "MadeReplica", "MadeAdapter")
