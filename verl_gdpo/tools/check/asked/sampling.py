"""Whether dynamic sampling finds the number by which it filters groups."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.group_filter import SUM_METRICS
from verl_gdpo.algorithm.settings import hint
from verl_gdpo.algorithm.values import is_internal
from verl_gdpo.scoring.function_list import owner_of

SUM = "reward"  # of V1's replay buffer: the score of a response
KEPT = "algorithm.gdpo.keep_groups"


def what_filters_lack(
    config: Any, infos: Sequence[Mapping[str, Any]], silent: Collection[str] = ()
) -> list[str]:
    """Return a sentence for each number that groups are filtered by, and no reward returns.

    Args:
        infos: what the reward manager returned for made-up responses, {name: value} of each.
        silent: the functions of the list that were not called.
    """
    groups = config.algorithm.get("filter_groups") or {}
    if not groups.get("enable") or not config.trainer.get("use_v1", False):
        return []
    metric = str(groups.get("metric"))
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    if sampler.get("path"):
        return []
    if config.algorithm.adv_estimator == "gdpo":
        return _what_our_filter_lacks(config, metric, infos, silent)
    # verl.trainer.ppo.v1.replay_buffer.ReplayBuffer looks for it in what the reward manager
    # returns, and ends the run at its first step.
    if metric == SUM or all(metric in info for info in infos):
        return []
    known = _names_in(infos)
    return [
        f"algorithm.filter_groups.metric={metric}: the rewards do not return it for each response, "
        f"so verl would end at its first step. They return {known}{hint(metric, known)}. Name "
        f"one of them, or {SUM} for the score"
    ]


def _what_our_filter_lacks(
    config: Any, metric: str, infos: Sequence[Mapping[str, Any]], silent: Collection[str]
) -> list[str]:
    """Return what `FilterMetric` and `FilterCounts` would end the run for, at its first step."""
    known = _names_in(infos)
    # {name: its key}
    needed = {}
    if metric not in SUM_METRICS:
        needed[metric] = f"algorithm.filter_groups.metric={metric}"
    for name in OmegaConf.select(config, KEPT) or {}:
        needed[name] = f"{KEPT}.{name}"
    problems = []
    for name, where in needed.items():
        if name in known or owner_of(name, silent) is not None:
            continue
        problems.append(
            f"{where}: no reward returns it, so the run would end at its first step. They return "
            f"{known}{hint(name, known)}. Name one of them"
        )
        if name == metric:
            problems[-1] += f", or {SUM} for GDPO's own signal alone"
    return problems


def _names_in(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the rewards return, without what verl-gdpo notes beside it."""
    return sorted({str(name) for info in infos for name in info if not is_internal(name)})
