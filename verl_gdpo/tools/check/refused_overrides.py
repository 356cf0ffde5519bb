"""What is meant by an override that Hydra refuses.

Hydra's own advice is to append the key with a plus sign. Followed for a misspelt key, it gives a
configuration with a key that nobody reads.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.algorithm.settings import hint
from verl_gdpo.hooks.unread_keys import meant_by

ADVICE = "To append to your config use"


def why_refused(config: Any, refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each override.

    Args:
        config: as it is without them.
        refused: {override: Hydra's message}.
    """
    for override, message in refused.items():
        key = _key_of(override)
        if ADVICE in message:
            message = _no_such_key(config, key)
        yield f"{override}: {message}"


def with_meant(config: Any, refused: Mapping[str, str]) -> Any:
    """Return the configuration with the values of refused overrides under the keys that are meant.

    Otherwise, verl's default would stand in the place of a value whose key is misspelt, and be
    accused of what it does not fit to.
    """
    for override, message in refused.items():
        meant = meant_by(_key_of(override))
        if ADVICE not in message or len(meant) != 1:
            continue
        changed = deepcopy(config)
        OmegaConf.set_struct(changed, True)
        value = override.partition("=")[2]
        try:
            parsed = OverridesParser.create().parse_overrides([f"{meant[0]}={value}"])
            ConfigLoaderImpl._apply_overrides_to_config(parsed, changed)
        except (HydraException, OmegaConfBaseException):
            continue
        OmegaConf.set_struct(changed, OmegaConf.is_struct(config))
        config = changed
    return config


def _key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _no_such_key(config: Any, key: str) -> str:
    """Say which part of a key is not there, and which one may be meant."""
    block, path, name = _first_absent(config, key)
    if block is None:
        return f"{path} is a value, and has no keys"
    absent = f"{path}.{name}".strip(".")
    meant = meant_by(key)
    if meant:
        return f"there is no key {absent}; did you mean {' or '.join(meant)}?"
    return f"there is no key {absent}{hint(name, [str(each) for each in block])}"


def _first_absent(config: Any, key: str) -> tuple[Any, str, str]:
    """Return the block that lacks a part of the key, its path, and that part.

    The block is None if the path is no block, but a value.
    """
    block = config
    path = ""
    for name in key.split("."):
        if not OmegaConf.is_dict(block):
            return None, path, name
        if name not in block:
            return block, path, name
        block = block[name]
        path = f"{path}.{name}".strip(".")
    return None, path, ""
