"""Finds keys of a configuration that nobody reads, above all those that are misspelt.

Hydra takes any key behind a plus sign, and verl looks up the keys that it knows. So a misspelt key
is silently without effect: with `+reward.max_concurent=2` a run has no limit.

`verl_keys.py` lists what verl reads, and `OUR_KEYS` what we read. An interpolation reads the key
that it names. `own_keys` of the configuration lists what else somebody reads.

    +own_keys=[data.image_keys,trainer.my_block]

A key that nobody reads is refused if one that is read has nearly its name, and stands in the same
block, or has the very name, and stands in one of a few other blocks. There are warnings in place of
the refusals where code of the user's reads the block, and for a verl of another version than the
table's, of whose keys we know those of its own configuration alone.

Some keys are not silently without effect. Of `MADE_BLOCKS`, verl makes dataclasses in its workers,
and a key that the class does not take ends the run there, so it is always refused. `MOVED` has the
keys of older versions that verl's configuration still has, and that no part of verl reads.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import verl
from hydra.utils import get_class
from omegaconf import OmegaConf

from verl_gdpo.hooks import run_keys, verl_keys
from verl_gdpo.hooks.other_key_names import (
    ACTOR,
    MOVED,
    MOVED_BLOCKS,
    OLDER_BLOCKS,
    OTHER_NAMES,
    ROLLOUT,
)
from verl_gdpo.scoring import function_list, limits, response

VERL_VERSION: str = verl.__version__
OWN = "own_keys"
OUR_KEYS: Mapping[str, tuple[str, ...]] = {
    "": (OWN, run_keys.ALLOW_CHANGE, *run_keys.OF_RECIPES),
    "algorithm": ("gdpo", "gdpo_reward_keys", "gdpo_reward_weights"),
    "reward": (
        function_list.KEY.removeprefix("reward."),
        response.KEY.removeprefix("reward."),
        "reward_kwargs",
        *limits.KEYS,
    ),
    "trainer": (run_keys.HANG_MINUTES,),
}
# No block of a user's at the top has one of these names.
OUR_NAMES = (*OUR_KEYS["algorithm"], function_list.KEY.removeprefix("reward."))
# How much of two names has to be equal (the ratio of difflib) for one to be a misspelling of the
# other. `gdop` and `gdpo` have .75. Beside verl's blocks, users have blocks of their own.
NEAR, NEAR_AT_TOP = 0.75, 0.85
SIMILAR = 0.6  # of a remark, which refuses nothing
FEW_BLOCKS = 3  # a name such as `path` or `enable`, which more blocks have, says little
CRITIC = "critic"
# verl makes a dataclass of each of these blocks, with those below it that have a `_target_`.
MADE_BLOCKS = (ACTOR, "actor_rollout_ref.ref", ROLLOUT, "actor_rollout_ref.model", CRITIC)
# {a key that names code of the user's: the blocks that this code gets}
NAMES_CODE: Mapping[str, tuple[str, ...]] = {
    "data.custom_cls.path": ("data",),
    "trainer.v1.sampler.custom_sampler.path": ("trainer.v1.sampler",),
    f"{ROLLOUT}.agent.agent_loop_config_path": (ROLLOUT, "data"),
    f"{ROLLOUT}.agent.agent_loop_manager_class": ("",),
    f"{ROLLOUT}.agent.custom_async_server.path": (ROLLOUT,),
    f"{ROLLOUT}.checkpoint_manager_class": ("",),
}
# {(module of verl, its registry): (the key with a name in it, the blocks that what it names gets)}
REGISTRIES: Mapping[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"): (
        "algorithm.adv_estimator",
        ("algorithm",),
    ),
    ("verl.experimental.reward_loop.reward_manager.registry", "REWARD_MANAGER"): (
        "reward.reward_manager.name",
        ("reward",),
    ),
    ("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"): ("trainer.v1.trainer_mode", ("",)),
    ("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry"): (
        f"{ROLLOUT}.agent.default_agent_loop",
        (ROLLOUT, "data"),
    ),
}
OUR_PACKAGES = ("verl", "verl_gdpo")
COMPOSED = "_generated_*.yaml"  # verl's own files, with its configuration for each engine


@dataclass
class UnreadKeys:
    """What was found: a sentence for each key that looks misspelt, and one for all others.

    refusals: nobody reads the key, and it looks misspelt; or verl would stop at it.
    warnings: it looks misspelt, and it is not known who reads it; or `others`.
    not_taken: the keys at which verl would stop.
    """

    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)


def find_unread_keys(config: Any, task_runner_class: Any = None) -> UnreadKeys:
    """Find the keys of a run that nobody reads.

    Args:
        config: as Hydra composed it. Interpolations may be unresolved.
        task_runner_class: of verl's `run_ppo`; None for that of verl.

    Raises:
        ValueError: `own_keys` is no list of keys.
    """
    whole: Any = OmegaConf.to_container(config, resolve=False)
    is_read_elsewhere = _Interpolations(whole)
    own_keys = _own_keys(whole)
    users_blocks = set(_blocks_of_users_code(whole, task_runner_class))
    found = UnreadKeys()
    for key, value, new in _moved(whole):
        told = f"{key}={value}: this verl does not read the key, and"
        if _is_known(new):
            told += f" would train without it. Set {new}={value}"
        else:
            told += " has no such key elsewhere. Leave it out"
        found.refusals.append(told)
    unknown = []
    for block, name, value, made in _not_read(whole):
        key = _join(block, name)
        shown = key
        if not isinstance(value, Mapping):
            shown = f"{key}={value}"
        near = _near(block, name)
        if made:
            found.not_taken.append(key)
            found.refusals.append(
                f"{shown}: verl makes a {made} of {block}, which takes no such key, so the run "
                f"would end once its workers start{'' if near is None else f'; {near}'}"
            )
            continue
        if is_read_elsewhere(key) or _is_below_one_of(key, own_keys):
            continue
        is_users = _is_below_one_of(key, users_blocks)
        if near is None:
            # A whole block of the user's at the top is no mistake.
            if not is_users and block:
                unknown.append(key + _similar(block, name))
            continue
        # Without a critic, its keys have no effect, whether they are right or wrong.
        if is_users or _is_below_one_of(key, [CRITIC]):
            found.warnings.append(f"{shown}: neither verl nor verl-gdpo reads this key; {near}")
        # The tables are those of one version, and another may read more keys.
        elif VERL_VERSION != verl_keys.VERSION:
            found.warnings.append(
                f"{shown}: neither verl-gdpo nor verl {verl_keys.VERSION} reads this key, and this "
                f"is verl {VERL_VERSION}; {near}"
            )
        else:
            found.refusals.append(
                f"{shown}: nobody reads this key, so it would have no effect; {near} If code of "
                f"yours reads it: {_line_for([key])}"
            )
    if unknown:
        names = ", ".join(unknown)
        keys = [key.partition(" ")[0] for key in unknown]  # without the remarks
        found.warnings.append(
            f"neither verl {verl_keys.VERSION} nor verl-gdpo reads {names}. If code of yours does: "
            f"{_line_for(keys)}"
        )
    return found


def _tables() -> Mapping[str, frozenset[str]]:
    """Return {block: the names that verl or we read there}. Any key may stand in other blocks."""
    return _tables_for(VERL_VERSION)


@cache
def _tables_for(version: str) -> Mapping[str, frozenset[str]]:
    tables: dict[str, frozenset[str]] = {}
    # a block that is longer than a line goes on in the next ones, behind spaces
    for line in verl_keys.KEYS.strip().replace("\n  ", " ").splitlines():
        block, _, names = line.partition(":")
        ours = OUR_KEYS.get(block, ())
        tables[block] = frozenset(names.split()).union(ours)
    if version != verl_keys.VERSION:
        # Another verl reads at least what its own configuration has.
        for path in sorted((Path(verl.__path__[0]) / "trainer" / "config").glob(COMPOSED)):
            composed: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            for block in tables:
                names_there = _value(composed, block) if block else composed
                if isinstance(names_there, Mapping):
                    tables[block] = tables[block].union(map(str, names_there))
    return tables


def _not_read(whole: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Yield each key that is not read, and nothing below it.

    Yields: its block, name and value, and the name of the class that does not take it; "" if the
        key is only without effect.
    """
    made_blocks = set(MADE_BLOCKS)
    if not _trains_critic(whole):
        made_blocks.remove(CRITIC)
    yield from _not_read_below(whole, "", made_blocks)


