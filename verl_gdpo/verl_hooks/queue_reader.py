"""Reads the rewards of a batch from TransferQueue.

Relies on verl 0.9: the keys `{uid}_{session}_{index}`, the tag `is_padding`, and the fields
`extra_fields` (with verl's `reward_extra_info`), `data_source` and `rm_scores`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import transfer_queue as tq

from verl_gdpo.batch.rows import RewardRows, check_names, self_scored

# {key: verl's reward_extra_info, data_source, and the score if an agent loop set it itself}; they
# never change once a rollout is scored
KnownRows = dict[str, tuple[Mapping[str, Any], str, float | None]]


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
        sources = _column(fetched, "data_source")
        own_of = _own_scores(unknown, infos, partition_id)
        of_row = zip(infos, sources, map(own_of.get, unknown), strict=True)
        known.update(zip(unknown, of_row, strict=True))
    found = [known[key] for key in keys]
    padding = [bool(tag.get("is_padding")) for tag in tags]
    rows = RewardRows.from_keys(
        keys, [info for info, _, _ in found], [source for _, source, _ in found], padding
    )
    own_scores = {row: own for row, (_, _, own) in enumerate(found) if own is not None}
    return replace(rows, own_scores=own_scores)


def _own_scores(
    keys: Sequence[str], infos: Sequence[Mapping[str, Any]], partition_id: str
) -> dict[str, float]:
    """Return {key: score} of the rows that our manager did not score."""
    own = [key for key, info in zip(keys, infos, strict=True) if self_scored(info)]
    if not own:
        return {}
    fetched = tq.kv_batch_get(keys=own, partition_id=partition_id, select_fields=["rm_scores"])
    return {key: float(scores.sum()) for key, scores in zip(own, fetched["rm_scores"], strict=True)}


def _column(fetched: Any, name: str) -> list[Any]:
    """Return a column as a list: TransferQueue returns a list, a NonTensorStack or an array."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)
