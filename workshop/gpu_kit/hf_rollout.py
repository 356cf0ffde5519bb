"""Lets a run on a GPU use the rollout "hf", which needs no vLLM and suits tiny models alone.

VERL_USE_EXTERNAL_MODULES=workshop.gpu_kit.hf_rollout lets verl import this in every process.
Training is on the GPU then, and responses are sampled on the CPU: rollout.name=hf,
rollout.dtype=float32.
"""

from verl_gdpo.cpu.plugin import register_rollout

register_rollout("hf", "verl_gdpo.cpu.rollout", "HFReplica", "HFServerAdapter")
