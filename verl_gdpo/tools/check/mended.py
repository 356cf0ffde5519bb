"""A configuration without its mistakes, so that one of them does not hide what stands behind it.

No run may use it. With a misspelt key under `algorithm.gdpo`, the reward manager would not be made,
and nobody would see that the reward function fails as well.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_gdpo.algorithm.read_settings import REWARDS
from verl_gdpo.algorithm.settings import WHERE
from verl_gdpo.scoring.function_list import KEY as FUNCTIONS
from verl_gdpo.scoring.function_list import owner_of
from verl_gdpo.scoring.limits import KEYS as LIMITS
from verl_gdpo.scoring.response import KEY as THOUGHT_TAGS

# A block, and the name of a key in it, which may have a dot.
Part = tuple[str, str]


def without_mistakes(config: Any, mistakes_of: Callable[[Any], Sequence[str]]) -> Any:
    """Return a copy without the keys of ours that a mistake is about.

    A key is about a mistake if the mistake is gone without it, and no other one comes. What cannot
    be mended by leaving out a key stays.

    Args:
        mistakes_of: returns the mistakes of a configuration.
    """
    mended = deepcopy(config)
    mistakes = set(mistakes_of(mended))
    for part in list(_parts(mended)):
        if not mistakes:
            break
        before = {block: deepcopy(mended[block]) for block in ("algorithm", "reward")}
        _remove(mended, part)
        left = set(mistakes_of(mended))
        if left < mistakes:
            mistakes = left
        else:
            with open_dict(mended):
                mended.update(before)
    return mended


def lacks_a_function(mended: Any, config: Any) -> bool:
    """Whether the list of reward functions was left without any function."""
    return bool(OmegaConf.select(config, FUNCTIONS)) and not OmegaConf.select(mended, FUNCTIONS)


def _parts(config: Any) -> Iterator[Part]:
    """Yield what may be left out, the smaller before the larger: the least is to be lost."""
    for block in (REWARDS, FUNCTIONS, WHERE, "reward.reward_kwargs"):
        keys = OmegaConf.select(config, block)
        if OmegaConf.is_dict(keys):
            for name in list(keys):
                yield block, name
    for key in ("gdpo_reward_weights", "gdpo_reward_keys", "gdpo"):
        yield "algorithm", key
    for key in LIMITS:
        yield "reward", key
    yield "reward", THOUGHT_TAGS.removeprefix("reward.")


def _remove(config: Any, part: Part) -> None:
    """Remove a key. Without a function of the list, its rewards are those of nobody."""
    block, name = part
    _pop(config, block, name)
    if block != FUNCTIONS:
        return
    for reward in list(OmegaConf.select(config, REWARDS) or {}):
        if owner_of(str(reward), [name]) is not None:
            _pop(config, REWARDS, reward)


def _pop(config: Any, block: str, name: str) -> None:
    keys = OmegaConf.select(config, block)
    if OmegaConf.is_dict(keys) and name in keys:
        with open_dict(config):
            del keys[name]
