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
from verl_gdpo.run.contents import flat
from verl_gdpo.run.folder import RECIPES as OURS
from verl_gdpo.run.starts import COMPOSED, Written, code_change, here, maker_of, starts_of

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
    written = _to_go_on_with(run)
    known = OmegaConf.load(written.folder / COMPOSED)
    kept = [
        _again(override, known) for override in overrides if not _is_recipe_of(written, override)
    ]
    given = {override.lstrip("+~").partition("=")[0] for override in kept}
    ours = {
        "++recipes": OURS,  # runs before this key have none
        "run_dir": quoted(str(run)),
        "hydra.run.dir": quoted(f"{run}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}"),
        **_files(written),
        **NEWEST,
    }
    return [
        *("--config-dir", str(written.folder), "--config-name", COMPOSED.removesuffix(".yaml")),
        *(f"{key}={value}" for key, value in ours.items() if key not in given),
        *filter(None, kept),
    ]


def _to_go_on_with(run: Path) -> Written:
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None or (written := maker_of(newest)) is None:
        lacking = "checkpoint" if newest is None else f"start that trained up to it, {newest}"
        raise ValueError(f"nothing to resume in {run}: no {lacking}")
    return written


def remarks(run: Path) -> list[str]:
    """What a user should know before the run goes on: other code, and changes that are not kept."""
    written = _to_go_on_with(run)
    later = [one for one in starts_of(run) if one.number > written.number and one.start.changes]
    return [*code_change(written, here({}))] + [
        f"start {one.number} changed {', '.join(one.start.changes)} and did not train up to the "
        "checkpoint: give these changes again if the run shall keep them"
        for one in later
    ]


def quoted(text: str) -> str:
    """A value for Hydra, in which only `${` has a meaning."""
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _is_recipe_of(written: Written, override: str) -> bool:
    """Whether the override chooses a recipe, which then is the one that the run has."""
    key, _, value = override.lstrip("+").partition("=")
    recipes = written.start.recipes
    if key not in recipes and not (RECIPES / key).is_dir():
        return False
    if recipes.get(key) != value:
        had = f"{key}={recipes[key]}" if key in recipes else f"no {key}=..."
        raise ValueError(
            f"{override}: the run was started with {had}, and goes on with its own recipes. Leave "
            f"it out, give single keys of verl instead, or start a new run"
        )
    return True


def _again(override: str, known: Any) -> str:
    """An override that may have been given before: `+key` would be there, `~key` would not."""
    if override.startswith("~"):
        key = override[1:].partition("=")[0]
        return override if OmegaConf.select(known, key, throw_on_missing=False) is not None else ""
    return f"++{override.lstrip('+')}" if override.startswith("+") else override


def _files(written: Written) -> dict[str, str]:
    """The files that the run named relative to the folder that it was started in."""
    start = written.start
    found = {}
    for key, value in flat(start.configuration).items():
        if key in start.files:
            files = [value] if isinstance(value, str) else value
            there = [
                file if file.startswith("${") else os.path.join(start.folder, file)
                for file in files
            ]
            if there != [*files]:
                named = ",".join(map(quoted, there))
                found[key] = named if isinstance(value, str) else f"[{named}]"
    return found


def main() -> int:
    run, *overrides = sys.argv[1:]
    try:
        for argument in arguments(Path(run).resolve(), overrides):
            print(argument, end="\0")
        for remark in remarks(Path(run).resolve()):
            print(f"WARNING: {remark}", file=sys.stderr)
    except ValueError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
