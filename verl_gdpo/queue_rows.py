"""What TransferQueue holds of the rows of a batch.

Relies on verl 0.9: keys `{uid}_{session}_{index}`, the tags `is_padding` and `response_len`, the
fields `extra_fields` (with verl's `reward_extra_info`), `data_source`, `advantages` and
`response_mask`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import transfer_queue as tq

from verl_gdpo.reward_rows import RewardRows, split_key


def fetch_rows(
    keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]]
) -> RewardRows:
    """What the reward manager said of these TransferQueue rows, in the order of `keys`."""
    fetched = tq.kv_batch_get(
        keys=list(keys), partition_id=partition_id, select_fields=["extra_fields", "data_source"]
    )
    infos = [fields.get("reward_extra_info") or {} for fields in _column(fetched, "extra_fields")]
    sources = _column(fetched, "data_source")
    padding = [bool(tag.get("is_padding")) for tag in tags]
    return RewardRows.from_keys(keys, infos, sources, padding)


def fetch_lengths(batch: Any, *, trained: bool) -> npt.NDArray[np.int64]:
    """Response tokens of each row; `trained` counts its mask instead, which has to be fetched."""
    if not trained:
        return np.array([tag["response_len"] for tag in batch.tags], dtype=np.int64)
    fetched = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    return np.array(
        [int((mask != 0).sum()) for mask in fetched["response_mask"].unbind()], dtype=np.int64
    )


def _column(fetched: Any, name: str) -> list[Any]:
    """TransferQueue hands back a list, a NonTensorStack or an array, by accessor and backend."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)


def fetch_dump_columns(batch: Any) -> dict[str, dict[str, Any]]:
    """{row key: what `rollouts.py` says we add to verl's dump}."""
    rows = fetch_rows(batch.keys, batch.partition_id, batch.tags)
    tensors = tq.kv_batch_get(
        keys=batch.keys,
        partition_id=batch.partition_id,
        select_fields=["advantages", "response_mask"],
    )
    columns = {}
    for row, key in enumerate(batch.keys):
        group, session = split_key(split_key(key)[0])
        mask, advantage_T = tensors["response_mask"][row] != 0, tensors["advantages"][row]
        columns[key] = {
            "group": group,
            "session": session,
            "data_source": rows.sources[row],
            "response_tokens": int(mask.sum()),
            "rewards": {k: v for k, v in rows.info(row).items() if k != "score"},
            # the mean over its tokens: outcome estimators put the same number on each
            "advantage": float(advantage_T[mask].double().mean()) if mask.any() else 0.0,
            "is_padding": bool(rows.is_padding_B[row]),
        }
    return columns
