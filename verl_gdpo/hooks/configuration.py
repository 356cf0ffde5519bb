"""The settings of a run, whose scorers declare rewards; refuses what cannot work with GDPO."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.algorithm.conditions import PaidFailure, paid_by_bounds
from verl_gdpo.algorithm.matrix import rewards_among
from verl_gdpo.algorithm.read_settings import (
    KEYS,
    REWARDS,
    WEIGHTS,
    line_of,
    plain,
    settings_and_mistakes,
)
from verl_gdpo.algorithm.settings import WHERE, GdpoSettings, Options, SettingsError, hint
from verl_gdpo.algorithm.values import RowNames, is_internal
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.hooks import run_keys
from verl_gdpo.scoring.function_list import KEY as FUNCTIONS
from verl_gdpo.scoring.function_list import (
    NEVER,
    ONLY,
    algorithm_of,
    ask_for_names,
    check_configured,
    check_entries,
    entries_of,
    is_asked,
    names_of_entry,
    owner_of,
    tells_validation_apart,
    validates,
    validation_settings,
)
from verl_gdpo.scoring.limits import check_limits
from verl_gdpo.scoring.response import thought_tags
from verl_gdpo.tasks import (
    TASK_BY_SOURCE,
    TaskError,
    belongs_elsewhere,
    declared_bounds,
    declared_by,
    mistakes_of_options,
)

logger = logging.getLogger(__name__)

# Settings of what is done with the rewards after they were scored.
OF_THE_ESTIMATOR = (*(each.name for each in fields(Options)), "combine", "dialect")
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
        SettingsError: settings cannot work with GDPO. For each mistake, it says why and what to set
            instead.
    """
    settings, mistakes = settings_and_mistakes_of_run(
        config, sources, has_manager=has_manager, is_recorded=is_recorded
    )
    if mistakes:
        raise SettingsError(mistakes)
    return settings


def settings_and_mistakes_of_run(
    config: Any,
    sources: Iterable[str] | None = None,
    *,
    has_manager: bool | None = None,
    is_recorded: bool = False,
) -> tuple[GdpoSettings | None, list[str]]:
    """Return the settings as far as they can be read, and a message for each mistake.

    No run may use settings with a mistake; `verl-gdpo check` looks at them for further ones. See
    `settings_of_run` for the arguments.
    """
    if has_manager is None:
        has_manager = uses_gdpo_manager(config)
    # Of a name in capitals, verl says first that it is unknown. The rest is looked at as if it had
    # been written right.
    written = str(config.algorithm.adv_estimator)
    estimator = _meant_estimator(written, has_manager)
    if estimator != "gdpo" and not has_manager:
        return None, []
    mistakes = []
    if estimator != written:
        close = hint(written, [estimator])
        mistakes.append(f"algorithm.adv_estimator={written}: unknown to verl{close}")

    # One mistake must not hide another, so each part is read whether the others are right or not.
    # Of a list that is wrong, the weights are not known, and the block `algorithm` stands as it is.
    of_list: list[str] = []
    algorithm = config.algorithm
    with noted(of_list):
        check_entries(config)
        algorithm = algorithm_of(config)
    # Another manager does not ask our scorers, so what they declare says nothing of its rewards.
    of_scorers: list[str] = []
    declared: dict[str, Bounds | None] = {}
    if has_manager:
        with noted(of_scorers):
            declared = scorers_bounds(config, sources)
    settings, of_settings = settings_and_mistakes(algorithm, declared)
    mistakes += of_list + of_scorers + of_settings

    if estimator == "gdpo":
        mistakes += _mistakes_of_estimator(config)
    mistakes += _mistakes_of_reward_model(config)
    mistakes += _mistakes_of_schedule(config, settings)
    mistakes += _mistakes_of_kept_groups(config, settings, estimator)
    mistakes += _mistakes_of_options(config, sources)
    # What follows from entries that are wrong themselves would only confuse.
    if not of_list:
        mistakes += _mistakes_of_list(config, settings, estimator)
        with noted(mistakes):
            mistakes += _mistakes_of_validation(config, settings)
    # A run that has trained goes on, as an older version allowed what follows.
    if not is_recorded:
        if not of_list:
            mistakes += _mistakes_of_listed_names(config, settings, are_known=not of_settings)
        if has_manager and sources is not None:
            mistakes += _mistakes_of_service(config, sources)
            if not of_scorers:
                mistakes += _mistakes_of_task_names(config, settings, sources)
        is_summed = sums_first(estimator, settings)
        for paid in paid_by_bounds(settings, is_summed=is_summed):
            if paid.is_default:
                mistakes.append(paid.message)
    # Scorers declare bounds for the right names and options, so these have to be right first.
    if estimator == "gdpo" and not mistakes:
        with noted(mistakes):
            settings.check_bounds(_rewards_with_bounds(settings, declared, sources))
    return settings, mistakes


