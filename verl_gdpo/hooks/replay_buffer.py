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

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from verl_gdpo.algorithm.failed_samples import drop_failed, refuse_failures
from verl_gdpo.algorithm.group_filter import (
    SUM_METRICS,
    FilterCounts,
    FilterMetric,
    classify_groups,
)
from verl_gdpo.algorithm.rows import BatchRows, RowKey
from verl_gdpo.algorithm.settings import WHERE, GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, check_names
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.hooks.net import end_run, warn_of
from verl_gdpo.hooks.rollout_guard import Prompts, RolloutGuard

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

VERLS = "verl.trainer.ppo.v1.replay_buffer"


def _transfer_queue() -> Any:
    """Import the package, which the legacy trainers need not have, as on verl's branch neo."""
    import transfer_queue

    return transfer_queue


class KnownRow(NamedTuple):
    """What the reward manager returned for a row; it never changes once the rollout is scored."""

    info: Mapping[str, Any]  # verl's reward_extra_info
    source: str  # verl's data_source


def fetch_rows(
    keys: Sequence[str],
    partition_id: str,
    tags: Sequence[Mapping[str, Any]],
    known: dict[str, KnownRow],
) -> BatchRows:
    """Return what the reward manager returned for these rows, in the order of `keys`.

    Args:
        known: {key: row}; rows in it are not fetched again. All other rows are fetched and added.

    Raises:
        RewardError: a sample has a value under a name that verl uses.
    """
    unknown = [key for key in keys if key not in known]
    if unknown:
        known.update(_fetched(unknown, partition_id))
    infos = []
    sources = []
    for key in keys:
        infos.append(known[key].info)
        sources.append(known[key].source)
    # verl fills up a batch with rows whose rewards are copies, and marks them so.
    is_padding = [bool(tag.get("is_padding")) for tag in tags]
    return BatchRows.from_keys(keys, infos, sources, is_padding)


def _fetched(keys: Sequence[str], partition_id: str) -> dict[str, KnownRow]:
    """Return {key: row} from TransferQueue; raise RewardError for a name that verl uses."""
    fields = _transfer_queue().kv_batch_get(
        keys=keys, partition_id=partition_id, select_fields=["extra_fields", "data_source"]
    )
    infos = []
    for extra_fields in _column(fields, "extra_fields"):
        # An agent loop that sets the score itself may return nothing more.
        infos.append(extra_fields.get("reward_extra_info") or {})
    check_names(infos, keys.__getitem__)
    rows = {}
    sources = _column(fields, "data_source")
    for key, info, source in zip(keys, infos, sources, strict=True):
        rows[key] = KnownRow(info, source)
    return rows


def response_ids(key: str, partition_id: str) -> list[int]:
    """Return the tokens of a row's response, which are fetched."""
    fields = _transfer_queue().kv_batch_get(
        keys=[key], partition_id=partition_id, select_fields=["responses"]
    )
    ids: list[int] = fields["responses"].unbind()[0].tolist()
    return ids


