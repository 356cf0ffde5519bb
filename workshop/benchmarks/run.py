"""Times the stages of `./run_tool_rl.sh` without a GPU, from the environment to the table."""

import contextlib
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from verl_gdpo.tools.run_folder.folder import read_metrics
from workshop.benchmarks.measure import Row

REPO = Path(__file__).resolve().parents[2]
SECONDS_GOAL, START_GOAL, BYTES_GOAL = 420.0, 45.0, 6e9  # on two cores
START, STEPS = "verl starts", "verl trains"
MEMORY_SECONDS = 5.0  # between two looks at the memory, which cost some ms a process
PREFIX = "timing_s/"


def rows() -> Iterator[Row]:
    """Run the script once; yield its stages beside the whole, and the whole beside its goals."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        seconds, memory = timed([REPO / "run_tool_rl.sh", "hardware=cpu", f"run_dir={run}"])
        parts = parts_of_steps(read_metrics(run))
    total = sum(seconds.values())
    for name, value in seconds.items():
        yield Row(name, "stage", value, "whole run", total, "the peer's")
    for name, value in parts.items():
        yield Row(name, "of all steps", value, STEPS, seconds[STEPS], "the peer's")
    before = total - seconds[STEPS] - list(seconds.values())[-1]
    yield Row("total", "", total, "goal", SECONDS_GOAL, "the peer's", 1.0)
    yield Row("before step 1", "", before, "goal", START_GOAL, "the peer's", 1.0)
    yield Row("peak memory", "", memory, "goal", BYTES_GOAL, "the peer's", 1.0, "B")


def timed(command: list[str | Path]) -> tuple[dict[str, float], float]:
    """Return ({stage: seconds}, most bytes that all processes had at one time).

    Raises:
        RuntimeError: the script failed.
    """
    bytes_seen = [0.0]
    start = time.monotonic()
    lines = [(0.0, "== the environment")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        given = (script.pid, bytes_seen)
        threading.Thread(target=_look_at_memory, args=given, daemon=True).start()
        for line in script.stdout:
            print(line, end="", flush=True)
            lines.append((time.monotonic() - start, line.rstrip("\n")))
    if script.returncode:
        raise RuntimeError(f"{command} ended with exit code {script.returncode}")
    return stages_of([*lines, (time.monotonic() - start, "== end")]), max(bytes_seen)


def stages_of(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Return {stage: seconds} of the script's output, as (seconds since its start, line)."""
    begun: list[tuple[str, float]] = []
    for at, line in lines:
        name = _stage_begun_by(line, [name for name, _ in begun])
        if name:
            begun.append((name, at))
    ends = [at for _, at in begun[1:]]
    return {name: end - at for (name, at), end in zip(begun, ends, strict=False)}


def _stage_begun_by(line: str, before: list[str]) -> str | None:
    if line.startswith("== training"):
        return START
    if line.startswith("== checking"):  # beside the start
        return None
    if line.startswith("== "):
        return line[3:].partition(":")[0]
    if "s] step " in line and STEPS not in before:
        return STEPS
    if before[-1:] == [STEPS] and not line.startswith("["):
        return "the table"
    return None


def parts_of_steps(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return {part of a step, as verl names it: seconds of all steps}."""
    parts: Counter[str] = Counter()
    for values in metrics.values():
        timed = {k.removeprefix(PREFIX): v for k, v in values.items() if k.startswith(PREFIX)}
        parts.update({name: value for name, value in timed.items() if name != "step"})
    return dict(parts.most_common())


def _look_at_memory(script: int, bytes_seen: list[float]) -> None:
    """Append the memory of all processes of the script until it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while True:
            total = 0.0
            for process in psutil.Process(script).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss  # what is shared counts once
            bytes_seen.append(total)
            time.sleep(MEMORY_SECONDS)
