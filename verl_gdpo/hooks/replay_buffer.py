"""Checks rewards in verl's replay buffers, and keeps the groups that give a gradient.

It stops the run if a sample could not be scored. This is the first place in the trainer that sees a
rollout: group filtering has not dropped it yet, and validation comes here too. It also stops the
run if rollouts are lost. It sorts each batch by the time when verl sent out its prompts, because
the order decides which rows share a mini-batch.

Relies on verl 0.9 `ReplayBuffer`:
- `partitions`;
- `trainer_mode`;
- `pending_keys`, `running_keys`, `finished_keys` and `failure_keys`, which hold uids of prompts;
- `prompt_global_steps`, which holds the prompts in the order in which verl sent them out;
- `filter_groups_metric`, which is None if `algorithm.filter_groups` is off;
- `_dapo_classification_cache`, which holds None for each finished group that verl keeps, and the
  value of the metric for each group that verl drops.

Relies on TransferQueue as verl uses it: the keys `{uid}_{session}_{index}`, the tag `is_padding`,
and the fields `extra_fields` (with verl's `reward_extra_info`) and `data_source`.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import transfer_queue as tq

from verl_gdpo.algorithm.failed_samples import drop_failed, refuse_failures
from verl_gdpo.algorithm.group_filter import SUM_METRICS, FilterMetric, classify_groups
from verl_gdpo.algorithm.rows import BatchRows, RowKey
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, check_names
from verl_gdpo.hooks.extend import Function, record_of
from verl_gdpo.hooks.rollout_guard import Prompts, RolloutGuard

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

VERLS = "verl.trainer.ppo.v1.replay_buffer"

# {key: verl's reward_extra_info, data_source}; they never change once a rollout is scored
KnownRows = dict[str, tuple[Mapping[str, Any], str]]


def fetch_rows(
    keys: Sequence[str], partition_id: str, tags: Sequence[dict[str, Any]], known: KnownRows
) -> BatchRows:
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
    padding = [bool(tag.get("is_padding")) for tag in tags]
    return BatchRows.from_keys(
        keys, [known[key][0] for key in keys], [known[key][1] for key in keys], padding
    )


def zero_masks(batch: Any, is_dropped_B: Iterable[bool]) -> None:
    """Take all tokens of rows out of the loss: with the advantage 0, KL and entropy would count."""
    of = {"keys": [*compress(batch.keys, is_dropped_B)], "partition_id": batch.partition_id}
    if of["keys"]:
        rows = tq.kv_batch_get(**of, select_fields=["response_mask"])
        # FSDP counts tokens by the second
        rows["response_mask"] = rows["loss_mask"] = rows["response_mask"] * 0
        tq.kv_batch_put(**of, fields=rows)


def _column(fetched: Any, name: str) -> list[Any]:
    """Return a column as a list: TransferQueue returns a list, a NonTensorStack or an array."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)


@dataclass(eq=False)
class BufferRecord:
    """Beside a replay buffer of a trainer with gdpo."""

    guard: RolloutGuard
    in_rounds: bool = False  # True: filter only when all prompts that were sent out are done
    known_rows: KnownRows = field(default_factory=dict)  # fetched since the last advantage step
    settings: GdpoSettings | None = None  # None: verl's own rule filters groups
    metric: FilterMetric | None = None  # None: no rule filters groups
    step: int | None = None
    samples: int = 1  # of a batch
    busy: set[str] = field(default_factory=set)  # see `extend.py`
    # of the samples that the filter looked at since the last batch
    notes: list[Mapping[str, float]] = field(default_factory=list)

    def filter_by(self, settings: GdpoSettings, metric: str | None) -> None:
        """Make `algorithm.filter_groups` keep the groups that give a gradient under `settings`.

        Args:
            metric: `filter_groups_metric` of verl's buffer.
        """
        self.settings = settings
        if metric is not None:
            name = None if metric in SUM_METRICS else metric
            self.metric = FilterMetric(name)
            logger.info(
                "verl-gdpo: algorithm.filter_groups keeps the groups in which the sum of the "
                "normalised rewards is not 0%s",
                f" and {name!r} varies" if name else "",
            )

    def checked_rows(self, keys: Sequence[str], partition_id: str, tags: Any) -> BatchRows:
        """Return what the reward manager returned for these rows; raise if one has no score."""
        rows = fetch_rows(keys, partition_id, tags, self.known_rows)
        rows.raise_on_error()
        return rows

    def is_early(self, buffer: Any, partition_id: str) -> bool:
        """Return whether prompts are still running although the buffer must wait for all of them.

        Otherwise the batch would depend on which prompts finish first.
        """
        in_flight = buffer.pending_keys[partition_id] or buffer.running_keys[partition_id]
        return self.in_rounds and bool(in_flight)