def mistakes_beside_the_settings(config: Any) -> list[str]:
    """Return what cannot be of our keys that are no settings of the estimator.

    They are the limits of requests and the tags of a thought, which our reward manager reads, and
    the minutes after which the launcher ends a run.
    """
    mistakes: list[str] = []
    if uses_gdpo_manager(config):
        with noted(mistakes):
            check_limits(config)
        with noted(mistakes):
            thought_tags(config)
    if run_keys.HANG_MINUTES in config.trainer:
        with noted(mistakes):
            run_keys.hang_seconds(config.trainer[run_keys.HANG_MINUTES])
    return mistakes


def unread_settings(config: Any, *, has_manager: bool | None = None) -> list[str]:
    """Return a warning for each of our keys that nobody reads with this estimator and manager.

    Args:
        has_manager: see `settings_of_run`.
    """
    if has_manager is None:
        has_manager = uses_gdpo_manager(config)
    estimator = config.algorithm.adv_estimator
    if estimator == "gdpo":
        return []
    names = f"adv_estimator={estimator}, reward_manager={config.reward.reward_manager.name}"
    written = plain(config.algorithm.get("gdpo")) or {}
    if isinstance(written, Mapping):
        # With null, a recipe leaves the choice to the default.
        written = {key: value for key, value in written.items() if value is not None}
    if has_manager:
        # The manager adds the rewards up, and what is done with the sum is verl's.
        unread = [key for key in written if key in OF_THE_ESTIMATOR]
        if not unread:
            return []
        keys = ", ".join(f"{WHERE}.{key}={written[key]}" for key in unread)
        return [f"{keys}: only the estimator gdpo reads it, and the run has {names}"]
    warnings = []
    ours = {WHERE: written, FUNCTIONS: OmegaConf.select(config, FUNCTIONS)}
    for key in (KEYS, WEIGHTS):
        ours[key] = OmegaConf.select(config, key)
    for key, value in ours.items():
        if value:
            warnings.append(
                f"{key}={plain(value)}: nobody reads it, because the run has {names}, and trains "
                "on one score. For GDPO: algorithm.adv_estimator=gdpo "
                "reward.reward_manager.name=gdpo"
            )
    return warnings


def unnamed_rewards(
    config: Any, settings: GdpoSettings, columns: Mapping[str, Sequence[Any]]
) -> str:
    """Return a warning that functions return numbers which the configuration does not name.

    It is "" if there are none. That is allowed, and such a number is logged alone. A number that is
    named with null is left out on purpose. Of our tasks, all rewards have to be named.

    Args:
        columns: {name: values} of what was returned.
    """
    if settings.rewards is None or not has_own_scorer(config):
        return ""
    known = {*settings.names, *settings.rewards_as_written}
    unnamed = [name for name in rewards_among(columns) if name not in known]
    unnamed = [name for name in unnamed if not is_internal(name)]
    if not unnamed:
        return ""
    return (
        f"{', '.join(unnamed)}: returned as numbers, and not in the sum, because the weights name "
        f"{', '.join(settings.rewards)} alone. To train on one, or to leave it out on purpose, "
        f"name it in {REWARDS}, with a weight or with null"
    )


@contextmanager
def noted(mistakes: list[str]) -> Iterator[None]:
    """Note what a check of the block refuses, so that other mistakes are found too."""
    try:
        yield
    except TaskError:
        # It is none of the configuration: a package of somebody is broken.
        raise
    except SettingsError as error:
        mistakes += error.mistakes
    except ValueError as error:
        mistakes.append(str(error))


def _meant_estimator(written: str, has_manager: bool) -> str:
    """Return gdpo or grpo for a name in capitals, of which verl knows nothing before its update."""
    # With another manager, GRPO is none of our business.
    meant = written.lower()
    if meant == "gdpo" or (meant == "grpo" and has_manager):
        return meant
    return written


