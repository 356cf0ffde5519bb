"""Which settings of a run may change when it goes on from a checkpoint.

The rules follow what verl 0.9 restores: weights, optimizer with its parameter groups, the count of
the learning rate's schedule, random states, and the position in the rows.
tests/slow/resume.py tries them on verl's own objects and in whole runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl_gdpo.run.contents import by_content, flat
from verl_gdpo.run.starts import Start

REFUSED, ON_REQUEST, FREE = "refused", "on request", "free"
NEW_RUN = (
    "merge the weights (python -m verl_gdpo.hooks.merge CHECKPOINT/actor MODEL) and start a "
    "new run with actor_rollout_ref.model.path=MODEL; the state of the optimizer is lost"
)
LISTED = 8  # changes of one kind in a message


@dataclass(frozen=True)
class Rule:
    """What happens to changed settings.

    patterns: of dotted keys, with spaces between them; `*` stands for any text.
    why: what a change does.
    holds: whether the rule counts for a run, given the `flat` configuration that is asked for.
    """

    verdict: str
    patterns: str
    why: str
    holds: Callable[[Mapping[str, Any]], bool] = lambda _: True

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.patterns.split())


def _has_constant_rate(flat_configuration: Mapping[str, Any]) -> bool:
    """Whether no learning rate depends on the number of steps."""
    schedules = [key for key in flat_configuration if key.endswith(".optim.lr_scheduler_type")]

    def is_constant(key: str) -> bool:
        steps, share = (
            flat_configuration.get(key.replace("lr_scheduler_type", name), 0)
            for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")
        )
        return flat_configuration[key] == "constant" and not steps <= 0 < share

    return bool(schedules) and all(map(is_constant, schedules))


PLACES = Rule(
    FREE,
    "recipes run_dir data_dir arm seed ray_kwargs.* *.port trainer.project_name "
    "trainer.experiment_name *.trace.* trainer.resume_* trainer.default_local_dir "
    "trainer.default_hdfs_dir trainer.rollout_data_dir trainer.validation_data_dir",
    "names and places of the run; `seed` of the recipes counts where the keys that it sets do",
)

# the first rule that fits a key decides
RULES = (
    Rule(
        REFUSED,
        "data.train_files data.train_max_samples data.*overlong_prompts data.custom_cls.*",
        "the position in the rows comes from the checkpoint, and with other rows it is a place in "
        "another order",
    ),
    Rule(
        REFUSED,
        "data.max_prompt_length",
        "with data.filter_overlong_prompts it decides which rows are left out as too long, and "
        "with other rows the position is a place in another order",
        lambda configuration: bool(configuration.get("data.filter_overlong_prompts")),
    ),
    Rule(
        REFUSED,
        "data.seed data.shuffle data.dataloader_num_workers",
        "the order of the rows comes from the checkpoint: another seed has no effect, shuffling "
        "cannot be switched on or off, and with other workers verl stops with an AssertionError",
    ),
    Rule(
        REFUSED,
        "*.optim.lr *.optim.weight_decay *.optim.betas *.optim.optimizer *.optim.optimizer_impl "
        "*.optim.override_optimizer_config",
        "the optimizer comes from the checkpoint with its settings, so a change has no effect or "
        "does not fit",
    ),
    Rule(
        REFUSED,
        "trainer.nnodes trainer.n_gpus_per_node actor_rollout_ref.actor.strategy critic.strategy "
        "actor_rollout_ref.actor.*.fsdp_size critic.*.fsdp_size "
        "actor_rollout_ref.actor.*.*model_parallel_size critic.*.*model_parallel_size",
        "the number of processes is in the names of the checkpoint's files, each with its part",
    ),
    Rule(
        REFUSED,
        "actor_rollout_ref.model.path critic.model.path *.model.*lora*rank "
        "*.model.*target_modules *.model.*exclude_modules",
        "the weights come from the checkpoint: another model does not fit, or would be the "
        "reference alone",
    ),
    PLACES,
    Rule(
        FREE,
        "trainer.save_freq trainer.max_*_ckpt_to_keep trainer.esi_redundant_time "
        "trainer.del_local_ckpt_after_load trainer.test_freq trainer.val_* data.val_batch_size "
        "data.validation_shuffle actor_rollout_ref.rollout.val_kwargs.* trainer.logger "
        "trainer.log_val_generations *profiler* *.prometheus.* *.disable_log_stats "
        "trainer.hang_minutes",
        "saving, validation and logging",
    ),
    Rule(
        FREE,
        "*.*micro_batch_size *.*micro_batch_size_per_gpu *.*max_token_len_per_gpu "
        "*.*use_dynamic_bsz *.*param_offload *.*optimizer_offload *.offload_policy "
        "*.enable_gradient_checkpointing *.enable_activation_offload *.entropy_checkpointing "
        "*.entropy_from_logits_* *.reshard_after_forward *.rollout.gpu_memory_utilization "
        "*.rollout.free_cache_engine *.rollout.max_num_batched_tokens *.rollout.max_num_seqs "
        "*.rollout.enforce_eager *.rollout.layered_summon data.filter_overlong_prompts_workers "
        "reward.num_workers actor_rollout_ref.rollout.agent.num_workers *.attn_implementation",
        "memory, processes, and how attention is computed: what one changes after running out of "
        "memory, or on another machine",
    ),
    Rule(
        FREE,
        "trainer.total_training_steps trainer.total_epochs",
        "the number of steps at a constant learning rate",
        _has_constant_rate,
    ),
    Rule(
        ON_REQUEST,
        "trainer.total_training_steps trainer.total_epochs *.optim.lr_* *.optim.min_lr_ratio "
        "*.optim.num_cycles *.optim.total_training_steps",
        "the schedule is computed anew at the step of the checkpoint: the learning rate jumps",
    ),
    Rule(
        ON_REQUEST,
        "data.train_batch_size data.gen_batch_size",
        "the place in the rows is kept, but verl computes the epoch from steps and batch size, so "
        "that the count of epochs jumps, and the last step with it",
    ),
    Rule(
        ON_REQUEST,
        "*",
        "the change takes effect from the next step on, so that one run has two settings",
    ),
)


@dataclass(frozen=True)
class Change:
    """A setting that differs from that of the run whose checkpoint is loaded."""

    key: str
    before: Any
    after: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r:.80} -> {self.after!r:.80}"


def rule_of(key: str, flat_configuration: Mapping[str, Any]) -> Rule:
    """The first rule that fits."""
    return next(
        rule
        for rule in RULES
        if any(fnmatchcase(key, pattern) for pattern in rule.keys)
        and rule.holds(flat_configuration)
    )


def changes(before: Start, after: Start) -> list[Change]:
    """Every setting that differs, with its rule; None is a key without a value.

    Files are compared by content if it is known on both sides, and else by name.
    """
    known = before.files.keys() & after.files.keys()
    old, new = (
        by_content(one.configuration, {key: one.files[key] for key in known})
        for one in (before, after)
    )
    return [
        Change(key, old.get(key), new.get(key), rule_of(key, new))
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def missing_files(before: Start, after: Start) -> list[str]:
    """The `key=files` whose content was known before, and of which one cannot be read now."""
    asked = flat(after.configuration)
    return [
        f"{key}={asked[key]}"
        for key in sorted(before.files.keys() & asked.keys() - after.files.keys())
        if rule_of(key, asked).verdict != FREE and "://" not in str(asked[key])
    ]


def without_followers(found: Iterable[Change], composed: Mapping[str, Any]) -> list[Change]:
    """The changes without those of keys that follow another changed key of the same list.

    Args:
        composed: the `flat` configuration before its interpolations are resolved.
    """
    by_key = {change.key: change for change in found}

    def follows(change: Change) -> bool:
        text = str(composed.get(change.key, ""))
        # `${.name}` is a neighbour
        text = text.replace("${.", f"${{{change.key.rpartition('.')[0]}.")
        named = by_key.keys() & {*re.findall(r"[\w.]+", text)} if "${" in text else set()
        return any(by_key[key].rule.verdict == change.rule.verdict for key in named)

    return [change for change in by_key.values() if not follows(change)]


def refusal(found: Iterable[Change], allowed: Iterable[str]) -> str:
    """Why a run cannot go on with these changes, in one line; "" if it can.

    Args:
        allowed: keys, or blocks of keys such as `algorithm`, whose change is wanted.
    """
    blocks = tuple(f"{key}." for key in allowed)
    refused, wanting = dict[Rule, list[Change]](), dict[Rule, list[Change]]()
    for change in found:
        if change.rule.verdict == REFUSED:
            refused.setdefault(change.rule, []).append(change)
        elif change.rule.verdict == ON_REQUEST and not f"{change.key}.".startswith(blocks):
            wanting.setdefault(change.rule, []).append(change)
    said = [f"{_listed(of_rule)} cannot change: {rule.why}" for rule, of_rule in refused.items()]
    if refused:
        said.append(f"to train with it all the same, {NEW_RUN}")
    said += [f"{_listed(of_rule)} on request only: {rule.why}" for rule, of_rule in wanting.items()]
    if wanting:
        keys = [change.key for of_rule in wanting.values() for change in of_rule]
        said.append(
            f"if it is wanted, add '+allow_change=[{','.join(keys)}]' to a command of verl, or "
            f"{' '.join(f'--allow-change {key}' for key in keys)} to run.sh"
        )
    return "; ".join(said)


def _listed(found: Sequence[Change]) -> str:
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(map(str, found[:LISTED])) + more
