"""Says which settings may change in a resume, and prints the command that goes on with a run.

python -m verl_gdpo.tools.run.resume RUN key=value ...

prints its arguments, each with a NUL behind it, for `run.sh --resume`. The recipes are not composed
again: the configuration is the one that the run was started with, and overrides change it.

`resume_rules.yaml` has the keys that may change. They follow what verl 0.9 restores: weights,
optimizer with its parameter groups, the count of the learning rate's schedule, random states, and
the position in the rows. tests/slow/resume.py tries them on verl's own objects and in whole runs.

Settings are compared as they are written. So a key that refers to another one is no change of its
own, and a value from the environment, which may be a secret, is not kept.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from verl_gdpo.hooks.run_keys import ALLOW_CHANGE
from verl_gdpo.tools.run.checkpoints import whole_checkpoint
from verl_gdpo.tools.run.starts import COMPOSED, FileStates, RecordedStart, StartManifest, maker_of

# The verdicts of a changed key.
FREE = "free"
ON_REQUEST = "on request"  # It is refused, unless somebody has asked for it.
PLACE = "place"  # A place of the run is not compared.
AT_CONSTANT_RATE = "at_constant_rate"  # It is free or on request, as the learning rate is.
# The last word of keys that may name files, such as `data.train_files`.
NAMES_FILES = ("path", "files")
# The optimizers, and their keys that name the kind of a schedule.
OPTIMIZERS = ("actor_rollout_ref.actor.optim", "critic.optim")
SCHEDULES = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "weight_decay_incr_style")
LISTED = 8  # changes in a message
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NEWEST = {"trainer.resume_mode": "auto", "trainer.resume_from_path": "null"}


def _patterns() -> dict[str, list[str]]:
    """{verdict: patterns of keys}, in the order of `resume_rules.yaml`."""
    rules = files(__package__).joinpath("resume_rules.yaml").read_text("utf-8")
    patterns = {}
    for verdict, lines in yaml.safe_load(rules).items():
        patterns[verdict] = " ".join(lines).split()
    return patterns


PATTERNS: Mapping[str, list[str]] = _patterns()


def verdict_of(key: str) -> str:
    """The first list that has a pattern of this key, or `ON_REQUEST`."""
    for verdict, patterns in PATTERNS.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return verdict
    return ON_REQUEST


def changes(before: StartManifest, after: StartManifest) -> dict[str, list[Any]]:
    """{key: [before, after, verdict]} of each setting that differs; None is a key without a value.

    Files are compared by size and time if both are known on both sides, and else by name.
    """
    known = before.files.keys() & after.files.keys()
    old = with_files(before.configuration, {key: before.files[key] for key in known})
    new = with_files(after.configuration, {key: after.files[key] for key in known})
    verdict_on_total = ON_REQUEST
    if _is_rate_constant(old) and _is_rate_constant(new):
        verdict_on_total = FREE
    changed = {}
    for key in old | new:
        verdict = verdict_of(key)
        if verdict == AT_CONSTANT_RATE:
            verdict = verdict_on_total
        if old.get(key) != new.get(key) and verdict != PLACE:
            changed[key] = [old.get(key), new.get(key), verdict]
    return changed


def _is_rate_constant(settings: Mapping[str, Any]) -> bool:
    """Whether nothing but the end of the run depends on its number of steps.

    Relies on verl 0.9: its engines read the kind of the schedule of learning rate and weight decay
    from these keys, and a share of the steps for the warm-up only without a number of steps.

    Args:
        settings: {dotted key: value}, as it is written.
    """
    for block in OPTIMIZERS:
        given = [settings.get(f"{block}.{name}") for name in SCHEDULES]
        kinds = [kind for kind in given if kind is not None]
        if not kinds or any(kind != "constant" for kind in kinds):
            return False
        ratio = settings.get(f"{block}.lr_warmup_steps_ratio", 0)
        steps = settings.get(f"{block}.lr_warmup_steps", -1)
        has_number = isinstance(steps, int) and steps > 0
        if ratio != 0 and not has_number:
            return False
    for value in settings.values():
        # such as "${trainer.total_training_steps}"
        if any(key in str(value) for key in PATTERNS[AT_CONSTANT_RATE]):
            return False
    return True


def remarks(changed: Mapping[str, list[Any]]) -> list[str]:
    """Why a change was taken that a run with another schedule is refused."""
    totals = {key: change for key, change in changed.items() if verdict_of(key) == AT_CONSTANT_RATE}
    if not any(verdict == FREE for _, _, verdict in totals.values()):
        return []
    reason = "the learning rate is constant, so nothing but the end of the run depends on it"
    return [f"{listed(totals)}: {reason}"]


def refusal(changed: Mapping[str, list[Any]], allowed: Iterable[str]) -> str:
    """Why a run cannot go on with these changes, in one line; "" if it can.

    Args:
        allowed: keys, or blocks of keys such as `algorithm`, whose change is wanted.
    """
    blocks = tuple(f"{key}." for key in allowed)
    refused = {}
    for key, change in changed.items():
        _, _, verdict = change
        is_wanted = f"{key}.".startswith(blocks)
        if verdict == ON_REQUEST and not is_wanted:
            refused[key] = change
    if not refused:
        return ""
    options = [f"--allow-change {key}" for key in refused]
    return (
        f"{listed(refused)}. A change that is wanted all the same needs "
        f"'+{ALLOW_CHANGE}=[{','.join(refused)}]' in a command of verl, or "
        f"{' '.join(options)} in one of run.sh"
    )


def listed(changed: Mapping[str, list[Any]]) -> str:
    """The first changes, and how many more there are."""
    texts = [f"{key}: {old!r:.80} -> {new!r:.80}" for key, (old, new, _) in changed.items()]
    shown = texts[:LISTED]
    if len(texts) > LISTED:
        shown.append(f"and {len(texts) - LISTED} more")
    return ", ".join(shown)


def flat(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} of a configuration; without keys that are None or empty."""

    def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{path}{name}.")
            elif value is not None and value != []:
                yield f"{path}{name}", value

    return dict(walk(configuration, ""))