def _not_read_below(
    configuration: Mapping[str, Any], block: str, made_blocks: Iterable[str]
) -> Iterator[tuple[str, str, Any, str]]:
    known = _tables()[block]
    made = ""
    target = configuration.get("_target_")
    if target and _is_below_one_of(block, MADE_BLOCKS):
        taken = _fields_of(target)
        if taken is not None:
            # Some keys verl takes out itself before it makes the class: `ref.log_prob_...`. Those
            # of another verl's class are in no table.
            known = known | taken
            # Without a critic, verl makes nothing of its block.
            if _is_below_one_of(block, made_blocks):
                made = target.rpartition(".")[2]
    for name, value in configuration.items():
        inner = _join(block, str(name))
        if name not in known:
            yield block, str(name), value, made
        # Below a key without a table of its own, users may write what they like.
        elif isinstance(value, Mapping) and inner in _tables():
            yield from _not_read_below(value, inner, made_blocks)


@cache
def _fields_of(target: str) -> frozenset[str] | None:
    """Return the keys that a dataclass of verl takes; None for another class."""
    if not _is_of_verl_or_ours(target):
        return None
    try:
        made = get_class(target)
    except Exception:
        # verl says so where it makes the class.
        return None
    if not is_dataclass(made):
        return None
    return frozenset(each.name for each in fields(made))


