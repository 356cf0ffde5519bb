"""Composes the configuration of a verl command, and overrides on a saved configuration.

Relies on Hydra 1.3: `hydra.main` looks for files in the folder of --config-path (verl's own if it
is not given), then in that of --config-dir, `run_job` fills in the output folder, and
`ConfigLoaderImpl` applies overrides.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

PLAIN = "ppo_trainer"  # what `verl.trainer.main_ppo` takes without --config-name


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what stands behind `python -m verl.trainer.main_ppo`, under Hydra's names."""
    about = "a folder of configurations, as in the training command"
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="FOLDER", help=about)
    about = f"the configuration, as in the training command; default: verl's {PLAIN}"
    parser.add_argument("--config-name", "-cn", default=PLAIN, metavar="NAME", help=about)
    about = "the place of verl's configurations, as in the training command"
    parser.add_argument("--config-path", "-cp", metavar="PLACE", help=about)
    about = "the overrides of the training command"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=about)


def compose_accepted(options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """Return the configuration of the parsed arguments, and {override: why Hydra refuses it}.

    Hydra names the first override that it refuses; so this leaves that out, and asks again.

    Raises:
        ValueError, HydraException, OmegaConfBaseException: see `compose_config`.
    """
    kept = list(options.overrides)
    refused: dict[str, str] = {}
    while True:
        try:
            config = compose_config(
                options.config_dir, options.config_name, kept, options.config_path
            )
            return config, refused
        except (HydraException, OmegaConfBaseException) as error:
            accused = _accused(kept, error)
            if accused is None:
                raise
            kept.remove(accused)
            refused[accused] = str(error)


def _accused(overrides: Sequence[str], error: Exception) -> str | None:
    """Return the override that an error of Hydra's is about; None if that is not known."""
    # Hydra's parser tells it.
    text = f"{getattr(error, 'override', '')}\n{error}\n"
    # Some messages have the override itself, most of them behind the plus sign that they propose.
    # Of `+a.b=1` they also have what stands behind its own, so the longest one is meant.
    proposed = [override for override in overrides if f"+{override}" in text]
    whole = [override for override in overrides if override in text]
    for named in (proposed, whole):
        if named:
            return max(named, key=len)
    # Of a deletion, they have the key alone.
    deletes = "Could not delete" in text
    candidates = [each for each in overrides if each.startswith("~") or not deletes]
    for override in candidates:
        key = override.lstrip("+~").partition("=")[0]
        # A key, a group of files (`estimator=gdpa`), and the key of an interpolation.
        if any(sign in text for sign in (f"'{key}'", f"'{key}/", f": {key}\n")):
            return override
    return None


def packages_searched(overrides: Sequence[str]) -> list[str]:
    """Return the packages in which `hydra.searchpath` lets Hydra look for files, and that are not
    installed here.
    """
    missing = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") != "hydra.searchpath":
            continue
        for place in value.strip("[]").split(","):
            package = place.strip(" '\"").removeprefix("pkg://").partition(".")[0]
            if place.strip(" '\"").startswith("pkg://") and find_spec(package) is None:
                missing.append(package)
    return missing


def file_of_verl(module: str) -> Path:
    """Return the file of a module of verl's, which need not exist; it imports nothing.

    Raises:
        ValueError: verl is not installed.
    """
    verl = find_spec("verl")
    if verl is None or verl.origin is None:
        raise ValueError(f"verl is not installed for {sys.executable}, which runs this command")
    parts = module.split(".")[1:]
    return Path(verl.origin).parent.joinpath(*parts).with_suffix(".py")


def compose_config(
    config_dir: Path | None,
    config_name: str,
    overrides: Sequence[str],
    config_path: Any = None,
    main: Path | None = None,
) -> Any:
    """Return the configuration that a trainer of verl's gets with these arguments.

    Args:
        main: the file of the trainer; None for `verl.trainer.main_ppo`.

    Raises:
        ValueError: verl is not installed, or the folder does not exist.
        HydraException, OmegaConfBaseException: Hydra refuses the arguments.
    """
    if main is None:
        main = file_of_verl("verl.trainer.main_ppo")
    version.setbase(None)
    search_path = create_automatic_config_search_path(str(main), None, config_path or "config")
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ValueError(f"--config-dir {config_dir}: there is no such folder")
        before_hydras = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{config_dir.resolve()}", before_hydras)
    Hydra.create_main_hydra2(main.stem, search_path)
    try:
        config = compose(config_name, list(overrides), return_hydra_config=True)
    finally:
        GlobalHydra.instance().clear()
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.runtime.output_dir = os.path.abspath(config.hydra.run.dir)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    OmegaConf.to_container(config, resolve=True)  # verl does this too, but only after Ray started
    return config


def composed(config: Any, overrides: Sequence[str]) -> Any:
    """Return a saved configuration with overrides, which mean what they mean to Hydra.

    Raises:
        ValueError: an override cannot be parsed or applied.
    """
    changed: Any = OmegaConf.create(OmegaConf.to_container(config))
    OmegaConf.set_struct(changed, True)
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            if override.is_sweep_override():
                raise ValueError(f"{override.input_line}: expected one value")
        ConfigLoaderImpl._apply_overrides_to_config(parsed, changed)
        OmegaConf.resolve(changed)
    except (HydraException, OmegaConfBaseException) as error:
        message = " ".join(str(error).replace("use +", "use ++").split())
        raise ValueError(f"{' '.join(overrides)}: {message}") from None
    OmegaConf.set_struct(changed, False)
    return changed
