"""verl's configuration in a tenth of the time of a composition, which takes longer than most tests.

What chooses files is composed once; values are set in a copy, as Hydra sets them. What Hydra would
refuse is left to Hydra.
"""

import functools
import pickle

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.tools import compose

compose_in_full = compose.compose_config  # before a test puts `compose_quickly` in its place


@functools.cache
def composed(config_dir, config_name, files, config_path):
    """The configuration as bytes: OmegaConf reads them in a sixth of the time that it copies in."""
    return pickle.dumps(compose_in_full(config_dir, config_name, files, config_path))


def compose_quickly(config_dir, config_name, overrides, config_path=None):
    """As `compose_config`; the files of the folder must not change."""
    try:
        parsed = [parsed_once(override) for override in overrides]
        files = tuple(o.input_line for o in parsed if not sets_a_value(o))
        config = pickle.loads(composed(config_dir, config_name, files, config_path))
        may_point_to_nothing = False
        for override in filter(sets_a_value, parsed):
            key, adds = override.key_or_group, override.type != OverrideType.CHANGE
            if override.type == OverrideType.ADD and OmegaConf.select(config, key) is not None:
                raise HydraException(f"{key} is there")
            if "$" in override.input_line or OmegaConf.is_config(OmegaConf.select(config, key)):
                may_point_to_nothing = True
            OmegaConf.update(config, key, override.value(), force_add=adds)
        if may_point_to_nothing:  # all other interpolations were resolved when it was composed
            OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException):
        return compose_in_full(config_dir, config_name, overrides, config_path)
    return config


@functools.cache
def parsed_once(override):
    """What Hydra reads in an override; nobody changes it. Most tests begin with the same three."""
    return OverridesParser.create().parse_override(override)


def sets_a_value(override):
    """Whether it sets a key of a block, or one of ours that is no name of a file."""
    key = override.key_or_group
    return (
        ("." in key or key in VALUES)
        and override.package is None
        and override.type != OverrideType.DEL
        and not override.is_sweep_override()
    )


VALUES = {"run_dir", "data_dir", "seed", "own_keys"}  # the first three are of recipes/train.yaml
