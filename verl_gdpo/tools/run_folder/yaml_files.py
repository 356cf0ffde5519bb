"""Reads a YAML file of a run folder, which may be cut off, damaged, or made to fill the memory."""

from pathlib import Path
from typing import Any

import yaml

# the configuration of a run has 60 kilobytes and 2,000 nodes
MOST_BYTES = 4 << 20
MOST_NODES = 200_000
MOST_LEVELS = 100

# libyaml's parser where PyYAML was built with it: it is ten times as fast
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """Return the text of a YAML file whose content is bounded.

    An alias (`*name`) stands for a whole part of the file, so that ten lines can stand for
    billions of values. Nothing is built before the values are counted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML, or has more bytes, values or levels than any configuration.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"got {size:,} bytes; expected at most {MOST_BYTES:,}")
    text = path.read_text(encoding="utf-8")
    try:
        _check_levels(text)
        root = yaml.compose(text, Loader=LOADER)
        count = 0
        if root is not None:
            count = _count_nodes(root, {})
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("a value holds itself") from None
    if count > MOST_NODES:
        raise ValueError(f"its aliases stand for {count:,} values; expected at most {MOST_NODES:,}")
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, {key: value}; an empty file has none.

    Raises:
        OSError, ValueError: see `read_text`; or it is no mapping.
    """
    values = yaml.load(read_text(path), Loader=LOADER)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"got {type(values).__name__}; expected a mapping of keys and values")
    return values


def _check_levels(text: str) -> None:
    """Raise ValueError for too many levels, which would end the process in libyaml's recursion."""
    level = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MOST_LEVELS:
            raise ValueError(f"its values are nested in more than {MOST_LEVELS} levels")


def _count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many nodes a loader makes of this one; each alias counts as what it stands for.

    counts: {id of a node: the same for it}, filled in, so that no node is walked twice.
    """
    if id(node) in counts:
        return counts[id(node)]
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            children += [key, value]
    count = 1
    for child in children:
        count += _count_nodes(child, counts)
    counts[id(node)] = count
    return count