def zero_masks(batch: Any, is_dropped_B: Iterable[bool]) -> None:
    """Take all tokens of rows out of the loss: with the advantage 0, KL and entropy would count."""
    dropped = list(itertools.compress(batch.keys, is_dropped_B))
    if not dropped:
        return
    queue = _transfer_queue()
    fields = queue.kv_batch_get(
        keys=dropped, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    none_BT = fields["response_mask"] * 0
    fields["response_mask"] = none_BT
    # verl's FSDP engine counts the tokens of a mini-batch by this second mask.
    fields["loss_mask"] = none_BT
    queue.kv_batch_put(keys=dropped, partition_id=batch.partition_id, fields=fields)


def _column(fields: Any, name: str) -> list[Any]:
    """Return a column as a list: TransferQueue returns a list, a NonTensorStack or an array."""
    column = fields.get(name)
    if hasattr(column, "tolist"):
        values: list[Any] = column.tolist()
        return values
    return list(column)


@dataclass(eq=False)
class BufferRecord:
    """Beside a replay buffer of a trainer with gdpo."""

    guard: RolloutGuard
    in_rounds: bool = False  # True: filter only when all prompts that were sent out are done
    known_rows: dict[str, KnownRow] = field(default_factory=dict)  # since the last advantage step
    settings: GdpoSettings | None = None  # None: verl's own rule filters groups
    metric: FilterMetric | None = None  # None: no rule filters groups
    has_filtered: bool = False  # whether groups were classified here
    counts: FilterCounts = field(default_factory=FilterCounts)
    step: int | None = None
    samples: int = 1  # of a batch
    busy: set[tuple[str, str]] = field(default_factory=set)  # see `extend.py`
    # of the samples that the filter looked at since the last batch
    notes: list[Mapping[str, float]] = field(default_factory=list)
    # Looks at groups that the filter sees for the first time; None: nobody does.
    look_at_new: Callable[[BatchRows, str], None] | None = None

    def filter_by(self, settings: GdpoSettings, metric: str | None) -> None:
        """Make `algorithm.filter_groups` keep the groups that give a gradient under `settings`.

        Args:
            metric: `filter_groups_metric` of verl's buffer.

        Raises:
            ValueError: nothing would ask for `algorithm.gdpo.keep_groups`.
        """
        self.settings = settings
        if metric is None:
            # A sampler of the user's (`custom_sampler`) gets no metric, and filters by itself.
            if settings.keep_groups:
                raise ValueError(
                    f"{WHERE}.keep_groups={settings.keep_groups}: this replay buffer filters no "
                    "groups by algorithm.filter_groups. Leave out "
                    "trainer.v1.sampler.custom_sampler, or keep_groups"
                )
            return
        name = None
        and_varies = ""
        # The summed score is no number that gdpo trains on, and need not vary.
        if metric not in SUM_METRICS:
            name = metric
            and_varies = f" and {name!r} varies"
        self.metric = FilterMetric(name)
        logger.info(
            "verl-gdpo: algorithm.filter_groups keeps the groups in which the sum of the "
            "normalised rewards is not 0%s%s",
            and_varies,
            "".join(
                f" and the mean of {reward!r} is from {low:g} to {high:g}"
                for reward, (low, high) in (settings.keep_groups or {}).items()
            ),
        )

    def checked_rows(
        self, keys: Sequence[str], partition_id: str, tags: Sequence[Mapping[str, Any]]
    ) -> BatchRows:
        """Return what the reward manager returned for these rows; raise if one has no score."""
        rows = fetch_rows(keys, partition_id, tags, self.known_rows)
        rows.raise_on_error()
        return rows

    def take_rows(self, batch: Any, step: int) -> BatchRows:
        """Return the rows of the batch of a step, and forget all: the next step has others.

        Raises:
            RewardError: a sample has no score, and `sample` has not seen it.
        """
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            # verl adds padding after it has sampled.
            if key not in self.known_rows and not tag.get("is_padding"):
                warn_of("ReplayBuffer.sample")
                break
        rows = self.checked_rows(batch.keys, batch.partition_id, batch.tags)
        self.known_rows.clear()
        return replace(rows, step=step)

    def is_early(self, buffer: Any, partition_id: str) -> bool:
        """Return whether prompts are still running although the buffer must wait for all of them.

        Otherwise the batch would depend on which prompts finish first.
        """
        in_flight = buffer.pending_keys[partition_id] or buffer.running_keys[partition_id]
        return self.in_rounds and bool(in_flight)

    def classify(self, rows: BatchRows, settings: GdpoSettings) -> Mapping[str, float | None]:
        """Return {prompt: None if its group is kept, else a number}; see `classify_groups`.

        Raises:
            RewardError: too many of the samples that were looked at have failed.
        """
        rows = replace(rows, step=self.step)
        if NOTES_KEY in rows.columns:
            rows = drop_failed(rows, settings.min_group)
        self.notes.extend(rows.notes)
        # They may all be filtered, so that no step ever trains on them and looks at their notes.
        if len(self.notes) >= self.samples:
            where = "that dynamic sampling looked at since the last step"
            refuse_failures(self.notes, settings.max_failed, where)
        metric_B = None
        if self.metric is not None:
            metric_B = self.metric.read(rows)
        groups = classify_groups(rows, rows.uids, settings, metric_B)
        self.counts.add(groups)
        return groups.dropped


# --- verl's methods, in the order in which a batch passes them ------------------------------------


def sync_metadata(call: Call) -> Any:
    """Look for lost rollouts."""
    buffer = call.instance
    result = call.hand_on()
    prompts = {}
    for partition_id in set(buffer.finished_keys) | set(buffer.failure_keys):
        prompts[partition_id] = _prompts_of(buffer, partition_id)
    record_of(buffer).guard.check(prompts)
    return result


def _prompts_of(buffer: Any, partition_id: str) -> Prompts:
    """Return the prompts that ended, and which of them are lost.

    The asynchronous trainers replace each failed prompt. The sync trainer and validation go on
    with the rollouts that are left of it: one gives a score, but only two give an advantage.
    """
    failed = buffer.failure_keys[partition_id]
    sessions: set[tuple[str, int]] = set()
    # This runs at each poll, and almost always nothing has failed.
    if failed:
        for text in buffer.partitions[partition_id]:
            key = RowKey.of_text(text)
            sessions.add((key.uid, key.session))
    # The number of rollouts that are left of each prompt.
    left = Counter(uid for uid, _ in sessions)

    is_val = partition_id == "val"
    # A buffer of the user may lack the attribute.
    is_async = getattr(buffer, "trainer_mode", "sync") != "sync"
    is_replaced = is_async and not is_val
    enough = 2
    if is_val:
        enough = 1
    lost = set()
    for uid in failed:
        if is_replaced or left[uid] < enough:
            lost.add(uid)
    return Prompts(
        ended=buffer.finished_keys[partition_id] | failed,
        failed=set(failed),
        lost=lost,
        under_way=len(buffer.pending_keys[partition_id]) + len(buffer.running_keys[partition_id]),
    )


def eviction_reasons(call: Call) -> Any:
    """Note the step, whose weights decide."""
    record_of(call.instance).step = call["global_steps"]
    return call.hand_on()


def filtered_keys(call: Call) -> Any:
    """Classify new groups before verl reads its cache."""
    buffer = call.instance
    partition_id = call["partition_id"]
    record: BufferRecord = record_of(buffer)
    if record.is_early(buffer, partition_id):
        return set(), Counter()
    # A buffer of the user may lack the attribute.
    is_filtering = getattr(buffer, "filter_groups_metric", None) is not None
    if is_filtering and partition_id != "val":
        record.has_filtered = True
        _classify_finished(buffer, record, partition_id)
    return call.hand_on()


def _classify_finished(buffer: Any, record: BufferRecord, partition_id: str) -> None:
    """Put new finished groups into verl's cache, which decides which groups verl keeps."""
    cache = buffer._dapo_classification_cache[partition_id]
    new = buffer.finished_keys[partition_id] - cache.keys()
    rows = _checked_rows_of(buffer, partition_id, new)
    # They may all be filtered, so that no step ever trains on them and looks at them.
    if rows is not None and record.look_at_new is not None:
        record.look_at_new(replace(rows, step=record.step), partition_id)
    # With another estimator, verl's own rule decides, and the rows are checked alone.
    if rows is not None and record.settings is not None:
        cache.update(record.classify(rows, record.settings))


def _checked_rows_of(buffer: Any, partition_id: str, uids: set[str]) -> BatchRows | None:
    """Return all rows of some prompts, None if there are none; raise if one has no score."""
    keys = []
    tags = []
    for key, tag in buffer.partitions[partition_id].items():
        if RowKey.of_text(key).uid in uids:
            keys.append(key)
            tags.append(tag)
    # Of a prompt that failed, no rollout may be left.
    if not keys:
        return None
    record: BufferRecord = record_of(buffer)
    return record.checked_rows(keys, partition_id, tags)


def clear_groups(call: Call) -> Any:
    """Read the errors of the groups that verl drops: stale, failed, without signal, surplus."""
    _checked_rows_of(call.instance, call["partition_id"], call["uids"])
    return call.hand_on()


def sampleable_keys(call: Call) -> Any:
    """Wait for all prompts of a round."""
    buffer = call.instance
    if record_of(buffer).is_early(buffer, call["partition_id"]):
        return set()
    return call.hand_on()


def select_prompts(call: Call) -> Any:
    """Select in the order in which verl sent the prompts out.

    Raises:
        RolloutError: nothing is left of any selected prompt.
    """
    buffer = call.instance
    partition_id = call["partition_id"]
    # verl sorts by the step alone. A sampler of the user gets the set, as from verl.
    if call.original.__module__ == VERLS:
        sampleable = call["sampleable_keys"]
        in_order = [uid for uid in buffer.prompt_global_steps[partition_id] if uid in sampleable]
        call = call.changed(sampleable_keys=in_order)
    selected = call.hand_on()
    # verl returns the prompts, {key: tag} of all rows, and more, which goes on as it is.
    prompts = selected[0]
    row_tags = selected[1]
    left = {RowKey.of_text(key).uid for key in row_tags}
    if left.isdisjoint(prompts):
        guard = record_of(buffer).guard
        guard.raise_failed(f"all {len(prompts)}", partition_id, min(prompts))
    return selected


def materialize_batch(call: Call) -> Any:
    """Sort the rows by the place of their prompt, session and number."""
    snapshot = call["partition_snapshot"]
    # Rollouts arrive in any order, and the order of rows decides which share a mini-batch.
    place_of = {uid: place for place, uid in enumerate(call["selected_prompt_uids"])}
    order = {}
    for text in snapshot:
        key = RowKey.of_text(text)
        if key.uid in place_of:
            order[text] = (place_of[key.uid], key.session, key.index)
    in_order = {text: snapshot[text] for text in sorted(order, key=order.__getitem__)}
    return call.changed(partition_snapshot=in_order).hand_on()


def sample(call: Call) -> Any:
    """Check the rows of the batch."""
    record: BufferRecord = record_of(call.instance)
    sampled = call.hand_on()
    # verl returns the batch, {name: metric}, and maybe more, which goes on as it is.
    batch = sampled[0]
    metrics = sampled[1]
    rows = record.checked_rows(batch.keys, batch.partition_id, batch.tags)
    # Validation filters no groups, and so does not end what the filter counts.
    if batch.partition_id != "val" and record.metric is not None:
        if not record.has_filtered:
            end_run("ReplayBuffer._dapo_filtered_keys")
        record.metric.check_known(rows)
        metrics.update(record.metric.metrics())
        if record.settings is not None:
            record.counts.check_seen(record.settings, rows)
        metrics.update(record.counts.metrics())
        record.notes.clear()
    record.guard.end_batch(batch.partition_id)
    return sampled
