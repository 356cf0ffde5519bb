"""Columns of data files that verl cannot use beside what it makes itself, and agent loops in them.

verl passes the columns of a row on as keywords, from its dataset to its agent loops and reward
managers. `verl_questions.names_beside_columns` and `names_of_rollouts` are the names it has taken.
"""

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from verl_gdpo.tools.check.data_files import DataFile
from verl_gdpo.tools.check.verl_questions import names_beside_columns, names_of_rollouts

AGENT = "agent_name"
# `RLHFDataset.__getitem__` takes these from `extra_info`, and puts {} where it has none.
OF_EXTRA_INFO = ("tools_kwargs", "interaction_kwargs")

# What `ToolAgentLoop` expects of these fields of `extra_info`, and does with a text.
OF_TOOL_AGENT = {
    "tools_kwargs": "{TOOL: {create_kwargs: {...}}}. With a text, each call of a tool fails",
    "tool_selection": "a list of tools. verl's tool agent reads the letters of a text as names, "
    "and offers no tool",
}


def taken_names(config: Any, key: str, files: Sequence[DataFile]) -> list[str]:
    """Return a problem for each file of `data.<key>` with a column whose name verl has taken."""
    if config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
        # Nobody knows how code of the user's passes the columns on.
        return []
    beside = names_beside_columns(config)
    of_rollouts = names_of_rollouts(config)
    problems = []
    for file in files:
        columns = file.table.column_names
        doubled = [column for column in columns if column in beside]
        if doubled:
            problems.append(
                f"data.{key}: {file.path} has {_named(doubled)}. verl passes an argument of this "
                "name itself, beside the columns of a row, so each rollout would fail once the "
                f"model is loaded (got multiple values for keyword argument {doubled[0]!r}). "
                "Rename the column, or put it into extra_info"
            )
        covering = [column for column in columns if column in of_rollouts]
        if covering:
            problems.append(
                f"data.{key}: {file.path} has {_named(covering)}. The trainer of "
                "trainer.use_v1=True puts the columns of a row over what a rollout made, and would "
                f"lose the tokens or numbers that stand under {covering[0]}. Rename the column, "
                "or put it into extra_info"
            )
    return problems


def _named(columns: Sequence[str]) -> str:
    if len(columns) == 1:
        return f"a column {columns[0]}"
    return f"the columns {', '.join(columns)}"


def unread_columns(key: str, files: Sequence[DataFile]) -> list[str]:
    """Return a remark for each column of `data.<key>` that verl reads only in `extra_info`."""
    remarks = []
    for file in files:
        for column in OF_EXTRA_INFO:
            if column in file.table.column_names:
                remarks.append(
                    f"data.{key}: {file.path} has a column {column}. verl reads it in extra_info "
                    f"alone, and puts extra_info.{column} in the place of the column, or an empty "
                    "dict: move it into extra_info"
                )
    return remarks


def texts_in_extra_info(key: str, files: Sequence[DataFile]) -> list[str]:
    """Return a remark for each field of `extra_info` that verl's tool agent cannot read as text."""
    remarks = []
    for file in files:
        if "extra_info" not in file.table.column_names:
            continue
        kind = file.table.schema.field("extra_info").type
        if not pa.types.is_struct(kind):
            continue
        for field in kind:
            is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
            if is_text and field.name in OF_TOOL_AGENT:
                remarks.append(
                    f"data.{key}: {file.path}: extra_info.{field.name} is {field.type}; expected "
                    f"{OF_TOOL_AGENT[field.name]}"
                )
    return remarks


def unknown_agents(key: str, files: Sequence[DataFile], known: Collection[str] | None) -> list[str]:
    """Return a problem for each file of `data.<key>` with rows whose agent loop nobody registered.

    Args:
        known: the names of the agent loops; None if they are not known here.
    """
    if known is None or not any(AGENT in file.table.column_names for file in files):
        return []
    remedy = (
        f"each of their rollouts would fail. verl knows {', '.join(sorted(known))}: name one of "
        "these, or add yours to a file under "
        "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    )
    problems = []
    for file in files:
        if AGENT not in file.table.column_names:
            problems.append(
                f"data.{key}: {file.path} has no column {AGENT}, and another file has it. verl "
                f"fills it with None, which is no agent loop, so {remedy}"
            )
            continue
        names = file.table[AGENT].to_pylist()
        unknown = [number for number, name in enumerate(names) if name not in known]
        if unknown:
            problems.append(
                f"data.{key}: {len(unknown)} of {len(names)} rows have an {AGENT} that verl does "
                f"not know, such as {names[unknown[0]]!r} of {file.row(unknown[0]).label}, so "
                f"{remedy}"
            )
    return problems
