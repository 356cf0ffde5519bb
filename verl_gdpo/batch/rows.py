"""What the reward manager said of each row of a batch.

Between verl's trainers, which know rows by key, and the advantage, which knows only numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

# a key of verl's reward_extra_info: the reward manager could not score this sample, and why
ERROR_KEY = "gdpo_error"
# stands in a column for a row without that key; None is a reward that does not apply
ABSENT = object()


class RewardError(RuntimeError):
    """A sample has no usable reward, so the run has to stop."""


@dataclass(frozen=True)
class RewardRows:
    """One batch in the order in which the estimator sees it; B rows.

    A session is one rollout. An agent loop may split it into several rows, and its reward stands
    for all of them: only the last row of a session is counted.
    """

    label: Callable[[int], str]  # how messages call a row
    columns: Mapping[str, Sequence[Any]]  # verl's reward_extra_info by key, ABSENT where not there
    sources: Sequence[str]  # verl's data_source; rows of one source have the same rewards
    session_B: npt.NDArray[np.int64]  # number of the row that stands for the row's session
    is_padding_B: npt.NDArray[np.bool_]
    step: int | None = None  # the training step, for weights with a schedule

    @classmethod
    def from_keys(
        cls,
        keys: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
        sources: Sequence[str],
        is_padding: Sequence[bool],
        step: int | None = None,
    ) -> "RewardRows":
        """Rows of verl's TransferQueue, whose keys are `{uid}_{session}_{index}`."""
        last: dict[str, int] = {}
        for row, (session, index) in enumerate(map(split_key, keys)):
            if session not in last or index > split_key(keys[last[session]])[1]:
                last[session] = row
        return cls(
            label=keys.__getitem__,
            columns={
                name: [info.get(name, ABSENT) for info in infos]
                for name in dict.fromkeys(chain.from_iterable(infos))
            },
            sources=sources,
            session_B=np.array([last[split_key(key)[0]] for key in keys], dtype=np.int64),
            is_padding_B=np.array(is_padding, dtype=np.bool_),
            step=step,
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], size: int) -> "RewardRows":
        """Rows of a DataProto (the legacy trainer): no padding, one row a session.

        verl has given all of them the same columns, so they pass for one data source.
        """
        return cls(
            label="row {}".format,
            columns={
                name: column.tolist() if isinstance(column, np.ndarray) else column
                for name, column in columns.items()
            },
            sources=[""] * size,
            session_B=np.arange(size),
            is_padding_B=np.zeros(size, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.session_B)

    def info(self, row: int) -> dict[str, Any]:
        """verl's reward_extra_info of one row."""
        values = {name: column[row] for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not ABSENT}

    @property
    def counted_B(self) -> npt.NDArray[np.bool_]:
        """Real rows that stand for their session: what every statistic is taken over."""
        stands_for_itself_B: npt.NDArray[np.bool_] = self.session_B == np.arange(len(self))
        return stands_for_itself_B & ~self.is_padding_B

    def raise_on_error(self) -> None:
        """Stop if the reward manager reported a sample that it could not score."""
        errors = self.columns.get(ERROR_KEY, [])
        failed = [
            error
            for error, is_padding in zip(errors, self.is_padding_B, strict=False)
            if error is not ABSENT and not is_padding
        ]
        if failed:
            raise RewardError(
                f"{len(failed)} of {len(self)} samples could not be scored. The first: {failed[0]}"
            )


def split_key(key: str) -> tuple[str, int]:
    """`{uid}_{session}_{index}` as (`{uid}_{session}`, index)."""
    session, index = key.rsplit("_", 1)
    return session, int(index)


def group_of(key: str) -> str:
    """The uid in `{uid}_{session}_{index}`: samples of one prompt share it."""
    return key.rsplit("_", 2)[0]
