"""What TransferQueue holds of the rows of a batch.

Relies on verl 0.9: keys `{uid}_{session}_{index}`, the tag `is_padding`, the fields `extra_fields`
(with verl's `reward_extra_info`) and `data_source`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq

from verl_gdpo.batch.rows import RewardRows

# {key: verl's reward_extra_info and data_source}, which stay as they are once a rollout is scored
KnownRows = dict[str, tuple[Mapping[str, Any], str]]


def fetch_rows(
    keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]], known: KnownRows
) -> RewardRows:
    """What the reward manager said of these TransferQueue rows, in the order of `keys`.

    Rows that are in `known` are not fetched; the others are added to it.
    """
    unknown = [key for key in keys if key not in known]
    if unknown:
        fetched = tq.kv_batch_get(
            keys=unknown, partition_id=partition_id, select_fields=["extra_fields", "data_source"]
        )
        infos = [
            fields.get("reward_extra_info") or {} for fields in _column(fetched, "extra_fields")
        ]
        sources = _column(fetched, "data_source")
        known.update(zip(unknown, zip(infos, sources, strict=True), strict=True))
    rows = [known[key] for key in keys]
    padding = [bool(tag.get("is_padding")) for tag in tags]
    return RewardRows.from_keys(
        keys, [info for info, _ in rows], [source for _, source in rows], padding
    )


def _column(fetched: Any, name: str) -> list[Any]:
    """TransferQueue hands back a list, a NonTensorStack or an array, by accessor and backend."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)
