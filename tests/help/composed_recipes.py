"""Our recipes, composed on verl's configuration."""

from omegaconf import DictConfig, OmegaConf
from quick_composition import compose_quickly
from repository import REPO

RECIPES = REPO / "recipes"


def composed(*overrides):
    return compose_quickly(RECIPES, "train", list(overrides))


def flat(config):
    """{dotted key: value} of a resolved configuration."""
    return dict(leaves(OmegaConf.to_container(config, resolve=True)))


def leaves(container, prefix=""):
    for key, value in container.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def keys_of(config):
    """All keys with their parents, as in an override."""
    keys = []
    for key, value in config.items_ex(resolve=False):
        keys.append(str(key))
        if isinstance(value, DictConfig):
            keys += [f"{key}.{inner}" for inner in keys_of(value)]
    return keys
