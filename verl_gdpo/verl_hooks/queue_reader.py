"""Reads the rewards of a batch from TransferQueue.

Relies on verl 0.9: the keys `{uid}_{session}_{index}`, the tag `is_padding`, and the fields
`extra_fields` (with verl's `reward_extra_info`) and `data_source`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq

from verl_gdpo.batch.rows import RewardRows, check_names

# {key: verl's reward_extra_info, data_source}; they never change once a rollout is scored
KnownRows = dict[str, tuple[Mapping[str, Any], str]]


def fetch_rows(
    keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]], known: KnownRows
) -> RewardRows:
    """Return what the reward manager returned for these rows, in the order of `keys`.

    Args:
        known: rows in it are not fetched again; all other rows are fetched and added to it.

    Raises:
        RewardError: a sample has a value under a name that verl uses.
    """
    unknown = [key for key in keys if key not in known]
    if unknown:
        fetched = tq.kv_batch_get(
            keys=unknown, partition_id=partition_id, select_fields=["extra_fields", "data_source"]
        )
        infos = [
            fields.get("reward_extra_info") or {} for fields in _column(fetched, "extra_fields")
        ]
        check_names(infos, unknown.__getitem__)
        of_row = zip(infos, _column(fetched, "data_source"), strict=True)
        known.update(zip(unknown, of_row, strict=True))
    found = [known[key] for key in keys]
    padding = [bool(tag.get("is_padding")) for tag in tags]
    return RewardRows.from_keys(
        keys, [info for info, _ in found], [source for _, source in found], padding
    )


def _column(fetched: Any, name: str) -> list[Any]:
    """Return a column as a list: TransferQueue returns a list, a NonTensorStack or an array."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)