def file_states(resolved: Mapping[str, Any]) -> FileStates:
    """Size and time of what the keys name that name files or models on this machine."""
    states = {}
    for key, value in flat(resolved).items():
        last_word = re.split("[._]", key)[-1]
        if last_word not in NAMES_FILES:
            continue
        names = [value]
        if isinstance(value, list):
            names = value
        of_key = [_state(Path(str(name)).expanduser()) for name in names]
        if all(of_key):
            states[key] = of_key
    return states


def _state(path: Path) -> list[int]:
    """[bytes, seconds] of a file, [bytes] of a model's folder; nothing for anything else."""
    try:
        if (path / "config.json").is_file():
            return [sum(part.stat().st_size for part in path.iterdir() if part.is_file())]
        if path.is_file():
            return [path.stat().st_size, int(path.stat().st_mtime)]
        return []
    except (OSError, ValueError):
        # The value is no path at all, such as a text with a NUL, or longer than a name may be.
        return []


def with_files(configuration: Mapping[str, Any], states: FileStates) -> dict[str, Any]:
    """{dotted key: value}, where size and time of files stand for their names."""
    values = flat(configuration)
    for key, of_key in states.items():
        values[key] = ", ".join(_text_of(state) for state in of_key)
    return values


def _text_of(state: Sequence[int]) -> str:
    """A state, as `_state` returns it, for a message."""
    size, *times = state
    text = f"{size} bytes"
    for seconds in times:
        text += f" of {datetime.fromtimestamp(seconds)}"
    return text


def arguments(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return what stands behind `python -m verl.trainer.main_ppo`.

    Args:
        run: its folder, with `checkpoints/`.
        overrides: Hydra's `key=value`. A recipe such as `estimator=grpo` has to be the run's own.

    Raises:
        ValueError: an override names another recipe, or the run has no whole checkpoint, or none of
            its manifests is of the start that trained up to it.
    """
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None:
        raise ValueError(f"nothing to resume in {run}: no checkpoint")
    recorded = maker_of(newest)
    if recorded is None:
        raise ValueError(f"nothing to resume in {run}: no start that trained up to it, {newest}")
    kept = []
    for override in overrides:
        if not _is_recipe_of(recorded, override):
            kept.append(_added_or_changed(override))
    overridden = {override.lstrip("+~").partition("=")[0] for override in kept}
    of_run = {
        "run_dir": quoted(str(run)),
        "hydra.run.dir": quoted(f"{run}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}"),
    }
    words = ["--config-dir", str(recorded.folder), "--config-name", COMPOSED.removesuffix(".yaml")]
    for key, value in (of_run | NEWEST).items():
        if key not in overridden:
            words.append(f"{key}={value}")
    return words + kept


def _added_or_changed(override: str) -> str:
    """The override for a configuration that has the key of a `+key` of the first start by now."""
    if override.startswith("+"):
        return f"++{override.lstrip('+')}"
    return override


def quoted(text: str) -> str:
    """A value for Hydra, in which only `${` has a meaning."""
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _is_recipe_of(recorded: RecordedStart, override: str) -> bool:
    """Whether the override chooses a recipe, which then is the one that the run has."""
    key, _, value = override.lstrip("+").partition("=")
    recipes = recorded.start.recipes
    if key not in recipes and not (RECIPES / key).is_dir():
        return False
    if recipes.get(key) != value:
        raise ValueError(
            f"{override}: the run goes on with its own recipe, {recipes.get(key, 'none')}. Leave "
            "it out, give single keys of verl instead, or start a new run"
        )
    return True


def main() -> int:
    try:
        for argument in arguments(Path(sys.argv[1]).resolve(), sys.argv[2:]):
            print(argument, end="\0")
    except ValueError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
