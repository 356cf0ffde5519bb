"""The columns that a dump has of us: rewards, trained tokens and advantage of each row.

Relies on verl 0.9: a trainer computes the advantages of a step before it dumps its rollouts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.values import NOTES_KEY, RESPONSE_KEY, as_json
from verl_gdpo.hooks.advantage_step import AdvantageStep, TokenAdvantages


class DumpBatch(NamedTuple):
    """A batch whose advantages are computed, for the dump of its step."""

    number: int  # Its place among the batches of the step.
    rows: BatchRows
    advantages: TokenAdvantages
    response_length_B: Sequence[int]

    def columns_of_rows(self) -> dict[str, dict[str, Any]]:
        """Return {key: {column: value}} of its rows."""
        columns_of = {}
        for row, key in enumerate(self.rows.keys):
            info = self.rows.extra_info(row)
            # A row that came without our agent loop workers has none.
            rollout = self.rows.rollouts.get(row, {})
            columns_of[str(key)] = {
                "group": key.uid,
                "session": key.session,
                "data_source": self.rows.sources[row],
                "response_tokens": self.response_length_B[row],
                "generated_tokens": rollout.get("generated_tokens"),
                "trained_tokens": int(self.advantages.trained_B[row]),
                "tool_seconds": rollout.get("tool_seconds"),
                "as_scored": info.get(RESPONSE_KEY),
                "rewards": _rewards_of(info),
                "advantage": float(self.advantages.advantage_B[row]),
                "batch": self.number,
                "is_padding": bool(self.rows.is_padding_B[row]),
            }
        return columns_of


def _rewards_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the scorer returned for a row, as JSON can hold it.

    Args:
        info: verl's reward_extra_info of the row.
    """
    rewards = {}
    for name, value in info.items():
        # verl writes the score itself, and notes are for the metrics of the step alone.
        if name not in ("score", NOTES_KEY, RESPONSE_KEY):
            rewards[str(name)] = as_json(value, str(name))
    return rewards


class DumpRows:
    """Keeps the batches of a step until the next one. A step may have several, and several dumps.

    Some trainers dump few steps, so a batch is made columns when a dump first asks.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._batch_count = 0
        self._not_yet_asked_for: list[DumpBatch] = []
        self._columns_of: dict[str, dict[str, Any]] = {}  # {key: {column: value}}

    def add(self, response_length_B: Sequence[int], step: AdvantageStep) -> None:
        """Keep a batch.

        Args:
            response_length_B: the length of each response in tokens.
            step: of these rows, in the same order, with its advantages.
        """
        advantages = step.computed
        if step.rows.step != self._step:
            # verl has dumped a step before it computes the advantages of the next one.
            self._step = step.rows.step
            self._batch_count = 0
            self._not_yet_asked_for.clear()
            self._columns_of.clear()
        # The step itself is not kept, because its matrices would stay in memory.
        batch = DumpBatch(self._batch_count, step.rows, advantages, response_length_B)
        self._not_yet_asked_for.append(batch)
        self._batch_count += 1

    def columns(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Return {name: values in the order of `keys`}.

        Raises:
            RuntimeError: a key is in no batch.
        """
        for batch in self._not_yet_asked_for:
            self._columns_of |= batch.columns_of_rows()
        self._not_yet_asked_for.clear()

        # A dump without our columns would say nothing of the rewards, and nobody would see why.
        unknown = [key for key in keys if key not in self._columns_of]
        if unknown:
            raise RuntimeError(
                f"dump: {len(unknown)} of {len(keys)} rows were in no batch with computed "
                f"advantages, such as {unknown[0]}. verl-gdpo expects verl's "
                "_compute_advantage to run before _log_rollout_data, on the same rows; a trainer "
                "of your own that does otherwise works with trainer.rollout_data_dir=null"
            )

        # All rows have the same columns, also where a dump has no row.
        names = next(iter(self._columns_of.values()), {})
        columns = {}
        for name in names:
            columns[name] = [self._columns_of[key][name] for key in keys]
        return columns
