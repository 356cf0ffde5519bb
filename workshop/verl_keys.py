"""Lists the keys of the configuration that verl reads, as `verl_gdpo/hooks/verl_keys.py`.

python -m workshop.verl_keys      writes that module, for the verl that is installed

verl reads a key if one of these has it:

- the configuration of one of its engines, as Hydra composes it, or one of `verl/experimental`;
- the dataclass that a block names under `_target_`, or that is the type of a dataclass's field;
- its source: `config.data.key`, `config.data["key"]`, `config.data.get("key")`, `"key" in
  config.data`, `getattr(config.data, "key", None)` or `OmegaConf.select(config, "data.key")`, also
  where `config.data` was given to a variable, or to an attribute of the object.

A function that gets a block as a parameter does not say which one it is. `BLOCK_OF` says it.
"""

import ast
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import verl
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

ROOTS = ("algorithm", "reward", "data", "actor_rollout_ref", "critic", "trainer")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENGINES = ("dp", "megatron", "torchtitan", "veomni")
VERL = Path(verl.__path__[0])
MODULE = Path(__file__).parents[1] / "verl_gdpo" / "hooks" / "verl_keys.py"
WIDTH = 100

# {the name of a variable: the blocks that it may hold}; of `config` it depends on the file
BLOCK_OF = {
    "algo_config": ("algorithm",),
    "algorithm_config": ("algorithm",),
    "data_config": ("data",),
    "actor_config": (ACTOR,),
    "rollout_config": (ROLLOUT,),
}
CONFIG_OF = {
    "utils/dataset/rl_dataset.py": ("data",),
}
# no training of `main_ppo` imports them, and their configurations have blocks of the same names
NOT_OF_PPO = (
    "model_merger",
    "trainer/main_eval.py",
    "trainer/main_generation_server.py",
    "trainer/sft_trainer.py",
    "trainer/sft_trainer_ray.py",
    "utils/dataset/multiturn_sft_dataset.py",
)
METHODS = {name for kind in (dict, list, str) for name in dir(kind)}
# functions that return the block that they get, in another form
SAME_BLOCK = ("omega_conf_to_dataclass", "to_container", "deepcopy", "create")

WHOLE = "the configuration of the run"

Keys = dict[str, set[str]]  # {block: the names of its keys}
Chain = tuple[str, ...]  # of the names of an expression, such as ("config", "data", "seed")


def keys_that_verl_reads() -> Keys:
    """Return {block: the names that verl reads there}, with "" for the configuration itself.

    A block that is missing is one in which verl takes any key, such as `engine_kwargs`.
    """
    keys: Keys = {}
    free: set[str] = set()
    for configuration in _configurations():
        _add_block(configuration, "", keys, free)
    for path in sorted(VERL.rglob("*.py")):
        name = path.relative_to(VERL).as_posix()
        if not name.startswith(NOT_OF_PPO):
            _add_source(name, path.read_text(), keys)
    return {block: names for block, names in keys.items() if _is_looked_into(block, free)}


def _is_looked_into(block: str, free: set[str]) -> bool:
    if block and block.partition(".")[0] not in ROOTS:
        return False
    parts = block.split(".")
    return not any(".".join(parts[: number + 1]) in free for number in range(len(parts)))


def _configurations() -> Iterator[dict[str, Any]]:
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        for engine in ENGINES:
            config = compose("ppo_trainer", [f"model_engine={engine}"])
            yield OmegaConf.to_container(config)  # type: ignore[misc]
        yield OmegaConf.to_container(compose("ppo_megatron_trainer"))  # type: ignore[misc]
    for path in sorted(VERL.glob("experimental/*/config/*.yaml")):
        # they add keys to those above, and their search path holds in a checkout of verl alone
        added = yaml.safe_load(path.read_text())
        added.pop("defaults")
        added.pop("hydra")
        yield added


def _add_block(block: Mapping[str, Any], path: str, keys: Keys, free: set[str]) -> None:
    """Add what a configuration has in a block, and what the class of the block takes."""
    if not block:
        free.add(path)
        return
    keys.setdefault(path, set()).update(block)
    for name, value in block.items():
        if isinstance(value, Mapping):
            _add_block(value, _join(path, name), keys, free)
    if "_target_" in block:
        _add_class(get_class(block["_target_"]), path, keys, free)


def _add_class(kind: type, path: str, keys: Keys, free: set[str]) -> None:
    """Add the fields of a dataclass. A field that is a mapping takes any key."""
    types = get_type_hints(kind)
    for each in fields(kind):
        name = _join(path, each.name)
        keys.setdefault(path, set()).add(each.name)
        for possible in _alternatives(types[each.name]):
            if isinstance(possible, type) and is_dataclass(possible):
                _add_class(possible, name, keys, free)
            elif possible in (dict, Mapping, Any):
                free.add(name)


