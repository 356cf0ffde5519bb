"""Whether dynamic sampling finds the number by which it filters groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_gdpo.algorithm.settings import hint

SUM = "reward"  # of V1's replay buffer: the score of a response


def what_filters_lack(config: Any, infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence if the rewards do not return `algorithm.filter_groups.metric`.

    verl.trainer.ppo.v1.replay_buffer.ReplayBuffer looks for it in what the reward manager returns,
    and ends the run at its first step. With gdpo, groups are filtered by what GDPO computes.

    Args:
        infos: what the reward manager returned for made-up responses, {name: value} of each.
    """
    groups = config.algorithm.get("filter_groups") or {}
    is_ours = config.algorithm.adv_estimator == "gdpo"
    if not groups.get("enable") or is_ours or not config.trainer.get("use_v1", False):
        return []
    metric = str(groups.get("metric"))
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    if metric == SUM or sampler.get("path") or all(metric in info for info in infos):
        return []
    known = sorted({str(name) for info in infos for name in info})
    return [
        f"algorithm.filter_groups.metric={metric}: the rewards do not return it for each response, "
        f"so verl would end at its first step. They return {known}{hint(metric, known)}. Name "
        f"one of them, or {SUM} for the score"
    ]
