"""The advantages of a run once more, from its rollout dump, under its own and other settings.

verl-gdpo replay DIR [--arm NAME ...] [key=value ...]
"""

from verl_gdpo.replay.command import main

__all__ = ["main"]