def _trains_critic(whole: Mapping[str, Any]) -> bool:
    """Whether verl trains a critic, as its `need_critic` finds, which warns where nothing says."""
    is_enabled = _value(whole, "critic.enable")
    if is_enabled is None:
        return bool(_value(whole, "algorithm.adv_estimator") == "gae")
    return bool(is_enabled)


def _moved(whole: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, the key that verl reads) of what stands in a block of an older version."""
    for block, new_block in MOVED_BLOCKS.items():
        for key, value in _leaves(whole.get(block), block):
            new = MOVED.get(key, new_block + key.removeprefix(block))
            # verl's configuration has null under each of them.
            if value is not None:
                yield key, value, new


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, _join(path, str(name)))


class _Interpolations:
    """Tells whether an interpolation of the configuration names a key, or one below it."""

    def __init__(self, configuration: Any) -> None:
        self._whole: set[str] = set()  # `${data.my.key}` names data, data.my and data.my.key
        self._relative: set[str] = set()  # of `${.key}`, which may stand in any block
        for text in texts_in(configuration):
            if "${" in text:
                for path in re.findall(r"\.*\w[\w.]*", text):
                    self._add(path)

    def _add(self, path: str) -> None:
        names = path.strip(".").split(".")
        if path.startswith("."):
            self._relative.add(names[0])
            return
        for number in range(len(names)):
            self._whole.add(".".join(names[: number + 1]))

    def __call__(self, key: str) -> bool:
        return key in self._whole or key.rpartition(".")[2] in self._relative


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts among the values of a configuration, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def _own_keys(configuration: Mapping[str, Any]) -> list[str]:
    keys = configuration.get(OWN) or []
    # A single key may be written without brackets.
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{OWN}={keys!r}: expected a list of keys, such as [data.image_keys]")
    return keys


def _blocks_of_users_code(
    configuration: Mapping[str, Any], task_runner_class: Any
) -> Iterator[str]:
    """Yield each block that code of the user's gets. Below it, a key may have a reader."""
    if task_runner_class is not None:
        module = getattr(task_runner_class, "__module__", "")  # whatever a script hands over
        if not _is_of_verl_or_ours(module):
            yield ""
    for key, blocks in NAMES_CODE.items():
        if _value(configuration, key):
            yield from blocks
    for block in _tables():
        target = _value(configuration, f"{block}._target_")
        if target and not _is_of_verl_or_ours(target):
            yield block
    if _value(configuration, "reward.reward_manager.source") == "importlib":
        yield "reward"
    for (module, registry), (key, blocks) in REGISTRIES.items():
        # whoever registers something has imported the module
        registered = getattr(sys.modules.get(module), registry, {})
        made = registered.get(_value(configuration, key))
        if isinstance(made, dict):
            name = made["_target_"]
        else:
            name = getattr(made, "__module__", None)
        if name and not _is_of_verl_or_ours(name):
            yield from blocks