def sample(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the rows of the batch."""
    record: BufferRecord = record_of(self)
    batch, metrics = original(self, *args, **kwargs)
    rows = record.checked_rows(batch.keys, batch.partition_id, batch.tags)
    if batch.partition_id != "val" and record.metric is not None:
        record.metric.check_known(rows)
        metrics |= record.metric.metrics()
        record.notes.clear()
    record.guard.end_batch(batch.partition_id)
    return batch, metrics


def sync_metadata(original: Function, self: Any) -> None:
    """Look for lost rollouts."""
    original(self)
    partitions = {*self.finished_keys, *self.failure_keys}
    record_of(self).guard.check({name: _prompts_of(self, name) for name in partitions})


def _prompts_of(buffer: Any, partition_id: str) -> Prompts:
    """Return the prompts that ended, and which of them are lost.

    The asynchronous trainers replace each failed prompt. The sync trainer and validation go on
    with the rollouts that are left of it: one gives a score, but only two give an advantage.
    """
    failed, is_val = buffer.failure_keys[partition_id], partition_id == "val"
    sessions: set[tuple[str, int]] = set()
    if failed:
        for key in map(RowKey.of_text, buffer.partitions[partition_id]):
            sessions.add((key.uid, key.session))
    left = Counter(uid for uid, _ in sessions)
    # a buffer of the user may lack the attribute
    is_replaced = getattr(buffer, "trainer_mode", "sync") != "sync" and not is_val
    under_way = buffer.pending_keys[partition_id], buffer.running_keys[partition_id]
    return Prompts(
        ended=buffer.finished_keys[partition_id] | failed,
        failed=set(failed),
        lost={uid for uid in failed if is_replaced or left[uid] < (1 if is_val else 2)},
        under_way=sum(map(len, under_way)),
    )


def clear_groups(original: Function, self: Any, partition_id: str, uids: set[str]) -> None:
    """Read the errors of the groups that verl drops: stale, failed, without signal, surplus."""
    tags = self.partitions[partition_id]
    keys = [key for key in tags if RowKey.of_text(key).uid in uids]
    if keys:
        record_of(self).checked_rows(keys, partition_id, [tags[key] for key in keys])
    original(self, partition_id, uids)


def sampleable_keys(original: Function, self: Any, partition_id: str, reasons: Any) -> Any:
    """Wait for all prompts of a round."""
    if record_of(self).is_early(self, partition_id):
        return set()
    return original(self, partition_id, reasons)


def select_prompts(
    original: Function, self: Any, partition_id: str, sampleable: set[str], batch_size: int
) -> Any:
    """Select in the order in which verl sent the prompts out.

    Raises:
        RolloutError: nothing is left of any selected prompt.
    """
    uids: Collection[str] = sampleable
    if original.__module__ == VERLS:
        # verl sorts by the step alone; a sampler of the user gets the set, as from verl
        uids = [uid for uid in self.prompt_global_steps[partition_id] if uid in uids]
    selected = original(self, partition_id, uids, batch_size)
    left = {RowKey.of_text(key).uid for key in selected[1]}
    if left.isdisjoint(selected[0]):
        guard = record_of(self).guard
        guard.raise_failed(f"all {len(selected[0])}", partition_id, min(selected[0]))
    return selected


def materialize_batch(
    original: Function,
    self: Any,
    partition_id: str,
    selected_prompt_uids: list[str],
    partition_snapshot: dict[str, Any],
) -> Any:
    """Sort the rows by the place of their prompt, session and number."""
    place = {uid: number for number, uid in enumerate(selected_prompt_uids)}
    order = {}
    for text in partition_snapshot:
        key = RowKey.of_text(text)
        if key.uid in place:
            order[text] = place[key.uid], key.session, key.index
    in_order = {text: partition_snapshot[text] for text in sorted(order, key=order.__getitem__)}
    return original(self, partition_id, selected_prompt_uids, in_order)


def eviction_reasons(original: Function, self: Any, global_steps: int, partition_id: str) -> Any:
    """Note the step, whose weights decide."""
    record_of(self).step = global_steps
    return original(self, global_steps, partition_id)


def filtered_keys(original: Function, self: Any, partition_id: str) -> Any:
    """Classify new groups before verl reads its cache."""
    record: BufferRecord = record_of(self)
    if record.is_early(self, partition_id):
        return set(), Counter()
    if partition_id != "val" and getattr(self, "filter_groups_metric", None) is not None:
        _classify_finished(self, record, partition_id)
    return original(self, partition_id)


def _classify_finished(buffer: Any, record: BufferRecord, partition_id: str) -> None:
    """Put new finished groups into verl's cache, which decides which groups verl keeps."""
    cache, tags = buffer._dapo_classification_cache[partition_id], buffer.partitions[partition_id]
    fresh = buffer.finished_keys[partition_id] - cache.keys()
    keys = [key for key in tags if RowKey.of_text(key).uid in fresh]
    if not keys:
        return
    rows = record.checked_rows(keys, partition_id, [tags[key] for key in keys])
    if record.settings is not None:
        rows = replace(rows, step=record.step)
        if NOTES_KEY in rows.columns:
            rows = drop_failed(rows, record.settings.min_group)
        record.notes += rows.notes
        if len(record.notes) >= record.samples:  # they may all be filtered, and never trained
            where = "that dynamic sampling looked at since the last step"
            refuse_failures(record.notes, record.settings.max_failed, where)
        metric_B = record.metric.read(rows) if record.metric else None
        cache.update(classify_groups(rows, rows.uids, record.settings, metric_B))
