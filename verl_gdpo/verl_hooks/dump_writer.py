"""Adds our columns to verl's rollout dumps; `dump_reader.py` describes and reads the dumps."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_gdpo.batch.rows import NOTES_KEY, as_json, split_key
from verl_gdpo.verl_hooks.step import Step


class DumpRows:
    """Keeps the rows of a step until the next one. It may have several batches, and dumps."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._row_of: dict[str, int] = {}  # {key: row number}
        self._columns: dict[str, list[Any]] = {}

    def add(self, keys: Sequence[str], response_length_B: Sequence[int], step: Step) -> None:
        """Keep a batch.

        Args:
            keys: `{uid}_{session}_{index}` of each row.
            response_length_B: the length of each response in tokens.
            step: of these rows, in the same order, with its outcome.
        """
        assert step.rows is not None
        if step.rows.step != self._step:  # some trainers dump none
            self._row_of.clear()
            self._columns.clear()
            self._step = step.rows.step
        first = len(self._columns.get("group", ()))
        self._row_of.update(zip(keys, itertools.count(first), strict=False))
        for name, values in _columns(keys, response_length_B, step).items():
            self._columns.setdefault(name, []).extend(values)

    def columns(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Return {name: values in the order of `keys`}.

        Raises:
            RuntimeError: a key is in no batch.
        """
        unknown = [key for key in keys if key not in self._row_of]
        if unknown:
            raise RuntimeError(
                f"rollout dump: {len(unknown)} of {len(keys)} rows were in no batch with computed "
                f"advantages, such as {unknown[0]}. verl-gdpo expects verl's "
                "_compute_advantage to run before _log_rollout_data, on the same rows; a trainer "
                "of your own that does otherwise works with trainer.rollout_data_dir=null"
            )
        order = [self._row_of[key] for key in keys]
        return {name: [values[row] for row in order] for name, values in self._columns.items()}


def _columns(
    keys: Sequence[str], response_length_B: Sequence[int], step: Step
) -> dict[str, Iterable[Any]]:
    groups, sessions = zip(*(split_key(split_key(key)[0]) for key in keys), strict=True)
    rows, outcome = step.rows, step.computed
    assert rows is not None
    return {
        "group": groups,
        "session": sessions,
        "data_source": rows.sources,
        "response_tokens": response_length_B,
        "trained_tokens": outcome.trained_B.tolist(),
        "rewards": [_rewards(rows.info(row)) for row in range(len(rows))],
        "advantage": outcome.advantage_B.tolist(),
        "is_padding": rows.is_padding_B.tolist(),
    }


def _rewards(info: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: info[name] for name in info if name not in ("score", NOTES_KEY)}
    return {str(name): as_json(value) for name, value in shown.items()}
