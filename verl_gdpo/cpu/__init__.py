"""Run verl's own trainers on a machine without a GPU: for tests, debugging and tutorials.

What it is: a verl platform (`device.py`), a rollout server that samples with transformers
(`rollout.py` over `engine.py` and `sampler.py`), the patches that verl 0.9 needs to use them
(`plugin.py`), and a tiny policy (`tool_rl_policy`).

What it is not: a way to train models of useful size, or a change to training on GPUs. Nothing
happens unless `VERL_PLATFORM=cpu` is in the environment before Python starts. A run on a GPU may
ask for the rollout alone, as `workshop/gpu_kit/hf_rollout.py` does, to do without vLLM.
"""
