"""The settings of a run, whose scorers declare rewards; refuses what cannot work with GDPO."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo import tasks as rewards
from verl_gdpo.algorithm.conditions import PaidFailure, paid_by_bounds
from verl_gdpo.algorithm.read_settings import REWARDS, line_of, plain, read_settings
from verl_gdpo.algorithm.settings import GdpoSettings, hint
from verl_gdpo.algorithm.values import RowNames
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.scoring.function_list import KEY as FUNCTIONS
from verl_gdpo.scoring.function_list import (
    algorithm_of,
    ask_for_names,
    check_configured,
    check_entries,
    entries_of,
    names_of_entry,
    owner_of,
)

logger = logging.getLogger(__name__)

KL_IN_REWARD = (
    "algorithm.use_kl_in_reward=True with adv_estimator=gdpo: each reward is normalised by itself, "
    "which leaves no place for a penalty on their sum. Set it to False and use "
    "actor_rollout_ref.actor.use_kl_loss=True"
)


def settings_of_run(
    config: Any,
    sources: Iterable[str] | None = None,
    *,
    has_manager: bool | None = None,
    is_recorded: bool = False,
) -> GdpoSettings | None:
    """Check a verl configuration and return its settings.

    Args:
        sources: the data sources of the training rows; their scorers declare rewards and bounds.
            Pass None if they are not known yet: then all data sources that we score are used, and
            bounds on which their scorers disagree are left out.
        has_manager: whether the reward manager is ours or a subclass of ours. With None, the
            manager's name decides.
        is_recorded: whether a run has trained with these rewards; an older version allowed it to
            say nothing of some of them, and to pay for failing a condition.

    Returns:
        The settings, or None if neither the estimator nor the reward manager is gdpo.

    Raises:
        ValueError: a setting cannot work with GDPO. The message says why and what to set instead.
    """
    uses_estimator = config.algorithm.adv_estimator == "gdpo"
    has_manager = uses_gdpo_manager(config) if has_manager is None else has_manager
    _refuse_capitals(str(config.algorithm.adv_estimator), has_manager)
    if not (uses_estimator or has_manager):
        return None
    check_entries(config)
    ours, options = _our_scorers(config, sources)
    declared = scorers_bounds(config, sources) if has_manager else {}
    settings = read_settings(algorithm_of(config), declared)
    for mistake in _mistakes(config, settings, uses_estimator):
        raise ValueError(mistake)
    if not is_recorded:
        _refuse_unknown_names(config, settings)
    if options and uses_gdpo_manager(config):  # another manager may read them
        rewards.check_options(options, ours)
    if has_manager and sources is not None and not is_recorded:
        _refuse_service(config, ours)
        returned = _returned(ours, options)
        _refuse_partial(settings.rewards_as_written, returned)
        if sources and _our_scorers_alone(config) and all(returned.values()):
            _refuse_never_returned(settings, {*sources}, returned)
    if not is_recorded:
        for paid in paid_failures(config, settings):
            if paid.is_default:
                raise ValueError(paid.message)
    if uses_estimator:
        disagreed = {name for name, pair in declared.items() if pair is None}
        later = disagreed if sources is None else set()
        used = {name for name, term in settings.terms.items() if term.is_used}
        settings.check_bounds(sorted(used - later))
    return settings


def paid_failures(config: Any, settings: GdpoSettings) -> list[PaidFailure]:
    """Return the rewards whose bounds tell that failing their condition pays."""
    is_summed = sums_first(config.algorithm.adv_estimator, settings)
    return paid_by_bounds(settings, is_summed=is_summed)


def sums_first(adv_estimator: str, settings: GdpoSettings) -> bool:
    """Return whether the rewards are added up before they are normalised."""
    return adv_estimator != "gdpo" or settings.group_norm == "summed"


def warn_once(paid: PaidFailure) -> None:
    """Log a value of `otherwise` that the user has written; the step finds it again and again."""
    if paid.reward not in _warned:
        _warned.add(paid.reward)
        logger.warning("verl-gdpo: %s", paid.message)


_warned: set[str] = set()  # rewards


def scorers_bounds(config: Any, sources: Iterable[str] | None) -> dict[str, Bounds | None]:
    """Return {reward: bounds} that our scorers declare, None where they disagree.

    Args:
        sources: see `settings_of_run`.
    """
    return rewards.declared_bounds(*_our_scorers(config, sources))


def _refuse_capitals(estimator: str, has_manager: bool) -> None:
    """Raise ValueError for GDPO or GRPO, of which verl knows nothing before its first update."""
    meant = estimator.lower()
    if meant != estimator and (meant == "gdpo" or (meant == "grpo" and has_manager)):
        raise ValueError(
            f"algorithm.adv_estimator={estimator}: unknown to verl{hint(estimator, [meant])}"
        )


def row_names(settings: GdpoSettings, data_source: str) -> RowNames:
    """Return how the rewards of rows of a data source, which we or verl score, get their names."""
    task, renames = rewards.TASK_BY_SOURCE.get(data_source), []
    for verls, ours in (task.verl_names if task else {}).items():
        pairs = ((verls, ours), (ours, verls))
        renames += [(name, other) for name, other in pairs if name in settings.names]
    elsewhere = functools.partial(rewards.belongs_elsewhere, data_source=data_source)
    return RowNames(settings.names, renames, elsewhere)


def _our_scorers(config: Any, sources: Iterable[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the data sources whose rows our scorers score, and the options of the scorers."""
    is_custom = has_own_scorer(config)
    asked = rewards.TASK_BY_SOURCE if sources is None else sources
    options = plain(config.reward.get("reward_kwargs")) or {}
    return [] if is_custom else sorted({*asked} & {*rewards.TASK_BY_SOURCE}), options