def _alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without their parameters."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [one for each in get_args(annotation) for one in _alternatives(each)]
    return [origin or annotation]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _add_source(file: str, text: str, keys: Keys) -> None:
    """Add what a file of verl reads in the blocks that the configurations have."""
    blocks_of = {WHOLE: ("",), **BLOCK_OF}
    if file in CONFIG_OF:
        blocks_of["config"] = CONFIG_OF[file]
    reader = _Reader(blocks_of)
    reader.visit(ast.parse(text))
    for chain in reader.chains:
        for path in blocks_of[chain[0]]:
            _add_chain(chain[1:], path, keys)


def _add_chain(names: Chain, path: str, keys: Keys) -> None:
    """Add the names of a chain, as far down as there are blocks."""
    for name in names:
        if path not in keys or (path == "" and name not in ROOTS):
            return
        keys[path].add(name)
        path = _join(path, name)


class _Reader(ast.NodeVisitor):
    """Collects the chains of names that are read from a configuration.

    Args:
        blocks_of: {the name of a variable: the blocks that it may hold}. Any other variable whose
            name is that of a configuration may hold the whole one.
    """

    def __init__(self, blocks_of: Mapping[str, Chain]) -> None:
        self.blocks_of = blocks_of
        self.chains: set[Chain] = set()
        # what variables of a function, and attributes of an object, were set to
        self._variables: list[dict[str, Chain]] = [{}]
        self._attributes: list[dict[str, Chain]] = [{}]

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Compare):
            chain = self._chain(node)
            if chain is not None:
                self.chains.add(chain)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._variables.append({})
            self.generic_visit(node)
            self._variables.pop()
        elif isinstance(node, ast.ClassDef):
            self._attributes.append({})
            for inner in ast.walk(node):  # a method may stand above the constructor
                if isinstance(inner, ast.Assign):
                    self._assign(inner, ast.Attribute)
            self.generic_visit(node)
            self._attributes.pop()
        else:
            if isinstance(node, ast.Assign):
                self._assign(node, ast.Name)
            self.generic_visit(node)

    def _assign(self, node: ast.Assign, kind: type) -> None:
        chain = self._chain(node.value)
        if chain is None or len(chain) == 1:  # the name of the variable says as much
            return
        for target in node.targets:
            if isinstance(target, ast.Name) and kind is ast.Name:
                self._variables[-1][target.id] = chain
            elif _is_of_self(target) and kind is ast.Attribute:
                self._attributes[-1][target.attr] = chain  # type: ignore[attr-defined]

    def _chain(self, node: ast.AST | None) -> Chain | None:
        """Return the names of an expression that reads a configuration; None for any other."""
        if isinstance(node, ast.Name):
            return self._variables[-1].get(node.id) or self._of_name(node.id)
        if _is_of_self(node):
            name = node.attr  # type: ignore[union-attr]
            return self._attributes[-1].get(name) or self._of_name(name)
        if isinstance(node, ast.Attribute):
            if node.attr in METHODS:
                return None
            return self._longer(node.value, node.attr)
        if isinstance(node, ast.Subscript):
            return self._longer(node.value, _text(node.slice))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            return self._longer(node.comparators[0], _text(node.left))
        if isinstance(node, ast.BoolOp):  # `config.get("reward") or {}`
            return self._chain(node.values[0])
        if isinstance(node, ast.IfExp):
            return self._chain(node.body)
        if isinstance(node, ast.Call):
            return self._chain_of_call(node)
        return None

    def _chain_of_call(self, node: ast.Call) -> Chain | None:
        if not node.args:
            return None
        first = node.args[0]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("get", "pop", "setdefault") and isinstance(node.func, ast.Attribute):
            return self._longer(node.func.value, _text(first))
        if name in ("getattr", "hasattr", "select") and len(node.args) > 1:
            return self._longer(first, _text(node.args[1]))
        return self._chain(first) if name in SAME_BLOCK else None

    def _longer(self, node: ast.AST, key: str | None) -> Chain | None:
        chain = self._chain(node)
        if key is None:
            return None
        if chain is None:  # an object that has a configuration: `worker.config`
            return self._of_name(key)
        if len(chain) == 1 and key == "config":  # as in `trainer_config.config.data`
            return (WHOLE,)
        if len(chain) == 1 and key.split(".")[0] in ROOTS:
            return (WHOLE, *key.split("."))
        return (*chain, *key.split("."))

    def _of_name(self, name: str) -> Chain | None:
        if name in self.blocks_of:
            return (name,)
        return (WHOLE,) if name.lower().endswith(("config", "cfg")) else None


def _is_of_self(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _text(node: ast.AST) -> str | None:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None  # type: ignore[attr-defined]


def text_of(keys: Keys) -> str:
    """Return the module `verl_gdpo/hooks/verl_keys.py`."""
    lines = [
        f'"""The keys of the configuration that verl {verl.__version__} reads, by block.',
        "",
        "Made by `python -m workshop.verl_keys`; do not change it by hand. In a block that is not",
        "here, verl takes any key.",
        '"""',
        "",
        f'VERSION = "{verl.__version__}"',
        "",
        'KEYS = """',
    ]
    for block in sorted(keys):
        names = " ".join(sorted(keys[block]))
        lines += textwrap.wrap(f"{block}: {names}", WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, '"""', ""])


if __name__ == "__main__":
    MODULE.write_text(text_of(keys_that_verl_reads()))
    print(MODULE)
