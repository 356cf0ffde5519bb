"""Prints the arguments of the verl command that goes on with a run, each with a NUL behind it.

python -m verl_gdpo.run.resume_command RUN key=value ...

`run.sh --resume` calls this. The recipes are not composed again: the configuration is the one that
the run was started with, and overrides change it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl_gdpo.run.checkpoints import whole_checkpoint
from verl_gdpo.run.starts import COMPOSED, RecordedStart, maker_of

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
    newest = whole_checkpoint(run / "checkpoints")
    if newest is None or (recorded := maker_of(newest)) is None:
        lacking = "checkpoint" if newest is None else f"start that trained up to it, {newest}"
        raise ValueError(f"nothing to resume in {run}: no {lacking}")
    kept = [
        # the key of a `+key` of the first start is there by now
        f"++{override.lstrip('+')}" if override.startswith("+") else override
        for override in overrides
        if not _is_recipe_of(recorded, override)
    ]
    overridden = {override.lstrip("+~").partition("=")[0] for override in kept}
    of_run = {
        "run_dir": quoted(str(run)),
        "hydra.run.dir": quoted(f"{run}/hydra/${{now:%Y-%m-%d_%H-%M-%S}}"),
        **NEWEST,
    }
    return [
        *("--config-dir", str(recorded.folder), "--config-name", COMPOSED.removesuffix(".yaml")),
        *(f"{key}={value}" for key, value in of_run.items() if key not in overridden),
        *kept,
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