def _rewards_with_bounds(
    settings: GdpoSettings, declared: Mapping[str, Bounds | None], sources: Iterable[str] | None
) -> list[str]:
    """Return the rewards whose bounds have to be known by now, if `combine` needs any."""
    names = []
    for name, term in settings.terms.items():
        # Before the rows are known, tasks may disagree of which only one is trained.
        is_open = sources is None and name in declared and declared[name] is None
        if term.is_used and not is_open:
            names.append(name)
    return sorted(names)


def paid_failures(config: Any, settings: GdpoSettings) -> list[PaidFailure]:
    """Return the rewards whose bounds tell that failing their condition is better."""
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


# The rewards of which `warn_once` has spoken in this process.
_warned: set[str] = set()


def scorers_bounds(config: Any, sources: Iterable[str] | None) -> dict[str, Bounds | None]:
    """Return {reward: bounds} that our scorers declare, None where they disagree.

    Args:
        sources: see `settings_of_run`.
    """
    ours, options = _our_scorers(config, sources)
    return declared_bounds(ours, options)


def row_names(settings: GdpoSettings, data_source: str) -> RowNames:
    """Return how the rewards of rows of a data source, which we or verl score, get their names."""
    verl_names: Mapping[str, str] = {}
    task = TASK_BY_SOURCE.get(data_source)
    if task is not None:
        verl_names = task.verl_names
    renames = []
    for verls, ours in verl_names.items():
        # The settings may have either of the two names, and rows are given the one that they have.
        if verls in settings.names:
            renames.append((verls, ours))
        if ours in settings.names:
            renames.append((ours, verls))
    # A reward of other rows does not apply to these, and has to be there as None.
    elsewhere = functools.partial(belongs_elsewhere, data_source=data_source)
    return RowNames(settings.names, renames, elsewhere)


