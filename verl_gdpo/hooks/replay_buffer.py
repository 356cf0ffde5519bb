"""Extends verl's replay buffers: checks rewards, and keeps the groups that give a gradient.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_gdpo.algorithm.group_filter import SUM_METRICS, FilterMetric, classify_groups
from verl_gdpo.algorithm.samples import BatchRows, check_names, group_of, split_key
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.rollout_guard import Prompts, RolloutGuard

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

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
    found = [known[key] for key in keys]
    padding = [bool(tag.get("is_padding")) for tag in tags]
    return BatchRows.from_keys(
        keys, [info for info, _ in found], [source for _, source in found], padding
    )


def _column(fetched: Any, name: str) -> list[Any]:
    """Return a column as a list: TransferQueue returns a list, a NonTensorStack or an array."""
    column = fetched.get(name)
    return column.tolist() if hasattr(column, "tolist") else list(column)


class GdpoBuffer(ReplayBuffer):  # type: ignore[misc]  # verl is seen as Any
    """Stands in front of verl's replay buffers, and of those that a user derives from them.

    It stops the run if a sample could not be scored. This is the first place in the trainer that
    sees a rollout: group filtering has not dropped it yet, and validation comes here too. It also
    stops the run if rollouts are lost. It sorts each batch by the time when verl sent out its
    prompts, because the order decides which rows share a mini-batch.
    """

    trainer_mode: str = "sync"  # a buffer of the user may lack it
    guard: RolloutGuard
    in_rounds: bool = False  # True: filter only when all prompts that were sent out are done
    filter_groups_metric: str | None = None  # a buffer of the user may lack it
    known_rows: KnownRows  # rows fetched since the last advantage step; the trainer uses them too
    gdpo: GdpoSettings | None = None  # None: verl's own rule filters groups
    metric: FilterMetric = FilterMetric(None)
    step: int | None = None

    def filter_by(self, settings: GdpoSettings) -> None:
        """Make `algorithm.filter_groups` keep the groups that give a gradient under `settings`."""
        self.gdpo = settings
        if self.filter_groups_metric is not None:
            name = None if self.filter_groups_metric in SUM_METRICS else self.filter_groups_metric
            self.metric = FilterMetric(name)
            logger.info(
                "verl-gdpo: algorithm.filter_groups keeps the groups in which the sum of the "
                "normalised rewards is not 0%s",
                f" and {name!r} varies" if name else "",
            )

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch, metrics = super().sample(*args, **kwargs)
        rows = self._rows(batch.keys, batch.partition_id, batch.tags)
        if batch.partition_id != "val":
            self.metric.check_known(rows)
            metrics |= self.metric.metrics()
        self.guard.end_batch(batch.partition_id)
        return batch, metrics

    def _rows(self, keys: Sequence[str], partition_id: str, tags: Any) -> BatchRows:
        """Return what the reward manager said of these rows; raise if it could not score one."""
        rows = fetch_rows(keys, partition_id, tags, self.known_rows)
        rows.raise_on_error()
        return rows

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        partitions = {*self.finished_keys, *self.failure_keys}
        self.guard.check({name: self._prompts_of(name) for name in partitions})

    def _prompts_of(self, partition_id: str) -> Prompts:
        """Return the prompts that ended, and which of them are lost.

        The asynchronous trainers replace each failed prompt. The sync trainer and validation go on
        with the rollouts that are left of it: one gives a score, but only two give an advantage.
        """
        failed, is_val = self.failure_keys[partition_id], partition_id == "val"
        sessions = {split_key(key)[0] for key in self.partitions[partition_id]} if failed else ()
        left = Counter(split_key(session)[0] for session in sessions)
        is_replaced = self.trainer_mode != "sync" and not is_val
        under_way = self.pending_keys[partition_id], self.running_keys[partition_id]
        return Prompts(
            ended=self.finished_keys[partition_id] | failed,
            failed=set(failed),
            lost={uid for uid in failed if is_replaced or left[uid] < (1 if is_val else 2)},
            under_way=sum(map(len, under_way)),
        )

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        """Read the errors of the groups that verl drops: stale, failed, without signal, surplus."""
        tags = self.partitions[partition_id]
        keys = [key for key in tags if group_of(key) in uids]
        if keys:
            self._rows(keys, partition_id, [tags[key] for key in keys])
        super()._clear_groups(partition_id, uids)

    def _is_early(self, partition_id: str) -> bool:
        """Return whether prompts are still running although the buffer must wait for all of them.

        Otherwise the batch would depend on which prompts finish first.
        """
        in_flight = self.pending_keys[partition_id] or self.running_keys[partition_id]
        return self.in_rounds and bool(in_flight)

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> Any:
        if self._is_early(partition_id):
            return set()
        return super()._sampleable_terminal_keys(partition_id, eviction_reasons)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> Any:
        select = super()._select_prompt_uids
        uids: Collection[str] = sampleable_keys
        if select.__func__ is ReplayBuffer._select_prompt_uids:
            # verl sorts by the step alone; a sampler of the user gets the set, as from verl
            uids = [uid for uid in self.prompt_global_steps[partition_id] if uid in uids]
        selected = select(partition_id, uids, batch_size)
        if not {*selected[0]} & {*map(group_of, selected[1])}:
            self.guard.raise_failed(f"all {len(selected[0])}", partition_id, min(selected[0]))
        return selected

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, Any]
    ) -> Any:
        place = {uid: number for number, uid in enumerate(selected_prompt_uids)}

        def order(key: str) -> tuple[int, int, int]:
            session, index = split_key(key)
            uid, number = split_key(session)
            return place[uid], number, index

        keys = sorted((key for key in partition_snapshot if group_of(key) in place), key=order)
        in_order = {key: partition_snapshot[key] for key in keys}
        return super()._materialize_batch(partition_id, selected_prompt_uids, in_order)

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        self.step = global_steps
        return super()._terminal_eviction_reasons(global_steps, partition_id)

    def _dapo_filtered_keys(self, partition_id: str) -> Any:
        if self._is_early(partition_id):
            return set(), Counter()
        if partition_id != "val" and self.filter_groups_metric is not None:
            self._classify_finished(partition_id)
        return super()._dapo_filtered_keys(partition_id)

    def _classify_finished(self, partition_id: str) -> None:
        """Put new finished groups into verl's cache, which decides which groups verl keeps."""
        cache, tags = self._dapo_classification_cache[partition_id], self.partitions[partition_id]
        fresh = self.finished_keys[partition_id] - cache.keys()
        keys = [key for key in tags if group_of(key) in fresh]
        if not keys:
            return
        rows = self._rows(keys, partition_id, [tags[key] for key in keys])
        if self.gdpo is not None:
            groups, rows = [group_of(key) for key in keys], replace(rows, step=self.step)
            cache.update(classify_groups(rows, groups, self.gdpo, self.metric.read(rows)))
