"""Holds the rows of a file in little memory: one of GSM8K takes 170 bytes, and as objects 3 kB."""

import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.tasks.preparation.schema import Row


class PackedRows(Sequence[Row]):
    """Rows that are unpacked one by one, as JSON gives them back."""

    def __init__(self) -> None:
        self._packed, self._ends = bytearray(), array("q", [0])
        self._first = b""  # what others share with it, such as a system prompt, takes no room

    def append(self, row: Row) -> None:
        text = json.dumps(row).encode()
        self._first = self._first or text
        packer = zlib.compressobj(1, zdict=self._first)
        self._packed += packer.compress(text) + packer.flush()
        self._ends.append(len(self._packed))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        packed = self._packed[self._ends[index] : self._ends[index + 1]]
        return json.loads(zlib.decompressobj(zdict=self._first).decompress(packed))


class PickedRows(Sequence[Row]):
    """Some of the rows in another order, with their new index and split in `extra_info`."""

    def __init__(self, rows: Sequence[Row], places: npt.NDArray[np.int64], split: str) -> None:
        self._rows, self._places, self._split = rows, places, split

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[int(self._places[index])]
        return {**row, "extra_info": {**row["extra_info"], "index": index, "split": self._split}}
