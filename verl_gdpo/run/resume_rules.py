"""Compares the settings of two starts, and says which of them may change in a resume.

`resume_rules.yaml` has the rules. They follow what verl 0.9 restores: weights, optimizer with its
parameter groups, the count of the learning rate's schedule, random states, and the position in the
rows. tests/slow/resume.py tries them on verl's own objects and in whole runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

import yaml

from verl_gdpo.run.resolved_config import flat, with_files
from verl_gdpo.run.starts import StartManifest

FREE, ON_REQUEST = "free", "on request"  # the verdicts: it may change, and it must not
NEW_RUN = (
    "merge the weights (python -m verl_gdpo.hooks.merge CHECKPOINT/actor MODEL) and start a "
    "new run with actor_rollout_ref.model.path=MODEL; the state of the optimizer is lost"
)
LISTED = 8  # changes of one kind in a message


def filters_long_prompts(flat_configuration: Mapping[str, Any]) -> bool:
    """Whether rows are left out whose prompts are too long."""
    return bool(flat_configuration.get("data.filter_overlong_prompts"))


def has_constant_rate(flat_configuration: Mapping[str, Any]) -> bool:
    """Whether no learning rate depends on the number of steps."""
    schedules = [key for key in flat_configuration if key.endswith(".optim.lr_scheduler_type")]

    def is_constant(key: str) -> bool:
        steps, share = (
            flat_configuration.get(key.replace("lr_scheduler_type", name), 0)
            for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")
        )
        return flat_configuration[key] == "constant" and not steps <= 0 < share

    return bool(schedules) and all(map(is_constant, schedules))


CONDITIONS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "": lambda _: True,
    "filters_long_prompts": filters_long_prompts,
    "has_constant_rate": has_constant_rate,
}


@dataclass(frozen=True)
class ResumeRule:
    """What happens to changed settings; `resume_rules.yaml` says what the fields are."""

    verdict: str
    keys: tuple[str, ...]
    why: str
    condition: str = ""
    a_new_run: bool = False
    a_place: bool = False

    def fits(self, key: str, flat_configuration: Mapping[str, Any]) -> bool:
        is_named = any(fnmatchcase(key, pattern) for pattern in self.keys)
        return is_named and CONDITIONS[self.condition](flat_configuration)


def _rules() -> tuple[ResumeRule, ...]:
    rows = yaml.safe_load(files(__package__).joinpath("resume_rules.yaml").read_text("utf-8"))
    return tuple(
        ResumeRule(keys=tuple(row.pop("keys").split()), condition=row.pop("if", ""), **row)
        for row in rows
    )


RULES = _rules()


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from that of the run whose checkpoint is loaded."""

    key: str
    before: Any
    after: Any
    rule: ResumeRule

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r:.80} -> {self.after!r:.80}"


def rule_of(key: str, flat_configuration: Mapping[str, Any]) -> ResumeRule:
    """The first rule that fits."""
    return next(rule for rule in RULES if rule.fits(key, flat_configuration))


def changes(before: StartManifest, after: StartManifest) -> list[SettingChange]:
    """Every setting that differs, with its rule; None is a key without a value.

    Files are compared by size and time if both are known on both sides, and else by name.
    """
    known = before.files.keys() & after.files.keys()
    old, new = (
        with_files(start.configuration, {key: start.files[key] for key in known})
        for start in (before, after)
    )
    return [
        SettingChange(key, old.get(key), new.get(key), rule_of(key, new))
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def missing_files(before: StartManifest, after: StartManifest) -> list[str]:
    """The `key=files` that could be read before, and of which one cannot be read now."""
    wanted = flat(after.configuration)
    return [
        f"{key}={wanted[key]}"
        for key in sorted(before.files.keys() & wanted.keys() - after.files.keys())
        if rule_of(key, wanted).verdict != FREE and "://" not in str(wanted[key])
    ]


def without_followers(
    changed: Iterable[SettingChange], composed: Mapping[str, Any]
) -> list[SettingChange]:
    """The changes without those of keys that follow another changed key of the same verdict.

    Args:
        composed: the `flat` configuration before its interpolations are resolved.
    """
    by_key = {change.key: change for change in changed}

    def follows(change: SettingChange) -> bool:
        text = str(composed.get(change.key, ""))
        # `${.name}` is a neighbour
        text = text.replace("${.", f"${{{change.key.rpartition('.')[0]}.")
        names = by_key.keys() & {*re.findall(r"[\w.]+", text)} if "${" in text else set()
        return any(_are_alike(by_key[name].rule, change.rule) for name in names)

    return [change for change in by_key.values() if not follows(change)]


def _are_alike(one: ResumeRule, other: ResumeRule) -> bool:
    return (one.verdict, one.a_new_run) == (other.verdict, other.a_new_run)


def refusal(changed: Iterable[SettingChange], allowed: Iterable[str]) -> str:
    """Why a run cannot go on with these changes, in one line; "" if it can.

    Args:
        allowed: keys, or blocks of keys such as `algorithm`, whose change is wanted.
    """
    blocks = tuple(f"{key}." for key in allowed)
    refused: dict[ResumeRule, list[SettingChange]] = {}
    for change in changed:
        if change.rule.verdict == ON_REQUEST and not f"{change.key}.".startswith(blocks):
            refused.setdefault(change.rule, []).append(change)
    if not refused:
        return ""
    reasons = [
        f"{_listed(of_rule)} on request only: {rule.why}" for rule, of_rule in refused.items()
    ]
    if any(rule.a_new_run for rule in refused):
        reasons.append(f"where it has no effect here, {NEW_RUN}")
    keys = [change.key for of_rule in refused.values() for change in of_rule]
    reasons.append(
        f"if it is wanted all the same, add '+allow_change=[{','.join(keys)}]' to a command of "
        f"verl, or {' '.join(f'--allow-change {key}' for key in keys)} to run.sh"
    )
    return "; ".join(reasons)


def warnings(changed: Iterable[SettingChange]) -> list[str]:
    """What to say of changes that somebody asked for, although they belong into a new run."""
    return [
        f"changed as asked: {change}, although {change.rule.why}"
        for change in changed
        if change.rule.a_new_run
    ]


def _listed(changed: Sequence[SettingChange]) -> str:
    more = f" and {len(changed) - LISTED} more" if len(changed) > LISTED else ""
    return ", ".join(map(str, changed[:LISTED])) + more