def _our_scorers(config: Any, sources: Iterable[str] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the data sources whose rows our scorers score, and the options of the scorers."""
    options = plain(config.reward.get("reward_kwargs")) or {}
    # The user's functions stand in the place of all our scorers.
    if has_own_scorer(config):
        return [], options
    if sources is None:
        return sorted(TASK_BY_SOURCE), options
    return sorted(source for source in set(sources) if source in TASK_BY_SOURCE), options


def _our_scorers_alone(config: Any) -> bool:
    """Whether nothing of the user's own returns rewards, as far as the configuration tells."""
    # An agent loop of the user's may set `reward_score`, with rewards of any name.
    has_function = has_own_scorer(config)
    loops = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")
    return uses_gdpo_manager(config) and not has_function and loops is None


def _mistakes_of_estimator(config: Any) -> Iterator[str]:
    """Yield what cannot work with the estimator gdpo."""
    yield from _mistakes_of_sum(config)
    # Replay and tests hand over configurations without rollouts.
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout") or {}
    if rollout.get("n") == 1:
        yield (
            "actor_rollout_ref.rollout.n=1 with adv_estimator=gdpo: a group of one sample has no "
            "spread, so every advantage would be 0. Set it to 2 or more"
        )
    if rollout.get("name") == "vllm" and rollout.get("full_determinism", False):
        yield (
            "actor_rollout_ref.rollout.full_determinism=True with rollout.name=vllm: verl gives "
            "all samples of a prompt one seed (vllm_async_server.py). So they are equal, and every "
            "advantage would be 0. Set it to False"
        )


def _mistakes_of_sum(config: Any) -> Iterator[str]:
    """Yield what verl does with the summed reward before the estimator, which gdpo does not use."""
    if config.algorithm.get("use_kl_in_reward", False):
        yield KL_IN_REWARD
    # Of verl's pull request 7894.
    if OmegaConf.select(config, "algorithm.reward_variance_filtering.enable"):
        yield (
            "algorithm.reward_variance_filtering.enable=True with adv_estimator=gdpo: it takes a "
            "group out of the loss if the sum of its rewards does not vary, though each of them "
            "may. Set it to False, and use algorithm.filter_groups.enable=True"
        )
    if config.algorithm.get("use_pf_ppo", False):
        yield (
            "algorithm.use_pf_ppo=True with adv_estimator=gdpo: verl draws samples by their summed "
            "reward for the estimator gae alone, so it would have no effect. Set it to False"
        )
    # Of options that no scorer of ours takes, our manager says so itself.
    penalty = OmegaConf.select(config, "reward.reward_kwargs.overlong_buffer_cfg.enable")
    if penalty and not uses_gdpo_manager(config):
        yield (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=True with adv_estimator=gdpo: verl's "
            "manager dapo adds this penalty to the sum, which gdpo does not use. Make it a reward "
            "of its own: pkg://verl_gdpo.scoring.lengths has `overlong`"
        )


def _mistakes_of_reward_model(config: Any) -> Iterator[str]:
    """Yield what leaves a run with a reward model without named rewards."""
    model = config.reward.reward_model
    if not model.enable:
        return
    if not model.enable_resource_pool:
        yield (
            "reward.reward_model.enable=True with enable_resource_pool=False: a colocated reward "
            "model hands the reward manager no ground truth, so there are no named rewards. Set "
            "reward.reward_model.enable_resource_pool=True"
        )
    if config.reward.custom_reward_function.path is None:
        yield (
            "reward.reward_model.enable=True with reward.custom_reward_function.path=null: verl "
            "takes the model's single score without a reward manager. Set a custom reward "
            "function that queries the model and returns {name: value}"
        )


def _mistakes_of_schedule(config: Any, settings: GdpoSettings) -> Iterator[str]:
    """Yield that dynamic sampling would find no group at a step where all weights are 0."""
    # Rewards that nobody names have the weight 1 at each step.
    if not settings.rewards or not OmegaConf.select(config, "algorithm.filter_groups.enable"):
        return
    steps = OmegaConf.select(config, "trainer.total_training_steps")
    silent = settings.terms.silent_step(steps)
    if silent is not None:
        yield (
            f"{REWARDS}: all weights are 0 at step {silent}, and "
            "algorithm.filter_groups.enable=True would drop every group there and never end. Give "
            "a weight another schedule, or end the run before with trainer.total_training_steps"
        )


def _mistakes_of_kept_groups(config: Any, settings: GdpoSettings, estimator: str) -> Iterator[str]:
    """Yield why `algorithm.gdpo.keep_groups` could not keep groups by these rewards."""
    if not settings.keep_groups:
        return
    where = f"{WHERE}.keep_groups"
    if estimator != "gdpo":
        yield (
            f"{where} with adv_estimator={estimator}: verl's own rule filters groups there. Set "
            "algorithm.adv_estimator=gdpo, or leave it out"
        )
    if not OmegaConf.select(config, "algorithm.filter_groups.enable"):
        yield (
            f"{where} without dynamic sampling, which samples other prompts in the place of those "
            "that it drops. Set algorithm.filter_groups.enable=True "
            "algorithm.filter_groups.metric=reward"
        )
    for name, (low, high) in settings.keep_groups.items():
        # Without names, all that a scorer returns are rewards, and only rows tell which.
        if settings.rewards is not None and name not in settings.names:
            yield (
                f"{where}.{name}: {REWARDS} does not name it{hint(name, settings.names)}. With "
                "weight 0 there, a reward is scored and logged, and has no weight"
            )
        if name not in settings.bounds:
            continue
        lowest, highest = settings.bounds[name]
        if high < lowest or low > highest:
            yield (
                f"{where}.{name}=[{low:g}, {high:g}]: its values are from {lowest:g} to "
                f"{highest:g}, so every group would be dropped, and no step would end"
            )


def _mistakes_of_options(config: Any, sources: Iterable[str] | None) -> list[str]:
    """Return what nothing would read of `reward.reward_kwargs`."""
    ours, options = _our_scorers(config, sources)
    # Another manager may read them.
    if not options or not uses_gdpo_manager(config):
        return []
    if has_own_scorer(config):
        return [
            f"reward.reward_kwargs={options}: with reward functions of your own, nothing reads "
            "them. Options of your function go to reward.custom_reward_function.reward_kwargs, or "
            f"to its entry in {FUNCTIONS}"
        ]
    return mistakes_of_options(options, ours)


def _mistakes_of_list(config: Any, settings: GdpoSettings, estimator: str) -> Iterator[str]:
    """Yield what of `reward.reward_functions` does not fit to the rest of the configuration."""
    entries = entries_of(config)
    if not entries:
        return
    function = config.reward.custom_reward_function
    if function.path is not None:
        moved = f"+{FUNCTIONS}.NAME.path={function.path} +{FUNCTIONS}.NAME.name={function.name}"
        yield (
            f"reward.custom_reward_function.path={function.path} beside {FUNCTIONS}: one of them "
            f"would not be called. Move it into the list: {moved}"
        )
    for name, entry in entries.items():
        why = _why_no_failure_is_allowed(config, settings, estimator, name)
        if why:
            yield (
                f"{FUNCTIONS}.{name}.on_error={entry['on_error']}: {why}, so a sample without this "
                "reward would count as a bad one. Set on_error=stop"
            )
        term = (settings.rewards or {}).get(name)
        if entry["rubric"] and term is not None and term.fallback:
            yield (
                f"{WHERE}.rewards.{name}.otherwise={term.otherwise}: the reward is a rubric, of "
                "which each criterion would get the number. Set otherwise=zero or missing"
            )
        is_trained = is_asked(entry, is_validation=False)
        if entry["rubric"] and settings.combine is not None and is_trained:
            yield (
                f"{FUNCTIONS}.{name}.rubric={entry['rubric']} with algorithm.gdpo.combine="
                f"{settings.combine.name}: it takes the same rewards of all prompts. Leave one out"
            )
    if not uses_gdpo_manager(config):
        yield (
            f"{FUNCTIONS} with reward.reward_manager.name={config.reward.reward_manager.name}: "
            "only the manager gdpo reads the list. Set reward.reward_manager.name=gdpo"
        )


def _why_no_failure_is_allowed(
    config: Any, settings: GdpoSettings, estimator: str, name: str
) -> str:
    """Return why a function of the list may not fail as its `on_error` says; "" if it may."""
    entries = entries_of(config)
    # In a validation, no estimator and no filter reads the rewards.
    if not is_asked(entries[name], is_validation=False):
        return ""
    on_error = entries[name]["on_error"]
    if on_error == "missing":
        if sums_first(estimator, settings):
            return "the rewards are summed first"
        # A sample without the value would count as one that does not meet the condition.
        for term in settings.terms.values():
            if term.when is not None and owner_of(term.when.reward, entries) == name:
                return "a condition asks for it"
    # With gdpo, our own filter leaves dropped samples out.
    filters_groups = OmegaConf.select(config, "algorithm.filter_groups.enable")
    if on_error == "drop" and filters_groups and estimator != "gdpo":
        return "verl filters groups by all scores"
    return ""


def _mistakes_of_validation(config: Any, settings: GdpoSettings) -> list[str]:
    """Return what the training or a validation would lack by the key `validation` of the list.

    Raises:
        SettingsError: see `validation_settings`.
    """
    entries = entries_of(config)
    if not tells_validation_apart(config):
        return []
    mistakes = []
    if not any(is_asked(entry, is_validation=False) for entry in entries.values()):
        mistakes.append(
            f"{FUNCTIONS}: all of {list(entries)} have validation={ONLY}, so nothing would be "
            "trained. Add a function without the key"
        )
    # A configured reward that no sample of the training has would end its first step.
    needed = dict.fromkeys(settings.names, REWARDS)
    needed.update(dict.fromkeys(settings.keep_groups or {}, f"{WHERE}.keep_groups"))
    for name, where in needed.items():
        owner = owner_of(name, entries)
        if owner is not None and not is_asked(entries[owner], is_validation=False):
            mistakes.append(
                f"{FUNCTIONS}.{owner}.validation={ONLY}: {where} names {name!r}, which no sample "
                f"of the training would have. Leave out the key, or {name!r} there"
            )
    # A condition that no sample can meet would look like a policy that gets worse.
    for name, term in settings.terms.items():
        if term.when is None or not _is_scored_in_validation(name, entries):
            continue
        read = term.when.reward
        if not _is_scored_in_validation(read, entries):
            mistakes.append(
                f"{FUNCTIONS}.{owner_of(read, entries)}.validation={NEVER}: {REWARDS}.{name}.when "
                f"reads {read!r}, so no sample of a validation would meet the condition. Leave out "
                "the key"
            )
    for name, entry in entries.items():
        if entry["validation"] == ONLY:
            mistakes += _mistakes_of_names_in_validation(name, entry, settings)
    in_validation = validation_settings(config, settings)
    # The mistakes above leave the same hole, and say more of its cause.
    if not mistakes and validates(config) and not _has_score(entries, in_validation):
        mistakes.append(
            f"{FUNCTIONS}: the rewards of the training have validation={NEVER}, so each sample of "
            f"a validation would have the score 0. Add a function with validation={ONLY}, or do "
            "not validate: trainer.test_freq=-1 trainer.val_before_train=False"
        )
    return mistakes


def _is_scored_in_validation(reward: str, entries: Mapping[str, Any]) -> bool:
    """Return whether samples of a validation have a reward, as far as the list tells."""
    owner = owner_of(reward, entries)
    return owner is None or is_asked(entries[owner], is_validation=True)


def _mistakes_of_names_in_validation(
    name: str, entry: Mapping[str, Any], settings: GdpoSettings
) -> Iterator[str]:
    """Yield what is not known of the rewards of a function that scores a validation only."""
    where = f"{FUNCTIONS}.{name}"
    if settings.rewards is None:
        if "weight" in entry:
            yield (
                f"{where}.weight={entry['weight']} with validation={ONLY}: no function of the "
                "training has a weight, so each reward counts once. Give those their weights too, "
                "or leave it out"
            )
    elif names_of_entry(name, entry) is None:
        # No step of the training calls it, so a wrong guess would be found late.
        yield (
            f"{where}.validation={ONLY}: other rewards have weights, and nothing tells which "
            f"rewards it returns. If it returns a number, write +{where}.rewards=number; if it "
            f"returns a dict, its keys: +{where}.rewards=[KEY,KEY]"
        )


def _has_score(entries: Mapping[str, Any], in_validation: GdpoSettings) -> bool:
    """Return whether samples of a validation have a reward that counts in their score.

    Args:
        in_validation: see `validation_settings`.
    """
    if in_validation.rewards is not None:
        return any(term.is_used for term in in_validation.terms.values())
    # Each number that is returned counts.
    return any(is_asked(entry, is_validation=True) for entry in entries.values())


def _mistakes_of_listed_names(config: Any, settings: GdpoSettings, *, are_known: bool) -> list[str]:
    """Return what `algorithm.gdpo.rewards` names and the list never returns, or what nobody names.

    Args:
        are_known: whether the settings have all rewards that the configuration names.
    """
    mistakes: list[str] = []
    with noted(mistakes):
        check_configured(config, settings.names)
    # Where `algorithm.gdpo.rewards` or the list has weights, the configured names are all that a
    # row needs.
    if settings.rewards is not None or not are_known:
        return mistakes
    for name, entry in entries_of(config).items():
        if entry["on_error"] == "missing" and names_of_entry(name, entry) is None:
            mistakes.append(ask_for_names(name))
    return mistakes


def _mistakes_of_service(config: Any, sources: Iterable[str]) -> Iterator[str]:
    """Yield that our scorers of these data sources would not ask a service."""
    url = OmegaConf.select(config, "reward.sandbox_fusion.url")
    if not url:
        return
    ours, _ = _our_scorers(config, sources)
    # Scorers that run no programs never ask it, and other rows may need it.
    if any(TASK_BY_SOURCE[source].programs is not None for source in ours):
        yield (
            f"reward.sandbox_fusion.url={url}: verl-gdpo runs programs on the machines of the "
            "reward workers, locked in. Leave it out, or call the service in a reward function of "
            "your own"
        )


def _mistakes_of_task_names(
    config: Any, settings: GdpoSettings, sources: Iterable[str]
) -> list[str]:
    """Return what `algorithm.gdpo.rewards` does not say of our tasks, or says of no task.

    Args:
        sources: of all training rows. Those that verl scores may return any name but ours.
    """
    # Without names, all rewards count. With names that cannot be read, nothing is known of them.
    if settings.rewards is None:
        return []
    ours, options = _our_scorers(config, sources)
    returned = {source: _names_returned(source, options) for source in ours}
    mistakes = []
    partial = _mistake_of_partial_mapping(settings.rewards_as_written, returned)
    if partial:
        mistakes.append(partial)
    # A task that returns nothing does not take its options, which are refused.
    if not sources or not _our_scorers_alone(config) or not all(returned.values()):
        return mistakes
    names_of = {source: set().union(*names.values()) for source, names in returned.items()}
    others = set(sources) - set(ours)
    known = sorted(set().union(*names_of.values()))
    unknown = _names_of_no_row(settings, names_of, others)
    for name in unknown:
        # The message of a partial mapping names those that stand in it.
        if partial and name in settings.rewards:
            continue
        mistakes.append(
            f"{REWARDS} names {name!r}, which no scorer of the training rows "
            f"({', '.join(sorted(set(sources)))}) returns{hint(name, known)}. Leave it out, "
            "or set the option in reward.reward_kwargs with which the scorer returns it"
        )
    mistakes += _conditions_never_met(settings, names_of, unknown)
    return mistakes


def _names_returned(source: str, options: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return {reward of our scorer for a data source: the names that it may have}."""
    names: dict[str, set[str]] = {name: {name} for name in declared_by(source, options)}
    for verls, ours in TASK_BY_SOURCE[source].verl_names.items():
        if ours in names:
            names[ours].add(verls)
    return names


def _mistake_of_partial_mapping(
    written: Mapping[str, Any], returned: Mapping[str, Mapping[str, set[str]]]
) -> str:
    """Return the message if `algorithm.gdpo.rewards` leaves out some reward; "" if it is whole.

    Args:
        written: `GdpoSettings.rewards_as_written`.
        returned: of the training rows that we score, {data source: see `_names_returned`}.
    """
    known: dict[str, set[str]] = {}
    for names_of_reward in returned.values():
        known.update(names_of_reward)
    absent = [name for name, names in known.items() if names.isdisjoint(written)]
    # verl's own two lists may leave rewards out.
    if not written or not absent:
        return ""
    all_names = set().union(*known.values())
    # A name that is none of them may be a misspelt one, so the line to paste is without it.
    strange = [name for name in written if name not in all_names]
    close = "".join(f" ({name!r} is none of them{hint(name, list(known))})" for name in strange)
    whole = {name: each for name, each in written.items() if name not in strange}
    whole.update(dict.fromkeys(absent, 1.0))
    return (
        f"{REWARDS} names {list(written)}, and says nothing of {absent}, which the scorer of the "
        f"training rows ({', '.join(returned)}) returns too{close}. Give the weights that you "
        f"want: {line_of(REWARDS, whole)}. With 0 a reward is "
        "scored and logged, and has no weight; with null it is left out"
    )


def _names_of_no_row(
    settings: GdpoSettings, names_of: Mapping[str, set[str]], others: Iterable[str]
) -> list[str]:
    """Return the names in the settings that would be missing in every row.

    Args:
        names_of: {data source that we score: what its rows may return}.
        others: data sources that verl scores.
    """
    unknown = []
    for name in settings.names:
        if any(name in names for names in names_of.values()):
            continue
        # verl's scorers may return any name that is not one of ours.
        if all(belongs_elsewhere(name, source) for source in others):
            unknown.append(name)
    return unknown


def _conditions_never_met(
    settings: GdpoSettings, names_of: Mapping[str, set[str]], unknown: Iterable[str]
) -> Iterator[str]:
    """Yield a message for each condition that no row of a data source could meet.

    Args:
        names_of: see `_names_of_no_row`.
        unknown: names that are refused already.
    """
    for name, term in settings.terms.items():
        if term.when is None or term.when.reward in unknown:
            continue
        for source, names in names_of.items():
            # Rows that have no such reward at all need no condition for it.
            if name in names and term.when.reward not in names:
                yield (
                    f"{REWARDS}.{name}.when.reward={term.when.reward}: rows of {source!r} have "
                    f"{name!r} and no {term.when.reward!r}, so none of them would ever meet the "
                    "condition. Train these rows in a run of their own, or without the condition"
                )


def refuse_group_filter(config: Any) -> None:
    """Raise ValueError if groups are to be filtered on the legacy trainer, which filters none."""
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        raise ValueError(
            "algorithm.filter_groups.enable=True with trainer.use_v1=False: verl's legacy "
            "trainer does not filter. Set trainer.use_v1=True, or filter_groups.enable=False"
        )


def uses_gdpo_manager(config: Any) -> bool:
    """Return whether the reward manager is named gdpo. A subclass of ours may have another name."""
    # With another `source`, the name is that of a class in a file of the user's.
    manager = config.reward.reward_manager
    return bool(manager.source == "register" and manager.name == "gdpo")


def has_own_scorer(config: Any) -> bool:
    """Return whether functions of the user's score the rows."""
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    return path is not None or bool(entries_of(config))


def has_gdpo(config: Any) -> bool:
    """Return whether the estimator or the reward manager is named gdpo."""
    return config.algorithm.adv_estimator == "gdpo" or uses_gdpo_manager(config)
