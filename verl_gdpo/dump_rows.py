"""What we add to verl's rollout dumps. `rollouts.py` says what they hold, and reads them."""

from collections.abc import Sequence
from typing import Any

from verl_gdpo.outcome import Outcome
from verl_gdpo.plain import as_json
from verl_gdpo.reward_rows import RewardRows, split_key


class DumpRows:
    """The rows of a step until they are dumped; a step may have several batches."""

    def __init__(self) -> None:
        self._batches: list[tuple[Sequence[str], Sequence[int], RewardRows, Outcome]] = []

    def add(self, batch: Any, rows: RewardRows, outcome: Outcome) -> None:
        """`batch` is verl's KVBatchMeta; `rows` and `outcome` are of its rows, in its order."""
        response_tokens = [tag["response_len"] for tag in batch.tags]
        self._batches.append((list(batch.keys), response_tokens, rows, outcome))

    def clear(self) -> None:
        self._batches.clear()

    def columns(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """{name: values in the order of `keys`}.

        Raises:
            RuntimeError: a key is of no batch.
        """
        place = {
            key: (number, row)
            for number, (of_batch, *_) in enumerate(self._batches)
            for row, key in enumerate(of_batch)
        }
        unknown = [key for key in keys if key not in place]
        if unknown:
            raise RuntimeError(
                f"rollout dump: {len(unknown)} of {len(keys)} rows were in no batch that an "
                f"advantage was computed for, such as {unknown[0]}. verl-gdpo expects verl's "
                "_compute_advantage to run before _log_rollout_data, on the same rows; a trainer "
                "of your own that does otherwise works with trainer.rollout_data_dir=null"
            )
        rows = [self._row(*place[key]) for key in keys]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _row(self, number: int, row: int) -> dict[str, Any]:
        keys, response_tokens, rows, outcome = self._batches[number]
        group, session = split_key(split_key(keys[row])[0])
        return {
            "group": group,
            "session": session,
            "data_source": rows.sources[row],
            "response_tokens": response_tokens[row],
            "trained_tokens": int(outcome.trained_B[row]),
            "rewards": {
                str(name): as_json(value)
                for name, value in rows.info(row).items()
                if name != "score"
            },
            "advantage": float(outcome.advantage_B[row]),
            "is_padding": bool(rows.is_padding_B[row]),
        }
