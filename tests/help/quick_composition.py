"""verl's configuration in a tenth of the time of a composition, which takes longer than most tests.

What chooses files is composed once; values are set in a copy, as Hydra sets them. What Hydra would
refuse is left to Hydra.
"""

import copy
import functools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.tools import compose

composed = functools.cache(compose.compose_config)  # as long as it is itself


def compose_quickly(config_dir, config_name, overrides, config_path=None):
    """As `compose_config`; the files of the folder must not change."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        files = tuple(o.input_line for o in parsed if not sets_a_value(o))
        config = copy.deepcopy(composed(config_dir, config_name, files, config_path))
        for override in filter(sets_a_value, parsed):
            key, adds = override.key_or_group, override.type != OverrideType.CHANGE
            if override.type == OverrideType.ADD and OmegaConf.select(config, key) is not None:
                raise HydraException(f"{key} is there")
            OmegaConf.update(config, key, override.value(), force_add=adds)
    except (HydraException, OmegaConfBaseException):
        return composed.__wrapped__(config_dir, config_name, overrides, config_path)
    OmegaConf.to_container(config, resolve=True)
    return config


def sets_a_value(override):
    return (
        "." in override.key_or_group
        and override.package is None
        and override.type != OverrideType.DEL
        and not override.is_sweep_override()
    )