def _value(configuration: Any, key: str) -> Any:
    """Return the value of a key as it is written; None if there is no such key."""
    for name in key.split("."):
        if not isinstance(configuration, Mapping):
            return None
        configuration = configuration.get(name)
    return configuration


def _is_of_verl_or_ours(module: str) -> bool:
    """Return whether a module, or what is in one, is of verl or of this package."""
    if module.split(".")[0] != "__main__":
        return module.split(".")[0] in OUR_PACKAGES
    # `python -m verl.trainer.main_ppo` runs that file as `__main__`
    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
    return main.is_relative_to(Path(verl.__path__[0]).resolve())


def _near(block: str, name: str) -> str | None:
    """Return the question which key is meant; None if no key looks as if it were meant."""
    keys = _near_keys(block, name)
    if not keys:
        return None
    return f"did you mean {' or '.join(keys)}?"


def _near_keys(block: str, name: str) -> list[str]:
    """Return the keys that look as if one of them were meant."""
    if _join(block, name) in OLDER_BLOCKS:
        return [OLDER_BLOCKS[_join(block, name)]]
    if name in OTHER_NAMES:
        meant = OTHER_NAMES[name]
        own_name = meant.rpartition(".")[2]
        if own_name in _tables()[block]:
            meant = _join(block, own_name)
        return [meant]
    ratio = NEAR if block else NEAR_AT_TOP
    here = _closest(name, _tables()[block], ratio)
    if here is not None:
        return [_join(block, here)]
    elsewhere = _blocks_with(name)
    # What users have at the top is theirs, unless the name can only be ours.
    if not block and name in OUR_NAMES:
        return [_join(each, name) for each in elsewhere]
    # A key with the right name was probably written into the wrong block.
    if block and 0 < len(elsewhere) <= FEW_BLOCKS:
        return [_join(each, name) for each in elsewhere]
    return []


def meant_by(key: str) -> list[str]:
    """Return the keys of which one may be meant by a key that verl's configuration lacks.

    The first part that is not there is taken for the wrong one, as `modl` in `critic.modl.path`.
    """
    block = ""
    names = key.split(".")
    for number, name in enumerate(names):
        if block not in _tables():
            return []
        if name not in _tables()[block]:
            below = names[number + 1 :]
            meant = [".".join([near, *below]) for near in _near_keys(block, name)]
            return [each for each in meant if _is_known(each)]
        block = _join(block, name)
    return []


def _is_known(key: str) -> bool:
    """Return whether verl or we read a key, or it stands where any key may stand."""
    block = ""
    for name in key.split("."):
        if block not in _tables():
            return True
        if name not in _tables()[block]:
            return False
        block = _join(block, name)
    return True


def _similar(block: str, name: str) -> str:
    """Return a remark on a key of another name that may be meant, or nothing."""
    elsewhere = _blocks_with(name)
    if elsewhere:
        return f" ({elsewhere[0]} and others have a key of this name)"
    # A remark refuses nothing, so that less likeness is enough for it.
    here = _closest(name, _tables()[block], SIMILAR)
    if here is None:
        return ""
    return f" (verl reads {_join(block, here)})"


def _closest(name: str, known: Iterable[str], ratio: float) -> str | None:
    """Return the known name that is closest, without regard to case and underscores."""
    # Sets have another order in each process, and the message must not change with it.
    by_letters = {_letters(each): each for each in sorted(known)}
    close = difflib.get_close_matches(_letters(name), by_letters, 1, ratio)
    if not close:
        return None
    return by_letters[close[0]]


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _blocks_with(name: str) -> list[str]:
    return [block for block, names in _tables().items() if block and name in names]


def _is_below_one_of(key: str, blocks: Iterable[str]) -> bool:
    """Return whether a key is one of these, or stands below one of them; "" has all keys."""
    return any(not block or f"{key}.".startswith(f"{block}.") for block in blocks)


def _join(block: str, name: str) -> str:
    if not block:
        return name
    return f"{block}.{name}"


def _line_for(keys: Iterable[str]) -> str:
    return f"'+{OWN}=[{','.join(keys)}]'"
