"""Measures time and memory of two functions, and makes the table of their ratios."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from verl_gdpo.terminal import render

MIN_ROUNDS, MAX_ROUNDS = 5, 25
SECONDS_PER_PAIR = 3.0  # rounds are added until this time is spent
HEADER = ("what", "size", "ours", "peer", "peer's", "ratio", "goal", "met")


@dataclass(frozen=True)
class Row:
    """One line of the table; `ours` and `peers` are both seconds or both bytes."""

    what: str
    size: str
    ours: float
    peer: str
    peers: float
    says: Literal["faster", "the peer's"] = "faster"
    goal: float | None = None
    unit: Literal["s", "B"] = "s"

    @property
    def ratio(self) -> float:
        return self.peers / self.ours if self.says == "faster" else self.ours / self.peers

    @property
    def missed(self) -> bool:
        if self.goal is None:
            return False
        return self.ratio < self.goal if self.says == "faster" else self.ratio > self.goal

    def cells(self) -> tuple[str, ...]:
        bound, met = "", ""
        if self.goal is not None:
            bound = f"{'>=' if self.says == 'faster' else '<='} {self.goal:g}"
            met = "NO" if self.missed else "yes"
        ratio = f"{self.ratio:.3g} x {self.says}"
        ours, peers = _amount(self.ours, self.unit), _amount(self.peers, self.unit)
        return self.what, self.size, ours, self.peer, peers, ratio, bound, met


def seconds_of(
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Return the fastest of alternating calls, because other work on a machine only adds time.

    With `time.process_time` as clock, the time in which others have the processor does not count.
    """
    samples: tuple[list[float], list[float]] = ([], [])
    spent = 0.0
    while len(samples[0]) < MIN_ROUNDS or (
        spent < SECONDS_PER_PAIR and len(samples[0]) < MAX_ROUNDS
    ):
        for function, times in zip((ours, peer), samples, strict=True):
            times.append(_seconds(function, device, clock))
            spent += times[-1]
    return min(samples[0]), min(samples[1])


def _seconds(
    function: Callable[[], Any], device: torch.device, clock: Callable[[], float]
) -> float:
    _synchronize(device)
    start = clock()
    result = function()
    _synchronize(device)
    elapsed = clock() - start
    del result  # freeing the result does not count
    return elapsed


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that a call adds at any moment, including its result."""
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is freed but kept would hide new memory
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def table(rows: Sequence[Row]) -> str:
    return render(HEADER, [row.cells() for row in rows], left=range(len(HEADER)))


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 1e6:.0f} MB"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
