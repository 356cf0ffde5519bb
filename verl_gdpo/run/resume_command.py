"""Prints the arguments of the verl command that goes on with a run, each with a NUL behind it.

python -m verl_gdpo.run.resume_command RUN key=value ...

`run.sh --resume` calls this. The recipes are not composed again: the configuration is the one that
the run was started with, and overrides change it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.run.checkpoints import whole_checkpoint
from verl_gdpo.run.folder import RECIPES as OURS
from verl_gdpo.run.resolved_config import flat
from verl_gdpo.run.starts import COMPOSED, RecordedStart, code_change, here, maker_of, starts_of

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
NEWEST = {"trainer.resume_mode": "auto", "trainer.resume_from_path": "null"}


def arguments(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return what stands behind `python -m verl.trainer.main_ppo`.

    Args:
        run: its folder, with `checkpoints/`.
        overrides: Hydra's `key=value`. A recipe such as `estimator=grpo` has to be the run's own.

    Raises:
        ValueError: an override names another recipe, or the run has no whole checkpoint, or none of
            its manifests is of the start that trained up to it.
    """
    recorded = _to_go_on_with(run)
    composed = OmegaConf.load(recorded.folder / COMPOSED)
    kept = [
        _again(override, composed)
        for override in overrides
        if not _is_recipe_of(recorded, override)
    ]
    overridden = {override.lstrip("+~").partition("=")[0] for override in kept}
    of_run = {
        "++recipes": OURS,  # runs before this key have none
        "run_dir": quoted(str(run)),
        "hydra.run.dir": quoted(f"{run}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}"),
        **_files(recorded),
        **NEWEST,
    }
    return [
        *("--config-dir", str(recorded.folder), "--config-name", COMPOSED.removesuffix(".yaml")),
        *(f"{key}={value}" for key, value in of_run.items() if key not in overridden),
        *filter(None, kept),
    ]


def _to_go_on_with(run: Path) -> RecordedStart:
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None or (recorded := maker_of(newest)) is None:
        lacking = "checkpoint" if newest is None else f"start that trained up to it, {newest}"
        raise ValueError(f"nothing to resume in {run}: no {lacking}")
    return recorded


def remarks(run: Path) -> list[str]:
    """What a user should know before the run goes on: other code, and changes that are not kept."""
    recorded = _to_go_on_with(run)
    later = [start for start in starts_of(run) if start.number > recorded.number]
    return [*code_change(recorded, here({}))] + [
        f"start {start.number} changed {', '.join(start.start.changes)} and did not train up to "
        "the checkpoint: give these changes again if the run shall keep them"
        for start in later
        if start.start.changes
    ]


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
        own = f"{key}={recipes[key]}" if key in recipes else f"no {key}=..."
        raise ValueError(
            f"{override}: the run was started with {own}, and goes on with its own recipes. Leave "
            f"it out, give single keys of verl instead, or start a new run"
        )
    return True


def _again(override: str, composed: Any) -> str:
    """An override of an earlier start, once more: `+key` would be there, `~key` would not."""
    if override.startswith("~"):
        key = override[1:].partition("=")[0]
        is_there = OmegaConf.select(composed, key, throw_on_missing=False) is not None
        return override if is_there else ""
    return f"++{override.lstrip('+')}" if override.startswith("+") else override


def _files(recorded: RecordedStart) -> dict[str, str]:
    """The files that the run named relative to the folder that it was started in."""
    start = recorded.start
    values = {}
    for key, value in flat(start.configuration).items():
        if key in start.files:
            names = [value] if isinstance(value, str) else value
            whole = [
                name if name.startswith("${") else os.path.join(start.folder, name)
                for name in names
            ]
            if whole != [*names]:
                text = ",".join(map(quoted, whole))
                values[key] = text if isinstance(value, str) else f"[{text}]"
    return values


def main() -> int:
    run, overrides = Path(sys.argv[1]).resolve(), sys.argv[2:]
    try:
        for argument in arguments(run, overrides):
            print(argument, end="\0")
        for remark in remarks(run):
            print(f"WARNING: {remark}", file=sys.stderr)
    except ValueError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
