"""What a run will do: with our estimator or reward manager, or with verl's own alone."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.settings.of_run import settings_of_run, uses_gdpo_manager
from verl_gdpo.tools.check.data import DataFile


@dataclass(frozen=True)
class Plan:
    """`settings` is None where verl-gdpo has no part in the run; `remarks` say what it will do."""

    settings: GdpoSettings | None
    remarks: Sequence[str]


def make_plan(config: Any, training: Sequence[DataFile]) -> Plan:
    """Return the settings, with the bounds that the scorers of the training rows declare.

    Raises:
        ValueError: a setting cannot work; the message says why and what to set instead.
    """
    sources = dict.fromkeys(source for file in training for source in file.sources)
    has_manager = uses_gdpo_manager(config) or _has_subclass_of_ours(config)
    settings = settings_of_run(config, sources or None, has_manager=has_manager)
    named = (
        f"adv_estimator={config.algorithm.adv_estimator}, "
        f"reward_manager={config.reward.reward_manager.name}"
    )
    if settings is None:
        return Plan(
            None,
            [
                f"{named}: both are verl's own, so verl-gdpo has no part in this run, which trains "
                "on one score of each response. For GDPO: algorithm.adv_estimator=gdpo "
                "reward.reward_manager.name=gdpo"
            ],
        )
    values = [f"{f.name}={getattr(settings, f.name)}" for f in fields(settings)]
    shown = [text for text in values if not text.startswith("rewards=")]
    return Plan(settings, [named, ", ".join(shown)])


def _has_subclass_of_ours(config: Any) -> bool:
    from verl_gdpo.verl_hooks.reward_manager import runs_gdpo_manager

    try:
        return runs_gdpo_manager(config)
    except Exception:  # the dry run makes the manager later and reports the reason
        return False