def _our_scorers_alone(config: Any) -> bool:
    """Whether nothing of the user's own returns rewards, as far as the configuration tells."""
    has_function = has_own_scorer(config)
    loops = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")
    return uses_gdpo_manager(config) and not has_function and loops is None


def _returned(sources: Iterable[str], options: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """Return {data source that we score: {its reward: the names that it may have}}."""
    return {
        source: {
            name: {
                name,
                *(v for v, our in rewards.TASK_BY_SOURCE[source].verl_names.items() if our == name),
            }
            for name in rewards.declared_by(source, options)
        }
        for source in sources
    }


def _refuse_unknown_names(config: Any, settings: GdpoSettings) -> None:
    """Raise ValueError if a function of the list fails under names that nobody knows.

    Where `algorithm.gdpo.rewards` or the list has weights, the configured names are all that a row
    needs.
    """
    check_configured(config, settings.names)
    if settings.rewards is not None:
        return
    for name, entry in entries_of(config).items():
        if entry["on_error"] == "missing" and names_of_entry(name, entry) is None:
            raise ValueError(ask_for_names(name))


def _refuse_partial(
    written: Mapping[str, Any], returned: Mapping[str, Mapping[str, set[str]]]
) -> None:
    """Raise ValueError if `algorithm.gdpo.rewards` says something, but nothing of some reward.

    Args:
        written: `GdpoSettings.rewards_as_written`.
        returned: of the training rows that we score; see `_returned`.
    """
    known = {name: names for of in returned.values() for name, names in of.items()}
    absent = [name for name, names in known.items() if not names & {*written}]
    if not written or not absent:
        return
    strange = [name for name in written if not any(name in names for names in known.values())]
    close = "".join(f" ({name!r} is none of them{hint(name, [*known])})" for name in strange)
    whole = {name: each for name, each in written.items() if name not in strange}
    raise ValueError(
        f"{REWARDS} names {[*written]}, and says nothing of {absent}, which the scorer of the "
        f"training rows ({', '.join(returned)}) returns too{close}. Give the weights that you "
        f"want: {line_of(REWARDS, {**whole, **dict.fromkeys(absent, 1.0)})}. With 0 a reward is "
        "scored and logged, and has no weight; with null it is left out"
    )


def _refuse_never_returned(
    settings: GdpoSettings,
    sources: set[str],
    returned: Mapping[str, Mapping[str, set[str]]],
) -> None:
    """Raise ValueError for a name that would be missing, or a condition unmet, in every row.

    Args:
        sources: of all training rows. Those that verl scores may return any name but ours.
        returned: of the sources that we score; see `_returned`.
    """
    names_of = {source: set().union(*of.values()) for source, of in returned.items()}
    known = {name for names in names_of.values() for name in names}
    others = sources - {*returned}
    for name in settings.names:
        if name not in known and all(rewards.belongs_elsewhere(name, each) for each in others):
            raise ValueError(
                f"{REWARDS} names {name!r}, which no scorer of the training rows "
                f"({', '.join(sorted(sources))}) returns{hint(name, sorted(known))}. Leave it out, "
                "or set the option in reward.reward_kwargs with which the scorer returns it"
            )
    for name, term in settings.terms.items():
        for source, names in names_of.items():
            if term.when is not None and name in names and term.when.reward not in names:
                raise ValueError(
                    f"{REWARDS}.{name}.when.reward={term.when.reward}: rows of {source!r} have "
                    f"{name!r} and no {term.when.reward!r}, so none of them would ever meet the "
                    "condition. Train these rows in a run of their own, or without the condition"
                )


def uses_gdpo_manager(config: Any) -> bool:
    """Return whether the reward manager is named gdpo. A subclass of ours may have another name."""
    manager = config.reward.reward_manager
    return bool(manager.source == "register" and manager.name == "gdpo")


def has_own_scorer(config: Any) -> bool:
    """Return whether functions of the user's score the rows."""
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    return path is not None or bool(entries_of(config))


def has_gdpo(config: Any) -> bool:
    """Return whether the estimator or the reward manager is named gdpo."""
    return config.algorithm.adv_estimator == "gdpo" or uses_gdpo_manager(config)


def _refuse_service(config: Any, sources: Iterable[str]) -> None:
    """Raise ValueError for a service that our scorers of these data sources would not ask."""
    url = OmegaConf.select(config, "reward.sandbox_fusion.url")
    if url and any(rewards.TASK_BY_SOURCE[source].programs for source in sources):
        raise ValueError(
            f"reward.sandbox_fusion.url={url}: verl-gdpo runs programs on the machines of the "
            "reward workers, locked in. Leave it out, or call the service in a reward function of "
            "your own"
        )


def _mistakes(config: Any, settings: GdpoSettings, uses_estimator: bool) -> Iterator[str]:
    """Yield what cannot work, and what to set instead."""
    model, function = config.reward.reward_model, config.reward.custom_reward_function
    options = plain(config.reward.get("reward_kwargs")) or {}
    if uses_estimator and config.algorithm.get("use_kl_in_reward", False):
        yield KL_IN_REWARD
    if uses_estimator and OmegaConf.select(config, "actor_rollout_ref.rollout.n") == 1:
        yield (
            "actor_rollout_ref.rollout.n=1 with adv_estimator=gdpo: a group of one sample has no "
            "spread, so every advantage would be 0. Set it to 2 or more"
        )
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout") or {}
    is_vllm = rollout.get("name") == "vllm"
    if uses_estimator and is_vllm and rollout.get("full_determinism", False):
        yield (
            "actor_rollout_ref.rollout.full_determinism=True with rollout.name=vllm: verl gives "
            "all samples of a prompt one seed (vllm_async_server.py). So they are equal, and every "
            "advantage would be 0. Set it to False"
        )
    if model.enable and not model.enable_resource_pool:
        yield (
            "reward.reward_model.enable=True with enable_resource_pool=False: a colocated reward "
            "model hands the reward manager no ground truth, so there are no named rewards. Set "
            "reward.reward_model.enable_resource_pool=True"
        )
    if model.enable and function.path is None:
        yield (
            "reward.reward_model.enable=True with reward.custom_reward_function.path=null: verl "
            "takes the model's single score without a reward manager. Set a custom reward "
            "function that queries the model and returns {name: value}"
        )
    steps = OmegaConf.select(config, "trainer.total_training_steps")
    filters_groups = OmegaConf.select(config, "algorithm.filter_groups.enable")
    if (
        settings.rewards
        and filters_groups
        and (silent := settings.terms.silent_step(steps)) is not None
    ):
        yield (
            f"{REWARDS}: all weights are 0 at step {silent}, and "
            "algorithm.filter_groups.enable=True would drop every group there and never end. Give "
            "a weight another schedule, or end the run before with trainer.total_training_steps"
        )
    if entries_of(config) and function.path is not None:
        moved = f"+{FUNCTIONS}.NAME.path={function.path} +{FUNCTIONS}.NAME.name={function.name}"
        yield (
            f"reward.custom_reward_function.path={function.path} beside {FUNCTIONS}: one of them "
            f"would not be called. Move it into the list: {moved}"
        )
    conditions = {term.when.reward for term in settings.terms.values() if term.when}
    is_summed = sums_first(config.algorithm.adv_estimator, settings)
    for name, entry in entries_of(config).items():
        on_error, why = entry["on_error"], ""
        is_asked = name in [owner_of(reward, entries_of(config)) for reward in conditions]
        if on_error == "missing" and (is_summed or is_asked):
            why = "the rewards are summed first" if is_summed else "a condition asks for it"
        elif on_error == "drop" and filters_groups and not uses_estimator:
            why = "verl filters groups by all scores"
        if why:
            yield (
                f"{FUNCTIONS}.{name}.on_error={on_error}: {why}, so a sample without this reward "
                "would count as a bad one. Set on_error=stop"
            )
        if entry["rubric"] and settings.combine:
            yield (
                f"{FUNCTIONS}.{name}.rubric={entry['rubric']} with algorithm.gdpo.combine="
                f"{settings.combine.name}: it takes the same rewards of all prompts. Leave one out"
            )
    if entries_of(config) and not uses_gdpo_manager(config):
        yield (
            f"{FUNCTIONS} with reward.reward_manager.name={config.reward.reward_manager.name}: "
            "only the manager gdpo reads the list. Set reward.reward_manager.name=gdpo"
        )
    if options and has_own_scorer(config) and uses_gdpo_manager(config):
        yield (
            f"reward.reward_kwargs={options}: with reward functions of your own, nothing reads "
            "them. Options of your function go to reward.custom_reward_function.reward_kwargs, or "
            f"to its entry in {FUNCTIONS}"
        )
